"""Protocol of all readers: an open video, its properties, frame times and frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from capvid.errors import UsageError
from capvid.utils.validation import limits


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """Properties of an open video with N frames."""

    path: Path
    reader: str  # name of the reader
    codec: str  # or "unknown"
    width: int  # of the frames as they are returned, in pixels
    height: int
    num_frames: int  # N
    duration: float  # seconds from the file's time zero to the end of the last frame
    fps: float  # N / seconds that the frames last; for information only, frame times do not depend on it
    rotation: int = 0  # clockwise degrees by which frames were rotated, as the file specifies
    mirrored: bool = False  # whether frames were mirrored, top to bottom, before they were rotated
    aspect: Fraction = Fraction(1)  # width of a stored pixel / its height; returned frames have square pixels
    clean_aperture: tuple[int, int] | None = (
        None  # width and height to be shown of stored frames; not applied
    )
    color: str = ""  # HDR or wide gamut that was converted; empty for ordinary SDR
    lost: int = 0  # frames that the file should contain and that cannot be decoded; not among the N
    why: str = "requested"  # reason for using this reader


class FrameSource(ABC):
    """An open video, as a context manager. Close it after reading, since it may decode in the background."""

    info: VideoInfo
    jumps = True  # whether distant frames can be read without decoding all frames before them
    _times: np.ndarray  # presentation times (N,) of all frames in seconds, ascending

    def _describe(
        self, times: np.ndarray, first: np.ndarray, *, still: float = 0.0, **properties: Any
    ) -> None:
        """Set the times (N,) and all properties; readers call this when they have opened a video.

        The size is that of the first frame (H, W, 3); a video of one frame lasts ``still`` seconds.
        """
        self._times = times
        last_duration = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
        shown = float(times[-1] - times[0]) + (last_duration or still)
        self.info = VideoInfo(
            width=first.shape[1],
            height=first.shape[0],
            num_frames=len(times),
            duration=max(float(times[0]), 0.0) + shown,
            fps=len(times) / shown if shown else 0.0,
            **properties,
        )

    @abstractmethod
    def _decode(self, index: int) -> np.ndarray:
        """Decode frame ``index``, (H, W, 3)."""

    def frame_times(self) -> np.ndarray:
        """Return the presentation times (N,) of all frames in seconds, ascending."""
        return self._times

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode frames by index: (T, H, W, 3) uint8 RGB, in the order of ``indices``.

        Calls with ascending indices decode the video only once.

        Raises:
            TruncatedVideoError: the data end or are damaged before one of the frames.
            IndexError: an index is outside the video.
        """
        numbers = np.asarray(indices, np.int64).reshape(-1)  # (T,)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self._times)):
            raise IndexError(f"frame indices must be between 0 and {len(self._times) - 1}")
        distinct, inverse = np.unique(numbers, return_inverse=True)
        frames = np.empty((len(distinct), self.info.height, self.info.width, 3), np.uint8)
        for row, index in enumerate(distinct):
            frames[row] = self._decode(int(index))
        return frames if np.array_equal(distinct, numbers) else frames[inverse.reshape(-1)]

    def shrink_hdr(self, side: int) -> None:  # noqa: B027  # others have no HDR
        """Return smaller HDR frames from now on, of a short side of at least ``side`` pixels."""

    def close(self) -> None:  # noqa: B027  # some readers have nothing to release
        """Release the file and the decoder; may be called twice."""

    def __enter__(self) -> FrameSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ArraySource(FrameSource):
    """Frames in memory as a video.

    Args:
        frames: RGB frames (T, H, W, 3) uint8, as a numpy array or torch tensor; or a list of frames of one
            size, each an array (H, W, 3) uint8 or a Pillow image.
        times: presentation times (T,) in seconds, ascending; 25 frames per second by default.

    Raises:
        UsageError: the frames or times have another type or shape, the frames are larger than the limit, or
            the times are not ascending.
    """

    def __init__(self, frames: Any, times: Sequence[float] | None = None) -> None:
        if isinstance(frames, list | tuple):
            self._check_list(frames)
        else:
            frames = _array(frames)
            is_array = isinstance(frames, np.ndarray)
            if not is_array or frames.dtype != np.uint8 or frames.shape[3:] != (3,) or not frames.size:
                actual = f"{frames.dtype} {frames.shape}" if is_array else type(frames).__name__
                problem = f"expected a path, or frames (T, H, W, 3) of type uint8, got {actual}"
                raise UsageError(problem, remedy="stack RGB frames into one uint8 array")
        count = len(frames)
        try:
            seconds = np.arange(count) / 25 if times is None else np.asarray(times, dtype=np.float64)
        except (TypeError, ValueError):
            seconds = np.empty(0)
        if seconds.shape != (count,) or not np.isfinite(seconds).all() or (np.diff(seconds) < 0).any():
            raise UsageError(f"expected {count} ascending times in seconds, one per frame")
        self._frames = frames
        self._describe(
            seconds, self._decode(0), still=1 / 25, path=Path("frames"), reader="memory", codec="raw"
        )

    @staticmethod
    def _check_list(frames: Sequence[Any]) -> None:
        """Check the type and size of each frame of a list, without decoding images.

        Raises:
            UsageError: there is none, or one is no frame, too large, or of another size than the first.
        """
        remedy = "give RGB frames of one size: uint8 arrays (H, W, 3) or Pillow images"
        if not frames:
            raise UsageError("an empty list of frames", remedy=remedy)
        shapes = [_frame_shape(frame) for frame in frames]
        for number, shape in enumerate(shapes):
            problem = f"frame {number} of the list"
            if shape is None:
                actual = _array(frames[number])
                array = f" {actual.dtype} {actual.shape}" if isinstance(actual, np.ndarray) else ""
                raise UsageError(f"{problem}: {type(frames[number]).__name__}{array}", remedy=remedy)
            height, width = shape
            if height * width > limits().frame_pixels:
                reason = f"{width} x {height} pixels, more than the limit of {limits().frame_pixels}"
                raise UsageError(f"{problem}: {reason}", remedy="raise CAPVID_LIMIT_FRAME_PIXELS")
            if shape != shapes[0]:
                first = shapes[0] or (0, 0)
                reason = f"{width} x {height} pixels, and the first has {first[1]} x {first[0]}"
                raise UsageError(f"{problem}: {reason}", remedy=remedy)

    def _decode(self, index: int) -> np.ndarray:
        frame = self._frames[index]
        return np.asarray(frame.convert("RGB")) if hasattr(frame, "convert") else _array(frame)


def _array(frames: Any) -> Any:
    """Return a torch tensor as a numpy array, and everything else as it is."""
    return frames.cpu().numpy() if hasattr(frames, "cpu") else frames


def _frame_shape(frame: Any) -> tuple[int, int] | None:
    """Return height and width of an array (H, W, 3) uint8 or a Pillow image; None for anything else."""
    if hasattr(frame, "convert"):
        width, height = frame.size
        return height, width
    array = _array(frame)
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape[2:] != (3,):
        return None
    return (array.shape[0], array.shape[1]) if array.size else None
