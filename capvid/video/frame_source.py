"""The FrameSource protocol and the records that readers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from capvid.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self


Reduce = Callable[[np.ndarray], np.ndarray]  # frames (n, H, W, 3) uint8, each by itself, to (n, ...)


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """Properties of an open video.

    Attributes:
        path: path of the video.
        reader: name of the reader.
        codec: video codec, or "unknown".
        width: width of the frames that are returned, in pixels.
        height: height of these frames, in pixels.
        num_frames: N.
        duration: seconds from the first frame to the end of the last.
        fps: N / duration; for information, never used to place frames in time.
        rotation: degrees by which frames were turned clockwise, as the file demands.
        lost: frames that the file promises and that cannot be decoded; not among the N.
        why: reason for this reader.
    """

    path: Path
    reader: str
    codec: str
    width: int
    height: int
    num_frames: int
    duration: float
    fps: float
    rotation: int = 0
    lost: int = 0
    why: str = "asked for"


class FrameSource(Protocol):
    """Open video, a context manager. Close it after reading: an open reader may go on decoding."""

    @property
    def info(self) -> VideoInfo:
        """Properties of the video."""

    @property
    def jumps(self) -> bool:
        """Whether distant frames can be read without decoding all before them."""
        return True

    def frame_times(self) -> np.ndarray:
        """Return the presentation times (N,) of all frames in seconds, ascending."""

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode frames by index: (T, H, W, 3) uint8 RGB, in the order of ``indices``.

        Calls with ascending indices decode the video once.

        Raises:
            TruncatedVideoError: the data end or are damaged before one of the frames.
        """

    def close(self) -> None:
        """Release the file and the decoder; may be called twice."""

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the source."""
        self.close()


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of frames around each sampled one, for networks that see motion.

    Attributes:
        offsets: times (C,) of the window's frames in seconds, relative to the sampled frame.
        reduce: function of frames (n, H, W, 3) uint8 to an array (n, ...) that is kept, each frame by itself;
            None keeps the frames.
    """

    offsets: tuple[float, ...]
    reduce: Reduce | None = None

    def choose(self, times: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Return the frames (T, C) nearest to the windows' times; beyond the video's ends, its end frames.

        Args:
            times: presentation times of all frames in seconds, ascending, (N,).
            sampled: indices of the sampled frames, (T,).
        """
        wanted = times[sampled][:, None] + np.asarray(self.offsets)  # (T, C)
        after = np.searchsorted(times, wanted).clip(min(1, len(times) - 1), len(times) - 1)
        before = np.maximum(after - 1, 0)
        return np.where(wanted - times[before] < times[after] - wanted, before, after)


@dataclass(frozen=True, kw_only=True)
class SampledFrames:
    """Frames (T, H, W, 3) uint8 RGB of a video, times (T,) in seconds, reduced windows, each (T, C, ...)."""

    frames: np.ndarray
    times: np.ndarray
    info: VideoInfo
    windows: tuple[np.ndarray, ...] = ()

    def take(self, indices: np.ndarray) -> SampledFrames:
        """Return the sampled frames with the indices (K,), with their times and windows."""
        windows = tuple(window[indices] for window in self.windows)
        return replace(self, frames=self.frames[indices], times=self.times[indices], windows=windows)


def frame_duration(times: np.ndarray) -> float:
    """Return the median duration of a frame in seconds, from the times (N,) of all."""
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


class SequentialSource(FrameSource):
    """Frame source that decodes frame by frame; subclasses set ``_times``, ``_first`` and ``_info``."""

    _times: np.ndarray  # presentation times of all frames in seconds, (N,)
    _first: np.ndarray  # the first frame, (H, W, 3)
    _info: VideoInfo

    @abstractmethod
    def _frame(self, index: int) -> np.ndarray:
        """Decode frame ``index``, (H, W, 3)."""

    def _make_info(self, **properties: Any) -> VideoInfo:
        """Return the properties of the video, completed by those that follow from times and first frame."""
        height, width = self._first.shape[:2]
        count = len(self._times)
        duration = float(self._times[-1] - self._times[0] + frame_duration(self._times))
        fps = count / duration if duration else 0.0
        return VideoInfo(
            width=width, height=height, num_frames=count, duration=duration, fps=fps, **properties
        )

    @property
    def info(self) -> VideoInfo:
        """Properties of the video."""
        return self._info

    def frame_times(self) -> np.ndarray:
        """Return the presentation times (N,) of all frames in seconds, ascending."""
        return self._times

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode frames by index: (T, H, W, 3) uint8 RGB, in the order of ``indices``.

        Raises:
            TruncatedVideoError: the data end or are damaged before one of the frames.
            IndexError: an index is outside the video.
        """
        wanted = np.asarray(indices, np.int64).reshape(-1)  # (T,)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self._times)):
            raise IndexError(f"frame indices go from 0 to {len(self._times) - 1}")
        distinct, inverse = np.unique(wanted, return_inverse=True)
        frames = np.empty((len(distinct), *self._first.shape), np.uint8)
        for row, index in enumerate(distinct):
            frames[row] = self._frame(int(index))
        return frames if np.array_equal(distinct, wanted) else frames[inverse.reshape(-1)]


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
        if (
            not isinstance(array, np.ndarray)
            or array.dtype != np.uint8
            or array.ndim != 4
            or array.shape[3] != 3
            or not array.size
        ):
            shape = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(frames).__name__
            raise UsageError(
                f"expected a path, or frames (T, H, W, 3) of type uint8, got {shape}",
                remedy="stack RGB frames into one uint8 array",
            )
        try:
            at = np.arange(len(array)) / 25 if times is None else np.asarray(times, dtype=np.float64)
        except (TypeError, ValueError):
            at = np.empty(0)
        if at.shape != (len(array),) or not np.isfinite(at).all() or (np.diff(at) < 0).any():
            raise UsageError(f"expected {len(array)} ascending times in seconds, one per frame")
        self._frames = array
        self._times = at
        duration = float(at[-1] - at[0]) + (frame_duration(at) or 1 / 25)
        self._info = VideoInfo(
            path=Path("frames"),
            reader="memory",
            codec="raw",
            width=array.shape[2],
            height=array.shape[1],
            num_frames=len(array),
            duration=duration,
            fps=len(array) / duration,
        )

    @property
    def info(self) -> VideoInfo:
        """Size and duration of the frames."""
        return self._info

    def frame_times(self) -> np.ndarray:
        """Return the presentation times (T,) in seconds."""
        return self._times

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Return frames by index."""
        return self._frames[list(indices)]

    def close(self) -> None:
        """Do nothing: the frames belong to the caller."""
