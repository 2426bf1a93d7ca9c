"""Features of many frames, decoded part by part."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from toy import Toy, bad_files, toy, toy_files, write_video

from capvid.backbones.backbone import Backbone, load_backbone
from capvid.features import prefetch as parts
from capvid.features.extraction import DecodeStage, compute_features, extract, views_of
from capvid.features.prefetch import Video, read_timeline, split_video
from capvid.video.frame_sampling import RateSampling, UniformSampling
from capvid.video.readers import open_video
from capvid.video.worker_pool import WorkerPool

__all__ = ["bad_files", "toy", "toy_files"]


def test_the_timeline_is_what_the_reader_says(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", seed=1, frames=13)
    times, duration, jumps = read_timeline(path, "auto")
    with open_video(path) as source:
        assert times.tolist() == source.frame_times().tolist()
        assert (duration, jumps) == (source.info.duration, source.jumps)


@dataclass
class Chosen:
    """A cut that needs what a function chooses of the times of a video's frames."""

    choice: Callable[[np.ndarray], np.ndarray]
    asked: list[Path] = field(default_factory=list)

    def choose(self, path: Path, times: np.ndarray, duration: float, sampling: object) -> np.ndarray:
        self.asked.append(path)
        return self.choice(times)


def extracted(paths: Iterable[Path], backbones: list[Backbone], cut: Chosen, pool: WorkerPool) -> Generator:
    """Features by the stages that a pipeline has."""
    stage = DecodeStage(
        views=tuple(views_of(backbones)),
        sampling=UniformSampling(4),
        segmentation=cut,
        thumbnails=True,
        frames=4,
    )
    with closing(stage.videos(pool, paths)) as videos:
        yield from compute_features(videos, backbones, UniformSampling(4), batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3, 128])
def test_parts_together_are_the_whole(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_files: dict[str, Path], at_once: int
) -> None:
    monkeypatch.setattr(parts, "CHUNK_FRAMES", at_once)
    paths = [write_video(tmp_path / f"v {n}.mp4", seed=n, frames=5 + 6 * n) for n in range(3)]
    paths.insert(1, bad_files["text"])
    backbones = [load_backbone("toy", weights=toy.weights)]
    dense = RateSampling(5)

    with WorkerPool(2) as pool:
        whole = list(extract(paths, backbones, dense, pool=pool))
        found = list(extracted(paths, backbones, Chosen(dense.choose), pool))
    assert [result.path for result in found] == paths
    assert [result.error is None for result in found] == [True, False, True, True]
    assert str(found[1].error) == str(whole[1].error)
    for one, other in zip(found, whole, strict=True):
        if one.features is None or other.features is None:
            continue
        assert one.features.times.tolist() == other.features.times.tolist()
        assert one.features.duration == other.features.duration
        assert one.features.video == other.features.video
        assert np.array_equal(one.features.streams[0], other.features.streams[0])
        assert one.features.header.sampling == "uniform:4"
        assert len(one.thumbnails) == len(one.features)
        assert all(picture.startswith(b"\xff\xd8") for picture in one.thumbnails)


@pytest.mark.parametrize(("jumps", "parts_of"), [(True, [128, 128, 44]), (False, [300])])
def test_parts_are_long_where_each_is_decoded_from_the_beginning(jumps: bool, parts_of: list[int]) -> None:
    timeline = np.arange(300) / 10, 30.0, jumps
    cut = Chosen(lambda times: np.arange(300))
    split = split_video(Video.of("v.mp4"), timeline, UniformSampling(4), cut)
    assert [len(part.sampling.times) for part in split] == parts_of
    assert {part.num_chunks for part in split} == {len(split)}


def test_no_frames_are_decoded_that_nobody_asks_for(toy: Toy, tmp_path: Path) -> None:
    paths = [write_video(tmp_path / f"{n}.mp4", seed=n, frames=10) for n in range(16)]
    cut = Chosen(lambda times: np.array([0, 7]))
    backbones = [load_backbone("toy", weights=toy.weights)]
    with WorkerPool(1) as pool:
        results = extracted(iter(paths), backbones, cut, pool)
        first = next(results)
        results.close()
    assert first.features is not None and first.features.times.tolist() == pytest.approx([0.0, 0.7])
    assert cut.asked == paths[: len(cut.asked)] and len(cut.asked) < 16
