from __future__ import annotations

import numpy as np
import pytest

from capvid.errors import UsageError
from capvid.video.sampling import UniformSampling, parse_sampling


def test_middles_of_equal_slices() -> None:
    times = np.arange(100) / 10  # 0 to 9.9, the last shown until 10
    assert UniformSampling(4).choose(times).tolist() == [13, 38, 63, 88]  # 1.25, 3.75, 6.25, 8.75 s
    assert UniformSampling(1).choose(times).tolist() == [50]


def test_time_counts_and_not_the_number_of_the_frame() -> None:
    times = np.concatenate([np.arange(90) / 90, 1 + np.arange(10)])  # most in the first second
    chosen = UniformSampling(4).choose(times)
    assert chosen.tolist() == [90, 93, 95, 98]  # by number it would be 12, 37, 62, 87


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
