"""Opening a video: the FrameSource protocol, its readers, and reading a sample of frames in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from capvid.errors import DecoderError, EmptyVideoError, UsageError, VideoError
from capvid.limits import limits

if TYPE_CHECKING:
    from typing_extensions import Self

Reduce = Callable[[np.ndarray], np.ndarray]  # of frames (n, H, W, 3) uint8, each by itself, to (n, ...)
_READ_AT_ONCE = 64 << 20  # bytes of frames that are in memory before what is kept of them


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
        rotation: by how many degrees pictures were turned clockwise, as the file asks for.
        lost: how many frames the file promises that cannot be decoded; they are not among the N.
        why: why this reader.
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
    """An open video. Close it as soon as its frames are read: an open reader may go on decoding.

    Readers inherit from it, and from it how a ``with`` block closes them.
    """

    @property
    def info(self) -> VideoInfo:
        """What is known about the video."""

    @property
    def jumps(self) -> bool:
        """Whether frames far into the video can be had without decoding all before them."""
        return True

    def frame_times(self) -> np.ndarray:
        """Presentation times (N,) of all frames in seconds, ascending, as the file gives them."""

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode frames by index: (T, H, W, 3) uint8 RGB, in the order asked for.

        Calls whose indices go on ascending decode the video once.

        Raises:
            TruncatedVideoError: the data end or are damaged before a frame asked for.
        """

    def close(self) -> None:
        """Let go of the file and the decoder; may be called twice."""

    def __enter__(self) -> Self:
        """Give the source itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the source."""
        self.close()


class Sampling(Protocol):
    """What chooses the frames of a video."""

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Choose frame indices from the frames' times (N,) in seconds."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The frames around each sampled one, for networks that see motion.

    Attributes:
        offsets: times (C,) of the window's frames in seconds, from that of the sampled frame.
        reduce: what to keep of frames (n, H, W, 3) uint8: an array (n, ...), each frame by itself, such as a
            smaller picture; ``None`` keeps them as they are.
    """

    offsets: tuple[float, ...]
    reduce: Reduce | None = None

    def choose(self, times: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Choose the frames whose times are nearest to the window's; beyond the video's ends, its end frames.

        Args:
            times: (N,), presentation times of all frames in seconds, ascending.
            sampled: (T,), indices of the sampled frames.

        Returns:
            indices (T, C).
        """
        wanted = times[sampled][:, None] + np.asarray(self.offsets)  # (T, C)
        after = np.searchsorted(times, wanted).clip(min(1, len(times) - 1), len(times) - 1)
        before = np.maximum(after - 1, 0)
        return np.where(wanted - times[before] < times[after] - wanted, before, after)


@dataclass(frozen=True, kw_only=True)
class SampledFrames:
    """Frames (T, H, W, 3) uint8 RGB of a video with their times (T,) in seconds.

    ``windows`` holds, for each of the windows asked for, what was kept of its frames, (T, C, ...).
    """

    frames: np.ndarray
    times: np.ndarray
    info: VideoInfo
    windows: tuple[np.ndarray, ...] = ()

    def take(self, indices: np.ndarray) -> SampledFrames:
        """Keep some of the sampled frames, by their indices (K,), with their times and windows."""
        windows = tuple(window[indices] for window in self.windows)
        return replace(self, frames=self.frames[indices], times=self.times[indices], windows=windows)


def frame_duration(times: np.ndarray) -> float:
    """How long a frame is usually shown, in seconds, from the times (N,) of all."""
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def _decord(path: Path) -> FrameSource:
    from capvid.video.decord_reader import DecordSource

    return DecordSource(path)


def _pyav(path: Path) -> FrameSource:
    from capvid.video.pyav_reader import PyAVSource

    return PyAVSource(path)


def _pictures(path: Path) -> FrameSource:
    from capvid.video.pictures import PicturesSource

    return PicturesSource(path)


READERS: dict[str, Callable[[Path], FrameSource]] = {"decord": _decord, "pyav": _pyav, "pictures": _pictures}


