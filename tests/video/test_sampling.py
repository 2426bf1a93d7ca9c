from __future__ import annotations

import numpy as np
import pytest

from capvid.errors import UsageError
from capvid.video.frame_sampling import (
    LimitedSampling,
    RateSampling,
    Sampling,
    UniformSampling,
    WindowSampling,
    nearest,
    parse_sampling,
)


def test_middles_of_equal_slices() -> None:
    times = np.arange(100) / 10  # 0 to 9.9, the last shown until 10
    assert UniformSampling(4).choose(times).tolist() == [13, 38, 63, 88]  # 1.25, 3.75, 6.25, 8.75 s
    assert UniformSampling(1).choose(times).tolist() == [50]


def test_time_counts_and_not_the_number_of_the_frame() -> None:
    times = np.concatenate([np.arange(90) / 90, 1 + np.arange(10)])  # most in the first second
    chosen = UniformSampling(4).choose(times)
    assert chosen.tolist() == [90, 93, 95, 98]  # by number it would be 12, 37, 62, 87


def test_last_frame_lasts_as_long_as_the_median_one() -> None:
    times = np.array([0.0, 1.0, 2.0, 3.0, 7.0])  # until 8: the middles are at 2 and 6 s
    assert UniformSampling(2).choose(times).tolist() == [2, 4]
    assert UniformSampling(2).choose(times[:4]).tolist() == [1, 3]


def test_of_two_equally_near_frames_the_later_is_taken() -> None:
    assert nearest(np.array([0.5, 2.5]), np.array([0.0, 1.0, 2.0, 3.0])).tolist() == [1, 3]


def test_an_offset_changes_nothing() -> None:
    times = np.sort(np.random.default_rng(0).uniform(0, 20, 200))
    assert (UniformSampling(7).choose(times) == UniformSampling(7).choose(times + 1234.5)).all()


@pytest.mark.parametrize("count", [1, 2, 5, 28])
def test_short_videos_give_every_frame_once(count: int) -> None:
    assert UniformSampling(28).choose(np.arange(count) / 25).tolist() == list(range(count))


def test_indices_are_ascending_distinct_and_inside() -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        times = np.sort(generator.exponential(1, generator.integers(1, 90)).cumsum())
        chosen = UniformSampling(int(generator.integers(1, 40))).choose(times)
        assert (np.diff(chosen) > 0).all()
        assert 0 <= chosen[0] <= chosen[-1] < len(times)


def test_as_text() -> None:
    assert parse_sampling("uniform:28") == UniformSampling(28)
    assert UniformSampling(28).spec() == "uniform:28"
    wrong = ["uniform", "uniform:", "uniform:x", "random:3", "uniform:0", "uniform:-2", "uniform:3+"]
    for text in (*wrong, "uniform:3+x", "uniform:+clean", "uniform:3+clean+clean", "uniform:3+clean\n"):
        with pytest.raises(UsageError):
            parse_sampling(text)


def test_clean_as_text() -> None:
    sampling = UniformSampling(10, clean=True)
    assert sampling.spec() == "uniform:10+clean"
    assert parse_sampling("uniform:10+clean") == sampling != UniformSampling(10)
    times = np.arange(100) / 10
    assert (sampling.choose(times) == UniformSampling(10).choose(times)).all()


@pytest.mark.parametrize(("fps", "rate"), [(2.0, 25), (2.0, 30), (1.0, 7), (0.5, 12), (5.0, 29.97)])
def test_a_rate_gives_the_middle_of_every_part(fps: float, rate: float) -> None:
    times = 3 + np.arange(int(20.4 * rate)) / rate
    chosen = RateSampling(fps).choose(times)
    parts = int(20.4 * fps + 0.5)
    wanted = [3 + (n + 0.5) / fps for n in range(parts)]
    assert chosen.tolist() == [plain_nearest(times, moment) for moment in wanted]


def plain_nearest(times: np.ndarray, moment: float) -> int:
    return min(range(len(times)), key=lambda n: (round(abs(times[n] - moment), 9), -n))


def test_a_rate_above_that_of_the_video_gives_every_frame_once() -> None:
    assert RateSampling(50).choose(np.arange(10) / 10).tolist() == list(range(10))
    assert RateSampling(0.01).choose(np.arange(10) / 10).tolist() == [5]
    assert RateSampling(2).choose(np.array([4.0])).tolist() == [0]
    assert RateSampling(2).choose(np.array([])).tolist() == []


def plain_windows(count: int, size: int, stride: int) -> list[list[int]]:
    """Whole windows of frames; of a video shorter than one, one with its last frame repeated."""
    if count < size:
        return [[*range(count), *[count - 1] * (size - count)]]
    return [list(range(first, first + size)) for first in range(0, count - size + 1, stride)]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 21, 22, 100, 101])
@pytest.mark.parametrize(("size", "stride"), [(16, 6), (1, 1), (5, 7)])
def test_windows_and_their_middles(count: int, size: int, stride: int) -> None:
    sampling, times = WindowSampling(size, stride), np.arange(count) / 25
    chosen, expected = sampling.choose(times), plain_windows(count, size, stride)
    assert len(chosen) == len(expected)
    if count >= size:
        assert chosen.tolist() == [window[size // 2] for window in expected]
    else:
        assert chosen.tolist() == [(count - 1) // 2]
    windows = sampling.windows(size, None)
    assert windows is not None and sampling.windows(size + 1, None) is None
    assert windows.choose(times, chosen).tolist() == expected
    assert len(sampling.choose(times[:0])) == 0


@pytest.mark.parametrize(
    ("text", "sampling"),
    [
        ("fps:2", RateSampling(2)),
        ("fps:0.5+clean", RateSampling(0.5, clean=True)),
        ("windows:16/6", WindowSampling(16, 6)),
        ("windows:16/6+clean", WindowSampling(16, 6, clean=True)),
    ],
)
def test_others_as_text(text: str, sampling: Sampling) -> None:
    assert parse_sampling(text) == sampling
    assert sampling.spec() == text


@pytest.mark.parametrize(
    "text",
    [
        "fps:0",
        "fps:",
        "fps:2/3",
        "fps:1.2.3",
        "windows:16",
        "windows:0/6",
        "windows:16/0",
        "windows:1.5/2",
        "uniform:2.5",
        "uniform:3/2",
        "fps:nan",
        "fps:-1",
    ],
)
def test_what_is_no_sampling(text: str) -> None:
    with pytest.raises(UsageError):
        parse_sampling(text)


@pytest.mark.parametrize("max_frames", [1, 3, 7, 100])
def test_limited_to_a_number_of_frames(max_frames: int) -> None:
    times = np.arange(250) / 25
    chosen = RateSampling(4.0).choose(times).tolist()
    expected = chosen
    if len(chosen) > max_frames:
        expected = [chosen[int((n + 0.5) * len(chosen) / max_frames)] for n in range(max_frames)]
    assert LimitedSampling(RateSampling(4.0), max_frames).choose(times).tolist() == expected
    offsets = LimitedSampling(WindowSampling(16, 6), max_frames).windows(16, None)
    assert offsets == WindowSampling(16, 6).windows(16, None) and offsets is not None
