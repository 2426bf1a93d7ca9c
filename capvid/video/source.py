"""Opening a video: the FrameSource protocol, its readers, and reading a sample of frames in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from capvid.errors import EmptyVideoError, UsageError


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """What a reader knows about a video.

    Attributes:
        path: where it is.
        reader: the reader's name.
        codec: the video codec, or "unknown".
        width: of a frame as it is handed out, in pixels.
        height: likewise.
        num_frames: N.
        duration: from the first frame to the end of the last, in seconds.
        fps: N / duration; for information, never used to place frames in time.
    """

    path: Path
    reader: str
    codec: str
    width: int
    height: int
    num_frames: int
    duration: float
    fps: float


class FrameSource(Protocol):
    """An open video. Close it as soon as its frames are read: an open reader may go on decoding."""

    @property
    def info(self) -> VideoInfo:
        """What is known about the video."""

    def frame_times(self) -> np.ndarray:
        """Presentation times (N,) of all frames in seconds, ascending, as the file gives them."""

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode frames by index: (T, H, W, 3) uint8 RGB, in the order asked for.

        Raises:
            TruncatedVideoError: the data end or are damaged before a frame asked for.
        """

    def close(self) -> None:
        """Let go of the file and the decoder; may be called twice."""

    def __enter__(self) -> FrameSource:
        """Give the source itself."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the source."""


class Sampling(Protocol):
    """What chooses the frames of a video."""

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Choose frame indices from the frames' times (N,) in seconds."""


@dataclass(frozen=True, kw_only=True)
class SampledFrames:
    """Frames (T, H, W, 3) uint8 RGB of a video with their times (T,) in seconds."""

    frames: np.ndarray
    times: np.ndarray
    info: VideoInfo


def _decord(path: Path) -> FrameSource:
    from capvid.video.decord_reader import DecordSource

    return DecordSource(path)


READERS: dict[str, Callable[[Path], FrameSource]] = {"decord": _decord}


def open_video(path: str | Path, *, reader: str = "auto") -> FrameSource:
    """Open a video with the reader of that name; ``auto`` takes the first.

    Raises:
        VideoError: it cannot be opened; the subclass says why.
        UsageError: there is no such reader.
    """
    if reader == "auto":
        reader = next(iter(READERS))
    if reader not in READERS:
        raise UsageError(f"{reader}: no such reader", remedy=f"choose {', '.join(READERS)}")
    return READERS[reader](Path(path))


def read_frames(path: str | Path, sampling: Sampling, *, reader: str = "auto") -> SampledFrames:
    """Open a video, read the frames that ``sampling`` chooses, and close it.

    Arguments and result can be pickled: a worker process can do this as well.

    Raises:
        VideoError: it cannot be read; the subclass says why.
    """
    with open_video(path, reader=reader) as source:
        times = source.frame_times()
        chosen = sampling.choose(times)
        if not len(chosen):
            raise EmptyVideoError(path, "has no frames", remedy="get it again")
        frames = source.read([int(index) for index in chosen])
        return SampledFrames(frames=frames, times=times[chosen], info=source.info)
