"""Prefetching video decoder: crops of many videos, made in worker processes ahead of the backbones.

Imports no deep learning library, so that worker processes start quickly and stay small.
Array shapes: T sampled frames, C frames of a clip, h and w height and width of a network's input.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from capvid.backbones.catalog import BackboneEntry, Clip, Preprocess
from capvid.backbones.preprocessing import prepare, shrink
from capvid.errors import CapvidError, DecoderError, MissingVideoError, VideoError, input_error
from capvid.utils.storage import Blob, StorageError, VideoPath, local_copy, parse_path
from capvid.video.frame_sampling import ChosenTimes, Sampling
from capvid.video.frame_source import ArraySource, Windows
from capvid.video.worker_pool import WorkerDiedError, WorkerPool, WorkerTimeoutError

if TYPE_CHECKING:
    from capvid.features.augmentation import Augmentation
    from capvid.video.segmentation import Segmentation

    Variants = tuple[Augmentation | None, ...]

_T = TypeVar("_T")

FRAMES_AT_ONCE = 128  # frames of one video that are decoded together
WITHOUT_JUMPS = 2048  # the same where each part is decoded from the beginning of the video
_TIMELINES_AHEAD = 2  # videos whose timelines are read before their turn
_THUMBNAIL_SIDE = 160  # pixels of the longer side
_THUMBNAIL_QUALITY = 60


@dataclass(frozen=True, kw_only=True)
class View:
    """What a backbone sees of a video; backbones that see the same share it.

    Attributes:
        preprocess: crop and size of the frames.
        clip: frames that a network of clips sees at once; ``None`` for single frames.
        augmentation: random crop and colours of single frames; ``None`` for the original view.
    """

    preprocess: Preprocess
    clip: Clip | None = None
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and self.augmentation is not None:
            raise ValueError("the frames of a clip are not augmented one by one")

    @classmethod
    def of(cls, entry: BackboneEntry) -> View:
        """Return the original view of a backbone."""
        return cls(preprocess=entry.preprocess, clip=entry.clip)

    def windows(self, sampling: Sampling) -> Windows | None:
        """Return what to read around each sampled frame; ``None`` if all frames are needed at once.

        A sampling by windows as long as a clip gives the clips themselves; otherwise a clip is made of the
        frames around the sampled one, the network's own interval apart.
        """
        if self.preprocess.trim or self.augmentation is not None:
            return None
        reduce = partial(prepare, how=self.preprocess)
        if self.clip is None:
            return _Stills(reduce=reduce)
        if self.clip.stride == 1 and (neighbours := sampling.windows(self.clip.frames, reduce)):
            return neighbours
        return Windows(offsets=self.clip.offsets, reduce=reduce)


@dataclass(frozen=True, kw_only=True)
class _Stills(Windows):
    """Windows of the sampled frame alone."""

    offsets: tuple[float, ...] = (0.0,)

    def choose(self, times: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Return the sampled frames (T,) as windows (T, 1)."""
        return sampled[:, None]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Sampled frames of one video, cropped for the backbones.

    Attributes:
        crops: uint8 (T, h, w, 3) for each view, or (T, C, h, w, 3) for a network of clips.
        times: presentation times (T,) in seconds.
        reader: name of the reader.
        lost: number of frames that cannot be decoded.
        duration: length of the video in seconds.
        thumbnails: thumbnails of the frames as JPEG files, if requested.
    """

    crops: tuple[np.ndarray, ...]
    times: np.ndarray
    reader: str
    lost: int
    duration: float
    thumbnails: tuple[bytes, ...] = ()


def decode_video(
    video: VideoPath | ArraySource,
    sampling: Sampling,
    views: Sequence[View],
    reader: str,
    thumbnails: bool = False,
) -> Decoded:
    """Decode a video, or frames in memory, once and crop its sampled frames for each view.

    Raises:
        VideoError: unreadable video; the subclass says why.
    """
    from capvid.video.frame_filter import useful  # with PyAV and decord, for worker processes only
    from capvid.video.readers import memory_errors, read_frames

    with ExitStack() as stack:
        if not isinstance(video, ArraySource):
            video = stack.enter_context(fetched(video))
            stack.enter_context(memory_errors(video))
        windows = [view.windows(sampling) for view in views]
        wanted = [window for window in windows if window]
        if thumbnails:
            wanted.append(_Stills(reduce=make_thumbnails))
        keeps_frames = sampling.clean or None in windows  # otherwise the windows are all that is needed
        sampled = read_frames(
            video,
            sampling,
            reader=reader,
            reduce=shrink if keeps_frames else lambda frames: frames[:, :0, :0],
            windows=wanted,
        )
        if sampling.clean:
            sampled = sampled.take(useful(sampled.frames))
        read = iter(sampled.windows)
        crops = []
        for view, window in zip(views, windows, strict=True):
            if window is not None:
                crops.append(next(read)[:, 0] if isinstance(window, _Stills) else next(read))
            elif view.augmentation is not None:
                crops.append(view.augmentation.prepare(sampled.frames, view.preprocess))
            else:
                crops.append(prepare(sampled.frames, view.preprocess))
        return Decoded(
            crops=tuple(crops),
            times=sampled.times,
            reader=sampled.info.reader,
            lost=sampled.info.lost,
            duration=sampled.info.duration,
            thumbnails=encode_jpegs(next(read)[:, 0]) if thumbnails else (),
        )


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Presentation times of a video's frames.

    Attributes:
        times: (N,) in seconds, ascending.
        duration: in seconds.
        jumps: whether a frame can be decoded without all frames before it.
    """

    times: np.ndarray
    duration: float
    jumps: bool


