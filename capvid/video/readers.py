"""Selection of the reader for a video, and reading of sampled frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from capvid.errors import TruncatedVideoError, UsageError, VideoError
from capvid.utils.validation import limits
from capvid.video import READER_NAMES
from capvid.video.container_kind import explain, kind_of
from capvid.video.decord_reader import DecordSource
from capvid.video.frame_sampling import Reduce, Sampling, Windows
from capvid.video.frame_source import ArraySource, FrameSource, VideoInfo
from capvid.video.image_reader import ImageSource, StillSource, archive_of
from capvid.video.probe import Packets, scan
from capvid.video.pyav_reader import PyAVSource
from capvid.video.remote_file import stream_of

_CHUNK_BYTES = 64 << 20  # of frames that are read before they are reduced
_DECORD = ("asf", "avi", "flv", "matroska", "mp4", "ogg")  # kinds that decord reads as well


def _open_auto(path: Path) -> FrameSource:
    """Open a file with PyAV, or with decord if PyAV finds no packets."""
    kind = kind_of(path)
    try:
        status = path.stat()
        packets = _scan(path, kind, status.st_ino, status.st_size, status.st_mtime_ns)
    except VideoError as error:
        if kind not in _DECORD or error.kind == "no-video-stream" or stream_of(path):
            raise
        try:
            return DecordSource(path, why="PyAV cannot open it")
        except Exception:
            raise error from None
    why = "default"
    if packets.damaged:
        why = "the file is damaged"
    elif packets.codec == "av1":
        why = "decord cannot decode av1"
    elif kind not in _DECORD:
        why = f"decord cannot read {kind} reliably"
    return PyAVSource(path, why=why, packets=packets)


@lru_cache(maxsize=1)  # a long video is opened once per chunk
def _scan(path: Path, kind: str, *version: int) -> Packets:
    return scan(path, kind)


READERS: dict[str, Callable[[Path], FrameSource]] = dict(
    zip(READER_NAMES, (_open_auto, PyAVSource, DecordSource), strict=True)
)


def open_video(path: str | Path, *, reader: str = "auto") -> FrameSource:
    """Open a video file, or, with any reader, an image or a folder of images in a zip archive.

    Raises:
        VideoError: the file cannot be opened; its ``kind`` says why.
        UsageError: there is no such reader.
    """
    if reader not in READERS:
        raise UsageError(f"{reader}: no such reader", remedy=f"choose {', '.join(READERS)}")
    path = Path(path)
    with memory_errors(path):
        try:
            if archive := archive_of(path):
                return ImageSource(path, archive)
            return StillSource(path) if kind_of(path) == "image" else READERS[reader](path)
        except VideoError as error:
            if (reason := explain(error)) is error:
                raise
            raise reason from error
        except (ArithmeticError, LookupError, OSError, ValueError) as error:  # by libraries led astray
            problem = f"cannot be read ({type(error).__name__}: {error})"
            raise VideoError(path, problem, remedy="convert it, for example with ffmpeg") from error


@contextmanager
def memory_errors(path: Path) -> Iterator[None]:
    """Raise VideoError if memory runs out, usually because of the limit of a worker process."""
    try:
        yield
    except MemoryError as error:
        problem = f"needs more memory than a decoding process may use ({limits().worker_bytes} bytes)"
        remedy = "raise CAPVID_LIMIT_WORKER_BYTES if you trust the file"
        raise VideoError(path, problem, remedy=remedy, kind="decoder") from error


@dataclass(frozen=True, kw_only=True)
class SampledFrames:
    """Sampled frames of a video."""

    frames: np.ndarray  # (T, H, W, 3) uint8 RGB, or reduced (T, ...)
    times: np.ndarray  # presentation times (T,) in seconds
    info: VideoInfo
    windows: tuple[np.ndarray, ...] = ()  # reduced windows around the frames, each (T, C, ...)

    def take(self, indices: np.ndarray) -> SampledFrames:
        """Return the frames with these indices (K,), with their times and windows."""
        windows = tuple(window[indices] for window in self.windows)
        return replace(self, frames=self.frames[indices], times=self.times[indices], windows=windows)


def read_frames(
    path: str | Path | ArraySource,
    sampling: Sampling,
    *,
    reader: str = "auto",
    reduce: Reduce | None = None,
    windows: Sequence[Windows] = (),
    hdr_side: int | None = None,
) -> SampledFrames:
    """Open a video, read the frames that ``sampling`` chooses and the windows around them, and close it.

    Only the reduced frames are kept in memory. If decoding reveals damage, PyAV opens the file again and
    frames are chosen from those that can be decoded; ``info.lost`` is the number of the others. HDR frames
    may come smaller, with a short side of at least ``hdr_side`` pixels.

    Raises:
        VideoError: the video cannot be read; its ``kind`` says why.
    """
    source = path if isinstance(path, ArraySource) else open_video(path, reader=reader)
    info = source.info

    def read(source: FrameSource) -> SampledFrames:
        with source, memory_errors(info.path):
            if hdr_side is not None:
                source.shrink_hdr(hdr_side)
            return _read_sampled(source, sampling, reduce, windows)

    try:
        return read(source)
    except TruncatedVideoError:
        if not isinstance(source, PyAVSource) or source.salvage:
            raise
    why = info.why if reader == "pyav" else "the file is damaged"
    return read(PyAVSource(info.path, why=why, salvage=True))


def _read_sampled(
    source: FrameSource, sampling: Sampling, reduce: Reduce | None, windows: Sequence[Windows]
) -> SampledFrames:
    """Read the chosen frames, (T, ...), and windows, (T, C, ...), in chunks of distinct frames."""
    times = source.frame_times()
    chosen = sampling.choose(times)
    if not len(chosen):
        raise VideoError(source.info.path, "has no frames", remedy="get it again", kind="empty")
    if not (windows or reduce):
        frames = source.read([int(index) for index in chosen])
        return SampledFrames(frames=frames, times=times[chosen], info=source.info)
    requests = [(chosen, reduce), *((window.choose(times, chosen), window.reduce) for window in windows)]
    arrays: dict[int, np.ndarray] = {}  # by number of the request
    needed = np.unique(np.concatenate([indices.reshape(-1) for indices, _ in requests]))
    step = max(1, _CHUNK_BYTES // max(1, source.info.height * source.info.width * 3))
    for start in range(0, len(needed), step):
        chunk = needed[start : start + step]
        frames = source.read([int(index) for index in chunk])
        for number, (indices, reduce_frames) in enumerate(requests):
            in_chunk = np.isin(indices, chunk)  # same shape as indices
            distinct, inverse = np.unique(indices[in_chunk], return_inverse=True)
            if not len(distinct):
                continue
            kept = frames if len(distinct) == len(chunk) else frames[np.searchsorted(chunk, distinct)]
            kept = kept if reduce_frames is None else reduce_frames(kept)
            if number not in arrays:
                arrays[number] = np.empty((*indices.shape, *kept.shape[1:]), kept.dtype)
            arrays[number][in_chunk] = kept[inverse.reshape(-1)]
    frames, *clips = (arrays[number] for number in range(len(requests)))
    return SampledFrames(frames=frames, times=times[chosen], info=source.info, windows=tuple(clips))
