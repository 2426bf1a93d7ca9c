from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_video import level, write_video

from capvid.backbones.catalog import Clip, Preprocess
from capvid.features.prefetch import View, decode_video
from capvid.video.frame_sampling import RateSampling, Sampling, UniformSampling, WindowSampling

PLAIN = Preprocess(size=(6, 8), order="RGB", scale=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
FRAMES, PAIRS = View(preprocess=PLAIN), View(preprocess=PLAIN, clip=Clip(frames=2, stride=12))
NEIGHBOURS = View(preprocess=PLAIN, clip=Clip(frames=16, stride=1))


def seen(crops: np.ndarray) -> list:
    """Numbers of the frames, of ten, in each crop (..., h, w, 3)."""
    return np.rint((crops.mean((-3, -2, -1)) - level(0)) / 20).astype(int).tolist()


@pytest.mark.parametrize("sampling", [UniformSampling(4), RateSampling(1), RateSampling(2.5)])
def test_streams_are_of_the_same_moments(tmp_path: Path, sampling: Sampling) -> None:
    path = write_video(tmp_path / "v.mp4", frames=40, rate=10)
    decoded = decode_video(path, sampling, [PAIRS, FRAMES], "auto")
    chosen = sampling.choose(np.arange(40) / 10)
    np.testing.assert_allclose(decoded.times, chosen / 10, atol=1e-3)
    assert [crops.shape[:-3] for crops in decoded.crops] == [(len(chosen), 2), (len(chosen),)]
    assert seen(decoded.crops[1]) == (chosen % 10).tolist()
    pairs = np.stack([chosen - 2, chosen + 2], 1).clip(0, 39)  # .4 s apart
    assert seen(decoded.crops[0]) == (pairs % 10).tolist()


def test_windows_of_neighbours_and_their_middles(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", frames=40, rate=10)
    decoded = decode_video(path, WindowSampling(16, 6), [FRAMES, NEIGHBOURS, PAIRS], "auto")
    starts = np.arange(0, 25, 6)
    assert seen(decoded.crops[0]) == ((starts + 8) % 10).tolist()
    assert seen(decoded.crops[1]) == ((starts[:, None] + np.arange(16)) % 10).tolist()
    assert seen(decoded.crops[2]) == ((starts[:, None] + [6, 10]) % 10).tolist()
    np.testing.assert_allclose(decoded.times, (starts + 8) / 10, atol=1e-3)


def test_a_video_shorter_than_a_window(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", frames=5, rate=10)
    decoded = decode_video(path, WindowSampling(16, 6), [FRAMES, NEIGHBOURS], "auto")
    assert seen(decoded.crops[0]) == [2]
    assert seen(decoded.crops[1]) == [[0, 1, 2, 3, *[4] * 12]]
    assert decoded.lost == 0


def test_views_are_the_same_where_nothing_differs() -> None:
    assert View(preprocess=PLAIN) == FRAMES and hash(View(preprocess=PLAIN)) == hash(FRAMES)
    assert FRAMES != PAIRS