def open_video(path: str | Path, *, reader: str = "auto") -> FrameSource:
    """Open a video with the reader of that name; ``auto`` takes the one that suits the file.

    Raises:
        VideoError: it cannot be opened; the subclass says why.
        UsageError: there is no such reader.
    """
    if reader not in ("auto", *READERS):
        raise UsageError(f"{reader}: no such reader", remedy=f"choose {', '.join(['auto', *READERS])}")
    with memory_errors(Path(path)):
        if reader == "auto":
            from capvid.video.choice import open_suited

            return open_suited(Path(path))
        return READERS[reader](Path(path))


@contextmanager
def memory_errors(path: Path) -> Iterator[None]:
    """Raise DecoderError where memory runs out, in a worker process usually by its own limit."""
    try:
        yield
    except MemoryError as error:
        raise DecoderError(
            path,
            f"needs more memory than a decoding process may use ({limits().worker_bytes} bytes)",
            remedy="raise CAPVID_LIMIT_WORKER_BYTES if you trust the file",
        ) from error


def read_frames(
    path: str | Path,
    sampling: Sampling,
    *,
    reader: str = "auto",
    reduce: Reduce | None = None,
    windows: Sequence[Windows] = (),
) -> SampledFrames:
    """Open a video, read the frames that ``sampling`` chooses and the windows around them, and close it.

    Only what ``reduce`` keeps of the frames, and each window's own of its frames, stays in memory. Arguments
    and result can be pickled, if these functions can: a worker process can do this as well.

    Where the data turn out to be damaged, frames are chosen again from those that can be decoded, unless
    the reader is decord because it was asked for; ``info.lost`` of the result tells how many are missing.

    Raises:
        VideoError: it cannot be read; the subclass says why.
    """
    source: FrameSource | None = open_video(path, reader=reader)
    failure: VideoError | None = None
    while source is not None:
        with source, memory_errors(source.info.path):
            try:
                return _sample(source, sampling, reduce, windows)
            except VideoError as error:
                failure = error
        from capvid.video.choice import instead_of

        source = instead_of(source, failure, reader=reader)
    assert failure is not None
    raise failure


def _sample(
    source: FrameSource, sampling: Sampling, reduce: Reduce | None, windows: Sequence[Windows]
) -> SampledFrames:
    """Choose and read the frames of an open video."""
    times = source.frame_times()
    chosen = sampling.choose(times)
    if not len(chosen):
        raise EmptyVideoError(source.info.path, "has no frames", remedy="get it again")
    if windows or reduce:
        wanted = [(chosen, reduce), *((window.choose(times, chosen), window.reduce) for window in windows)]
        frames, *clips = _read_reduced(source, wanted)
    else:
        frames, clips = source.read([int(index) for index in chosen]), []
    return SampledFrames(frames=frames, times=times[chosen], info=source.info, windows=tuple(clips))


def _read_reduced(
    source: FrameSource, wanted: Sequence[tuple[np.ndarray, Reduce | None]]
) -> list[np.ndarray]:
    """Read frames a few at a time: for each array of indices (T, ...) what is kept of them, (T, ..., *)."""
    found: list[np.ndarray | None] = [None] * len(wanted)
    needed = np.unique(np.concatenate([indices.reshape(-1) for indices, _ in wanted]))
    step = max(1, _READ_AT_ONCE // max(1, source.info.height * source.info.width * 3))
    for start in range(0, len(needed), step):
        part = needed[start : start + step]
        frames = source.read([int(index) for index in part])
        for number, (indices, reduce) in enumerate(wanted):
            here = np.isin(indices, part)  # like indices
            own, places = np.unique(indices[here], return_inverse=True)
            if not len(own):
                continue
            kept = frames if len(own) == len(part) else frames[np.searchsorted(part, own)]
            kept = kept if reduce is None else reduce(kept)
            target = found[number]
            if target is None:
                found[number] = target = np.empty((*indices.shape, *kept.shape[1:]), kept.dtype)
            target[here] = kept[places.reshape(-1)]
    return [array for array in found if array is not None]
