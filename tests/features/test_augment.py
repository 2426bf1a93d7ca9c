"""Augmented views: what is drawn, what of a frame is seen, and what views are called."""

from __future__ import annotations

import zlib
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from capvid.backbones.catalog import Clip, Preprocess
from capvid.backbones.preprocessing import prepare
from capvid.features.augmentation import Augmentation, FrameView
from capvid.features.feature_store import video_of_view, view_key, views_of
from capvid.features.prefetch import View
from capvid.video.frame_sampling import UniformSampling

WHOLE = FrameView(
    left=0.0, top=0.0, width=1.0, height=1.0, mirrored=False, brightness=1.0, contrast=1.0, saturation=1.0
)


def how(**values: Any) -> Preprocess:
    plain = {"order": "RGB", "scale": 255.0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return Preprocess(**{**plain, **values})


def ramp(height: int, width: int) -> np.ndarray:
    """A frame that says where each pixel is: red is 40 + the column, green 30 + the row."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([40 + columns, 30 + rows, np.full((height, width), 90)], 2).astype(np.uint8)


def recolor(picture: np.ndarray, view: FrameView) -> np.ndarray:
    """The same in float64, pixel by pixel."""
    grey = picture @ np.array([0.299, 0.587, 0.114])
    mixed = view.saturation * picture + (1 - view.saturation) * grey[:, :, None]
    return view.brightness * (view.contrast * mixed + (1 - view.contrast) * grey.mean())


def test_what_is_drawn_depends_on_the_number_and_the_key_alone() -> None:
    views = Augmentation(2, "a/clip").draw(5)
    assert views == Augmentation(2, "a/clip").draw(9)[:5]
    drawn = np.random.default_rng([2, zlib.crc32(b"a/clip")]).random((5, 8))
    assert views == [FrameView.of(row) for row in drawn]
    others = [Augmentation(1, "a/clip").draw(5), Augmentation(2, "a/other").draw(5)]
    rows = [astuple(view) for some in (views, *others) for view in some]
    assert len({row[5] for row in rows}) == 15


def test_views_are_drawn_from_their_ranges() -> None:
    views = Augmentation(1, "clip").draw(4000)
    left, top, width, height, mirrored, *light = np.array([astuple(view) for view in views]).T
    area, aspect = width * height, width / height
    assert 0.5 <= area.min() < 0.51 and 0.97 < area.max() <= 1
    assert 0.85 <= aspect.min() < 0.86 and 1.17 < aspect.max() <= 1.18
    assert abs(area.mean() - 0.75) < 0.02 and abs(np.log(aspect).mean()) < 0.01
    for first, size in ((left, width), (top, height)):
        assert first.min() >= 0 and (first + size).max() <= 1 + 1e-12
        assert abs((first[size < 1] / (1 - size[size < 1])).mean() - 0.5) < 0.02
    assert abs(mirrored.mean() - 0.5) < 0.03
    for change in light:
        assert 0.8 <= change.min() < 0.81 and 1.19 < change.max() <= 1.2


@pytest.mark.parametrize("shape", [{"size": (24, 32)}, {"resize": 40, "crop": 30}])
def test_a_view_shows_its_part_in_its_light(shape: dict[str, Any]) -> None:
    """A ramp stays a ramp, so that every pixel's place and colour can be foreseen."""
    frames = np.stack([ramp(90, 120)] * 6)
    made = Augmentation(1, "clip")
    found = made.prepare(frames, how(**shape))
    views = made.draw(6)
    assert {view.mirrored for view in views} == {True, False}
    height, width = shape.get("size", (30, 30))
    for picture, view in zip(found, views, strict=True):
        # of the short side 40 that the view would have, 30 pixels in the middle
        rows = (np.arange(height) + 0.5) / height * (1 if "size" in shape else 0.75)
        columns = (np.arange(width) + 0.5) / width * (1 if "size" in shape else 30 / 53)
        if "crop" in shape:
            rows, columns = rows + 5 / 40, columns + 11 / 53
        y = 90 * (view.top + view.height * rows) - 0.5
        x = 120 * (view.left + view.width * columns) - 0.5
        if view.mirrored:
            x = x[::-1]
        grid = np.broadcast_arrays(40 + x[None], 30 + y[:, None], np.full((height, width), 90.0))
        expected = recolor(np.stack(grid, 2), view)
        inner = np.s_[2:-2, 2:-2]  # at the edges of the frame there is less to average
        np.testing.assert_allclose(picture[inner], expected[inner], atol=2)


@pytest.mark.parametrize("aspects", [None, (1.0, 1.4)])
@pytest.mark.parametrize("shape", [{"size": (24, 32)}, {"resize": 40, "crop": 30}])
def test_the_whole_frame_in_its_own_light_is_the_frame(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], aspects: tuple[float, float] | None
) -> None:
    monkeypatch.setattr(Augmentation, "draw", lambda _, num_frames: [WHOLE] * num_frames)
    frames, plain = np.stack([ramp(60, 120)] * 2), how(**shape, aspects=aspects)
    seen = Augmentation(1, "clip").prepare(frames, plain).astype(int)
    inner = np.s_[:, 2:-2, 2:-2] if aspects else np.s_[:]
    assert np.abs(seen - prepare(frames, plain))[inner].max() <= 1
    monkeypatch.undo()
    assert np.abs(seen - Augmentation(1, "clip").prepare(frames, plain)).max() > 5


def test_black_borders_are_cut_before_a_part_is_taken() -> None:
    inside = np.random.default_rng(0).integers(50, 256, (3, 60, 80, 3), np.uint8)
    boxed = np.pad(inside, ((0, 0), (12, 12), (0, 0), (0, 0)))
    made, trimmed = Augmentation(1, "clip"), how(size=(24, 32), trim=True)
    assert (made.prepare(boxed, trimmed) == made.prepare(inside, trimmed)).all()
    assert (made.prepare(boxed, how(size=(24, 32))) != made.prepare(inside, trimmed)).any()


def test_the_smallest_frames_have_views() -> None:
    frames = np.full((40, 1, 1, 3), 100, np.uint8)
    seen = Augmentation(1, "clip").prepare(frames, how(resize=8, crop=8))
    lights = [view.brightness for view in Augmentation(1, "clip").draw(40)]
    np.testing.assert_allclose(seen[:, 3, 4, 1], 100 * np.array(lights), atol=0.51)


def test_clips_are_not_augmented() -> None:
    clip, augmentation = Clip(frames=2, stride=1), Augmentation(1, "clip")
    view = View(preprocess=how(size=(2, 2)), clip=clip, augmentation=augmentation)
    with pytest.raises(ValueError, match="frames of a clip"):
        view.windows(UniformSampling(2))


def test_names_of_views() -> None:
    assert view_key("a/clip", 3) == "a/clip@3"
    assert video_of_view("a/clip@3") == "a/clip" and video_of_view("clip@2@10") == "clip@2"
    none = ["clip", "clip@", "clip@0", "clip@01", "clip@x", "@1", "clip@-1", "clip@\u0663", "clip@1/x"]
    assert [video_of_view(key) for key in none] == [None] * len(none)
    held = ["a", "a@10", "a@2", "b", "b@1", "b@1@1", "c@1", "a@x"]
    assert views_of(["a", "b"], held) == {"a": ["a@2", "a@10"], "b": ["b@1"]}
    assert views_of(["a", "b", "b@1"], held) == {"a": ["a@2", "a@10"], "b@1": ["b@1@1"]}
