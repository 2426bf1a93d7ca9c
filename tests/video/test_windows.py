from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_video import frame_number, level, write_video

from capvid.backbones.catalog import backbone_entry
from capvid.video import readers as module
from capvid.video.frame_sampling import UniformSampling, Windows
from capvid.video.frame_source import VideoInfo
from capvid.video.readers import read_frames

WINDOW = Windows(offsets=(-0.6, -0.2, 0.2, 0.6))


def plain_choice(times: Sequence[float], moment: float) -> int:
    return min(range(len(times)), key=lambda n: (abs(times[n] - moment), -n))


def test_offsets_of_a_clip() -> None:
    clip = backbone_entry("x3d-xs").clip
    assert clip is not None
    assert clip.offsets == pytest.approx(WINDOW.offsets)
    assert backbone_entry("x3d-xs").describe_input().endswith(", 4 frames 0.4 s apart")
    assert backbone_entry("googlenet").clip is None


@pytest.mark.parametrize(("fps", "near", "far"), [(30, 6, 18), (60, 12, 36), (24, 5, 14), (10, 2, 6)])
def test_the_rate_of_the_video_does_not_change_the_time_between_frames(fps: int, near: int, far: int) -> None:
    times = 3 + np.arange(20 * fps) / fps
    middle = 10 * fps
    chosen = WINDOW.choose(times, np.array([middle]))
    assert (chosen - middle).tolist() == [[-far, -near, near, far]]


def test_windows_stop_at_the_ends() -> None:
    chosen = WINDOW.choose(np.arange(100) / 10, np.array([0, 1, 4, 98]))
    assert chosen.tolist() == [[0, 0, 2, 6], [0, 0, 3, 7], [0, 2, 6, 10], [92, 96, 99, 99]]


def test_few_frames_a_second_repeat_the_picture() -> None:
    assert WINDOW.choose(np.arange(5) * 2.0, np.arange(5)).tolist() == [[n] * 4 for n in range(5)]
    assert WINDOW.choose(np.arange(3) / 2, np.array([1])).tolist() == [[0, 1, 1, 2]]
    assert WINDOW.choose(np.array([7.0]), np.array([0])).tolist() == [[0, 0, 0, 0]]


def test_variable_rates_go_by_time() -> None:
    generator = np.random.default_rng(0)
    for _ in range(30):
        times = generator.exponential(0.1, generator.integers(1, 60)).cumsum()
        sampled = UniformSampling(5).choose(times)
        expected = [[plain_choice(times, times[n] + offset) for offset in WINDOW.offsets] for n in sampled]
        assert WINDOW.choose(times, sampled).tolist() == expected


def brightness(frames: np.ndarray) -> np.ndarray:
    """Frames (n, H, W, 3) reduced to (n, 1)."""
    return frames.mean((1, 2, 3), keepdims=True)[:, :, 0, 0]


def test_windows_of_a_real_file_that_crosses_processes(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", frames=40, rate=10)
    windows = [WINDOW, Windows(offsets=(0.0, 0.1), reduce=brightness)]
    call = pickle.loads(pickle.dumps((read_frames, (path, UniformSampling(5)), {"windows": windows})))
    sampled = pickle.loads(pickle.dumps(call[0](*call[1], **call[2])))
    middles = [4, 12, 20, 28, 36]
    alone = read_frames(path, UniformSampling(5))
    assert (sampled.frames == alone.frames).all() and (sampled.times == alone.times).all()
    whole, reduced = sampled.windows
    assert whole.shape == (5, 4, 48, 64, 3) and whole.dtype == np.uint8
    numbers = [[frame_number(frame) for frame in window] for window in whole]
    assert numbers == [[min(max(n + d, 0), 39) % 10 for d in (-6, -2, 2, 6)] for n in middles]
    assert reduced.shape == (5, 2, 1)
    expected = [[level(n), level(n + 1)] for n in middles]
    np.testing.assert_allclose(reduced[..., 0], expected, atol=3)
    some = sampled.take(np.array([1, 3]))
    assert some.times.tolist() == sampled.times[[1, 3]].tolist() and len(some.frames) == 2
    assert (some.windows[0] == whole[[1, 3]]).all() and (some.windows[1] == reduced[[1, 3]]).all()


class Counted:
    """A made-up video of 10 frames a second whose frame n has the value n; it notes what is read."""

    def __init__(self, path: Path, length: int) -> None:
        self.length = length
        self.reads: list[list[int]] = []
        self.info = VideoInfo(
            path=path, reader="counted", codec="", width=2, height=2, num_frames=length, duration=1, fps=10
        )

    def frame_times(self) -> np.ndarray:
        return np.arange(self.length) / 10

    def read(self, indices: Sequence[int]) -> np.ndarray:
        self.reads.append(list(indices))
        return np.ones((len(indices), 2, 2, 3), np.uint8) * np.array(indices, np.uint8)[:, None, None, None]

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *arguments: Any) -> None:
        pass


def test_all_windows_come_from_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v"
    path.write_bytes(b"FLV\x01")  # the reader does not look at it
    source = Counted(Path("v"), 200)
    monkeypatch.setitem(module.READERS, "counted", lambda path: source)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 8 * 12)  # bytes, of 8 frames
    reduced: list[int] = []

    def note(frames: np.ndarray) -> np.ndarray:
        reduced.extend(frames[:, 0, 0, 0].tolist())
        return frames[:, 0, 0]

    windows = [WINDOW, Windows(offsets=(-0.2, 0.0), reduce=note)]
    sampled = read_frames(path, UniformSampling(20), reader="counted", windows=windows)
    read = [index for part in source.reads for index in part]
    middles = np.arange(20) * 10 + 5
    wide = (middles[:, None] + [-6, -2, 2, 6]).clip(0, 199)
    assert read == sorted({*middles.tolist(), *wide.flatten().tolist()})  # each once, ascending
    assert max(map(len, source.reads)) <= 8
    assert sampled.frames[:, 0, 0, 0].tolist() == middles.tolist()
    assert (sampled.windows[0][..., 0, 0, 0] == wide).all()
    assert (sampled.windows[1][..., 0] == middles[:, None] + [-2, 0]).all()
    assert reduced == sorted(np.concatenate([middles - 2, middles]).tolist())
    assert read_frames(path, UniformSampling(20), reader="counted").windows == ()
