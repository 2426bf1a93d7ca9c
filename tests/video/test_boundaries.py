from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from capvid.errors import UsageError
from capvid.video.frame_sampling import RateSampling, UniformSampling
from capvid.video.segmentation import (
    PENALTY,
    AutoSegments,
    EqualSegments,
    ListedSegments,
    change_points,
    parse_segments,
)


def scenes(lengths: list[int], *, width: int = 16, seed: int = 0) -> np.ndarray:
    """Features (T, D) that stay near one place in each scene."""
    generator = np.random.default_rng(seed)
    places = generator.normal(size=(len(lengths), width)) * 3
    return np.concatenate(
        [place + generator.normal(size=(n, width)) * 0.5 for place, n in zip(places, lengths, strict=True)]
    ).astype(np.float32)


def best_cuts(features: np.ndarray, shortest: int) -> list[int]:
    """The cheapest cuts by trying every end of the last segment, in plain loops."""
    vectors = features - features.mean(0)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    best: list[tuple[float, list[int]]] = [(-PENALTY, [])]
    for end in range(1, len(vectors) + 1):
        found = (np.inf, [])
        for start in range(0, end - shortest + 1):
            part = vectors[start:end]
            cost = best[start][0] + PENALTY + ((part - part.mean(0)) ** 2).sum()
            if cost < found[0]:
                found = (cost, [*best[start][1], start] if start else [])
        best.append(found)
    return best[-1][1]


@pytest.mark.parametrize("lengths", [[30, 20, 40], [25, 26], [12, 12, 12, 12, 12]])
def test_changes_are_found_where_they_are(lengths: list[int]) -> None:
    assert change_points(scenes(lengths), 4) == list(np.cumsum(lengths)[:-1])


@pytest.mark.parametrize("seed", range(5))
def test_the_cuts_are_the_cheapest(seed: int) -> None:
    features = np.random.default_rng(seed).normal(size=(40, 6)).cumsum(0)
    assert change_points(features, 3) == best_cuts(features, 3)


def test_wide_features_and_maps_are_cut_alike() -> None:
    features = scenes([30, 20, 40], width=200)
    assert change_points(features, 4) == [30, 50]
    maps = np.stack([features + 1, features - 1], 1)  # (T, 2, D)
    assert change_points(maps, 4) == [30, 50]


def test_what_is_always_the_same_is_not_cut() -> None:
    assert change_points(np.ones((100, 8), np.float32), 4) == []
    assert change_points(scenes([6]), 4) == []
    assert change_points(scenes([1]), 4) == []


def test_the_segments_cover_the_video_and_are_two_seconds_at_least() -> None:
    features = np.random.default_rng(0).normal(size=(120, 8)).cumsum(0)
    times = 0.25 + np.arange(120) / 2
    spans = AutoSegments().spans(Path("v.mp4"), features, times, 60.0)
    assert spans[0][0] == 0 and spans[-1][1] == 60 and len(spans) > 2
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    assert min(end - start for start, end in spans) >= 2
    cuts = change_points(features, 4)
    assert [start for start, _ in spans[1:]] == [(times[c - 1] + times[c]) / 2 for c in cuts]


def test_times_ascend_whenever_the_first_frame_is_shown() -> None:
    features = np.random.default_rng(0).normal(size=(120, 8)).cumsum(0)
    spans = AutoSegments().spans(Path("v.mp4"), features, 20 + np.arange(120) / 2, 60.0)
    assert all(start < end for start, end in spans) and spans[-1][1] == 60


def test_twice_a_second_is_looked_at_and_28_times_at_least() -> None:
    path, like = Path("v.mp4"), UniformSampling(10)
    times = np.arange(3000) / 25
    assert len(AutoSegments().choose(path, times, 120.0, like)) == 240
    assert len(AutoSegments().choose(path, times[:200], 8.0, like)) == 28
    assert len(AutoSegments().choose(path, times[:5], 0.2, like)) == 5
    assert len(AutoSegments().choose(path, times, 120.0, RateSampling(1))) == 120


def test_what_segments_can_be(tmp_path: Path) -> None:
    assert parse_segments("auto") == AutoSegments()
    assert parse_segments("7") == EqualSegments(7)
    (tmp_path / "7.csv").write_text("0,1\n")
    assert isinstance(parse_segments(str(tmp_path / "7.csv")), ListedSegments)
    for text in ("--5", "\u00b2", "9" * 5000):
        with pytest.raises((UsageError, OSError)):
            parse_segments(text)
    for text in ("0", "-3"):
        with pytest.raises(UsageError, match="segments cannot be made"):
            parse_segments(text)
    with pytest.raises(UsageError, match="no such file of segments"):
        parse_segments("scenes")