def read_timeline(path: VideoPath, reader: str) -> Timeline:
    """Open a video and read its presentation times."""
    from capvid.video.readers import open_video

    with fetched(path) as file, open_video(file, reader=reader) as source:
        return Timeline(times=source.frame_times(), duration=source.info.duration, jumps=source.jumps)


@contextmanager
def fetched(path: VideoPath, *, max_bytes: int | None = None, timeout: float | None = None) -> Iterator[Path]:
    """Yield the local file of an input, downloaded for the duration of the block if it is remote.

    Args:
        path: path or address.
        max_bytes: limit of a download; None takes the limit for remote objects.
        timeout: seconds for the download; None disables the limit.

    Raises:
        VideoError: the download failed; errors of the block name the input, not its local copy.
    """
    if not isinstance(path, Blob):
        yield path
        return
    try:
        with local_copy(path, max_bytes=max_bytes, timeout=timeout) as file:
            try:
                yield file
            except VideoError as error:
                error.message = error.message.replace(str(file), str(path))
                error.path = path
                raise
    except FileNotFoundError as error:
        raise MissingVideoError(path, "there is nothing at this address") from error
    except StorageError as error:
        failed = VideoError(path, error.message.removeprefix(f"{path.url}: "), remedy=error.remedy)
        failed.kind = error.kind
        raise failed from error


def make_thumbnails(frames: np.ndarray) -> np.ndarray:
    """Scale frames (n, H, W, 3) uint8 down to (n, h, w, 3), the longer side at most 160 pixels."""
    from PIL import Image

    height, width = frames.shape[1:3]
    scale = min(1.0, _THUMBNAIL_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, reducing_gap=2.0)) for frame in frames])


def encode_jpegs(frames: np.ndarray) -> tuple[bytes, ...]:
    """Encode frames (n, h, w, 3) uint8 as JPEG files."""
    from PIL import Image

    files = [io.BytesIO() for _ in frames]
    for frame, file in zip(frames, files, strict=True):
        Image.fromarray(frame).save(file, "JPEG", quality=_THUMBNAIL_QUALITY, optimize=True)
    return tuple(file.getvalue() for file in files)


class HasPath(Protocol):
    """An input with more than a path.

    Optional attributes: ``key`` names the video, ``sampling`` replaces the common sampling, and ``variants``
    lists the augmentation of each look at the video, ``None`` for the original view.
    """

    @property
    def path(self) -> VideoPath:
        """Path or address of the video."""


Input = str | VideoPath | HasPath


def holds_features(path: VideoPath) -> bool:
    """Whether an input is a feature file rather than a video."""
    return path.suffix.lower() == ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Video:
    """One input, or one part of a long one: what to decode, then its frames or its error.

    Attributes:
        path: path or address.
        name: name of the video.
        decoded: frames; the crops are those of all views in the first variant, then in the second, ...
        error: why there are no frames.
        variants: augmentation of each look at the video.
        parts: number of consecutive parts that make up the input.
        stored: whether it is a feature file, of which nothing is decoded.
        sampling: the input's own sampling until it is decoded; ``None`` for the common one.
    """

    path: VideoPath
    name: str
    decoded: Decoded | None = None
    error: CapvidError | None = None
    variants: Variants = (None,)
    parts: int = 1
    stored: bool = False
    sampling: Sampling | None = None

    @classmethod
    def of(cls, item: Input, *, stored: bool = False) -> Video:
        """Return an input that is still to be decoded; with ``stored``, it may be a feature file."""
        path = parse_path(item) if isinstance(item, str | Path | Blob) else item.path
        return cls(
            path=path,
            name=getattr(item, "key", path.stem),
            variants=getattr(item, "variants", (None,)),
            stored=stored and holds_features(path),
            sampling=getattr(item, "sampling", None),
        )


