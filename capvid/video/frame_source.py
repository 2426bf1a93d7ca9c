"""The protocol of all readers: an open video, its properties, frame times and frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from capvid.errors import UsageError

Reduce = Callable[[np.ndarray], np.ndarray]  # frames (n, H, W, 3) uint8, each by itself, to (n, ...)


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """Properties of an open video of N frames."""

    path: Path
    reader: str  # name of the reader
    codec: str  # or "unknown"
    width: int  # of the frames that are returned, in pixels
    height: int
    num_frames: int  # N
    duration: float  # seconds from the first frame to the end of the last
    fps: float  # N / duration; for information, never used to place frames in time
    rotation: int = 0  # degrees by which frames were turned clockwise, as the file demands
    lost: int = 0  # frames that the file promises and that cannot be decoded; not among the N
    why: str = "asked for"  # reason for this reader


class FrameSource(ABC):
    """Open video, a context manager. Close it after reading: an open reader may go on decoding."""

    info: VideoInfo
    jumps = True  # whether distant frames can be read without decoding all before them
    _times: np.ndarray  # presentation times of all frames in seconds, ascending, (N,)

    def _describe(
        self, times: np.ndarray, first: np.ndarray, *, still: float = 0.0, **properties: Any
    ) -> None:
        """Set the times (N,) and all properties; readers call this when they have opened a video.

        The size is that of the first frame (H, W, 3); a video of one frame lasts ``still`` seconds.
        """
        self._times = times
        count, (height, width) = len(times), first.shape[:2]
        last = float(np.median(np.diff(times))) if count > 1 else 0.0  # duration of the last frame
        duration = float(times[-1] - times[0]) + (last or still)
        fps = count / duration if duration else 0.0
        self.info = VideoInfo(
            width=width, height=height, num_frames=count, duration=duration, fps=fps, **properties
        )

    @abstractmethod
    def _decode(self, index: int) -> np.ndarray:
        """Decode frame ``index``, (H, W, 3)."""

    def frame_times(self) -> np.ndarray:
        """Return the presentation times (N,) of all frames in seconds, ascending."""
        return self._times

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode frames by index: (T, H, W, 3) uint8 RGB, in the order of ``indices``.

        Calls with ascending indices decode the video once.

        Raises:
            TruncatedVideoError: the data end or are damaged before one of the frames.
            IndexError: an index is outside the video.
        """
        wanted = np.asarray(indices, np.int64).reshape(-1)  # (T,)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self._times)):
            raise IndexError(f"frame indices go from 0 to {len(self._times) - 1}")
        distinct, inverse = np.unique(wanted, return_inverse=True)
        frames = np.empty((len(distinct), self.info.height, self.info.width, 3), np.uint8)
        for row, index in enumerate(distinct):
            frames[row] = self._decode(int(index))
        return frames if np.array_equal(distinct, wanted) else frames[inverse.reshape(-1)]

    def close(self) -> None:  # noqa: B027  # many readers have nothing to release
        """Release the file and the decoder; may be called twice."""

    def __enter__(self) -> FrameSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of C frames around each sampled one, for networks that see motion."""

    offsets: tuple[float, ...] = ()  # times (C,) of the frames in seconds, relative to the sampled frame
    size: int | None = None  # number C of consecutive frames, whatever their times, instead of ``offsets``
    reduce: Reduce | None = None  # what is kept of the frames; None keeps the frames

    def choose(self, times: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Return the frames (T, C) of the windows around sampled frames (T,), of all frames with times (N,).

        Beyond the video's ends, its end frames are repeated.
        """
        if self.size is not None:
            starts = np.maximum(sampled[:, None] - self.size // 2, 0)
            return np.minimum(starts + np.arange(self.size), len(times) - 1)
        wanted = times[sampled][:, None] + np.asarray(self.offsets)  # (T, C)
        after = np.searchsorted(times, wanted).clip(min(1, len(times) - 1), len(times) - 1)
        before = np.maximum(after - 1, 0)
        return np.where(wanted - times[before] < times[after] - wanted, before, after)


class ArraySource(FrameSource):
    """Frames in memory as a video.

    Args:
        frames: RGB frames (T, H, W, 3) uint8, as a numpy array or torch tensor.
        times: presentation times (T,) in seconds, ascending; 25 frames per second by default.

    Raises:
        UsageError: other frames or times.
    """

    def __init__(self, frames: Any, times: Sequence[float] | None = None) -> None:
        array = frames.cpu().numpy() if hasattr(frames, "cpu") else frames
        is_array = isinstance(array, np.ndarray)
        if (
            not is_array
            or array.dtype != np.uint8
            or array.ndim != 4
            or array.shape[3] != 3
            or not array.size
        ):
            actual = f"{array.dtype} {array.shape}" if is_array else type(frames).__name__
            problem = f"expected a path, or frames (T, H, W, 3) of type uint8, got {actual}"
            raise UsageError(problem, remedy="stack RGB frames into one uint8 array")
        try:
            at = np.arange(len(array)) / 25 if times is None else np.asarray(times, dtype=np.float64)
        except (TypeError, ValueError):
            at = np.empty(0)
        if at.shape != (len(array),) or not np.isfinite(at).all() or (np.diff(at) < 0).any():
            raise UsageError(f"expected {len(array)} ascending times in seconds, one per frame")
        self._frames = array
        self._describe(at, array[0], still=1 / 25, path=Path("frames"), reader="memory", codec="raw")

    def _decode(self, index: int) -> np.ndarray:
        return self._frames[index]