@dataclass(frozen=True, kw_only=True)
class DecodeStage:
    """The first stage of every pipeline: inputs to decoded videos. Can be sent to another machine.

    Attributes:
        views: what the backbones see.
        sampling: which frames to take.
        cut: segmentation of the videos, of which only the frames it needs are decoded; None for none.
        thumbnails: whether to keep thumbnails of the frames.
        frames: number of frames to prefetch.
        reader: name of the video reader; ``auto`` tries another one where the first fails.
        stored: whether feature files pass through undecoded.
    """

    views: tuple[View, ...]
    sampling: Sampling
    cut: Segmentation | None = None
    thumbnails: bool = False
    frames: int = 32
    reader: str = "auto"
    stored: bool = False

    def videos(self, pool: WorkerPool, inputs: Iterable[Input]) -> Generator[Video, None, None]:
        """Decode inputs in order in the processes of a pool; with ``cut``, long ones in several parts.

        Inputs are consumed lazily. Enough videos are prefetched to cover ``frames`` frames, plus one per
        worker. Closing the generator cancels what has not begun.
        """
        requests: Iterable[Video] = (Video.of(item, stored=self.stored) for item in inputs)
        if self.cut is not None:
            requests = self._split(pool, requests, self.cut)
        num_videos, num_frames, ahead = 0, 0, 1
        submitted = _submit_ahead(
            requests, lambda video: self._submit(pool, video, self.reader), lambda: pool.size + ahead
        )
        with closing(submitted):
            for video, future in submitted:
                if future is not None:
                    video = self._wait(pool, video, future)
                if video.decoded:
                    num_videos += 1
                    num_frames += len(video.variants) * len(video.decoded.times)
                    ahead = max(1, min(self.frames, math.ceil(self.frames * num_videos / num_frames)))
                yield video

    def _submit(self, pool: WorkerPool, video: Video, reader: str) -> Future[Decoded]:
        try:
            views = [replace(view, augmentation=how) for how in video.variants for view in self.views]
        except Exception as error:
            failed = Future[Decoded]()
            failed.set_exception(error)
            return failed
        sampling = video.sampling or self.sampling
        return pool.submit(decode_video, video.path, sampling, views, reader, self.thumbnails)

    def _wait(self, pool: WorkerPool, video: Video, future: Future[Decoded]) -> Video:
        """Return the video with its frames; whatever goes wrong is the error of this video alone."""
        error: CapvidError
        try:
            try:
                decoded = future.result()
            except WorkerDiedError as died:
                if not died.crashed or self.reader != "auto":
                    raise
                decoded = self._submit(pool, video, "pyav").result()  # may read what crashes another reader
            return replace(video, decoded=decoded, sampling=None)
        except WorkerTimeoutError:
            error = _timeout_error(video.path, pool)
        except WorkerDiedError as died:
            error = DecoderError(
                video.path,
                f"the process that decoded it was ended ({died})",
                remedy="convert it, say with ffmpeg",
            )
        except Exception as cause:
            error = input_error(video.path, cause)
        return replace(video, error=error, sampling=None)

    def _split(self, pool: WorkerPool, videos: Iterable[Video], cut: Segmentation) -> Iterator[Video]:
        """Split each video into parts, as soon as its timeline is known."""
        timelines = _submit_ahead(
            videos,
            lambda video: pool.submit(read_timeline, video.path, self.reader),
            lambda: _TIMELINES_AHEAD,
        )
        with closing(timelines):
            for video, future in timelines:
                parts = [video]
                try:
                    timeline = future.result() if future else None
                except WorkerTimeoutError:  # decoding would hang for as long again
                    parts, timeline = [replace(video, error=_timeout_error(video.path, pool))], None
                except Exception:  # decoding raises it again
                    timeline = None
                if timeline is not None:
                    try:
                        parts = split_video(video, timeline, self.sampling, cut)
                    except Exception as cause:
                        parts = [replace(video, error=input_error(video.path, cause))]
                yield from parts


def split_video(video: Video, timeline: Timeline, sampling: Sampling, cut: Segmentation) -> list[Video]:
    """Return the parts of a video with the frames that its segments need; itself if it has no frames."""
    if not len(timeline.times):
        return [video]
    times = timeline.times[cut.choose(video.path, timeline.times, timeline.duration, sampling)].tolist()
    size = FRAMES_AT_ONCE if timeline.jumps else WITHOUT_JUMPS
    chunks = [tuple(times[start : start + size]) for start in range(0, len(times), size)]
    parts = [replace(video, sampling=ChosenTimes(chunk, sampling), parts=len(chunks)) for chunk in chunks]
    return parts or [video]


def _submit_ahead(
    videos: Iterable[Video], submit: Callable[[Video], Future[_T]], ahead: Callable[[], int]
) -> Generator[tuple[Video, Future[_T] | None], None, None]:
    """Submit videos, ``ahead()`` of them before the caller takes the first; cancel the rest when closed.

    Feature files and videos that have failed already are not submitted.
    """
    pending: deque[tuple[Video, Future[_T] | None]] = deque()
    try:
        for video in videos:
            pending.append((video, None if video.stored or video.error else submit(video)))
            while len(pending) > ahead():
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        for _, future in pending:
            if future is not None:
                future.cancel()


def _timeout_error(path: VideoPath, pool: WorkerPool) -> DecoderError:
    return DecoderError(
        path, f"not decoded within {pool.timeout:g} seconds", remedy="allow more with --timeout"
    )
