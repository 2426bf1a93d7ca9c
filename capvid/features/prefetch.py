"""Prefetching video decoder: worker processes decode and crop videos ahead of the backbones.

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

from capvid.backbones.catalog import Clip, Preprocess
from capvid.backbones.preprocessing import prepare, shrink
from capvid.errors import CapvidError, VideoError, input_error
from capvid.utils.storage import Blob, StorageError, VideoPath, is_url, local_copy, parse_path
from capvid.video.frame_sampling import ChosenTimes, Sampling, Windows
from capvid.video.worker_pool import WorkerDiedError, WorkerPool

if TYPE_CHECKING:
    from capvid.features.augmentation import Augmentation
    from capvid.video.frame_source import ArraySource
    from capvid.video.segmentation import Segmentation

    Variants = tuple[Augmentation | None, ...]

_T = TypeVar("_T")
Timeline = tuple[np.ndarray, float, bool]  # ascending frame times (N,), duration, whether jumps are possible

CHUNK_FRAMES = 128  # maximum number of frames of one video that are decoded at once
CHUNK_FRAMES_WITHOUT_JUMPS = 2048  # the same where each chunk is decoded from the start of the video
_TIMELINES_AHEAD = 2  # videos whose timelines are read in advance
_THUMBNAIL_SIDE = 160  # pixels of the longer side
_THUMBNAIL_QUALITY = 60


@dataclass(frozen=True, kw_only=True)
class View:
    """How the frames of a video are cropped for a backbone; backbones with equal views share the crops."""

    preprocess: Preprocess
    clip: Clip | None = None  # None for single frames
    augmentation: Augmentation | None = None  # None for the original view

    def windows(self, sampling: Sampling) -> Windows | None:
        """Return what to read around each sampled frame; ``None`` if all frames are needed at once.

        Clips are the sampling's own windows if they have the clip's length, or else frames around the sampled
        frame at the clip's stride.

        Raises:
            ValueError: a view of clips has an augmentation.
        """
        if self.clip is not None and self.augmentation is not None:
            raise ValueError("the frames of a clip cannot be augmented one by one")
        if self.preprocess.trim or self.augmentation is not None:
            return None
        reduce = partial(prepare, preprocess=self.preprocess)
        if self.clip is None:
            return Windows(size=1, reduce=reduce)
        if self.clip.stride == 1 and (windows := sampling.windows(self.clip.frames, reduce)):
            return windows
        return Windows(offsets=self.clip.offsets, reduce=reduce)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Sampled frames of one video, cropped for the backbones."""

    crops: tuple[np.ndarray, ...]  # uint8 (T, h, w, 3) for each view, or (T, C, h, w, 3) for a clip network
    times: np.ndarray  # presentation times (T,) in seconds
    reader: str  # name of the reader
    lost: int  # number of frames that cannot be decoded
    duration: float  # of the video in seconds
    thumbnails: tuple[bytes, ...] = ()  # of the frames as JPEG files, if requested


def decode_video(
    video: VideoPath | ArraySource,
    sampling: Sampling,
    views: Sequence[View],
    reader: str,
    thumbnails: bool = False,
) -> Decoded:
    """Decode a video, or frames in memory, once and crop its sampled frames for each view.

    Raises:
        VideoError: the video cannot be read; its ``kind`` says why.
    """
    from capvid.video.frame_filter import useful_frames  # imports PyAV and decord: for worker processes only
    from capvid.video.readers import memory_errors, read_frames

    with ExitStack() as stack:
        if isinstance(video, VideoPath):
            video = stack.enter_context(local_file(video, ranges=reader != "decord"))
            stack.enter_context(memory_errors(video))
        windows = [view.windows(sampling) for view in views]
        requested = [window for window in windows if window]
        if thumbnails:
            requested.append(Windows(size=1, reduce=make_thumbnails))
        keep_frames = sampling.clean or None in windows  # otherwise nothing but the windows is needed
        sampled = read_frames(
            video,
            sampling,
            reader=reader,
            reduce=shrink if keep_frames else lambda frames: frames[:, :0, :0],
            windows=requested,
            hdr_side=max(map(_side, views), default=None) if all(map(_side, views)) else None,
        )
        if sampling.clean:
            sampled = sampled.take(useful_frames(sampled.frames))
        clips = iter(sampled.windows)
        crops = []
        for view, window in zip(views, windows, strict=True):
            if window is not None:
                crops.append(next(clips) if view.clip else next(clips)[:, 0])
            else:
                crop = view.augmentation.prepare if view.augmentation else prepare
                crops.append(crop(sampled.frames, view.preprocess))
        return Decoded(
            crops=tuple(crops),
            times=sampled.times,
            reader=sampled.info.reader,
            lost=sampled.info.lost,
            duration=sampled.info.duration,
            thumbnails=encode_jpegs(next(clips)[:, 0]) if thumbnails else (),
        )


def _side(view: View) -> int:
    """Return the short side of frames from which a view loses nothing visible; 0 if it needs all pixels."""
    preprocess = view.preprocess
    if preprocess.max_pixels is not None or view.augmentation is not None:
        return 0
    side = max(preprocess.size) if preprocess.size else preprocess.resize
    return 2 * side if preprocess.trim else side + side // 4  # borders may be cut off, and then be resized


def read_timeline(path: VideoPath, reader: str) -> Timeline:
    """Return the frame times and duration of a video in seconds, and whether the reader can jump in it."""
    from capvid.video.readers import open_video

    with local_file(path, ranges=reader != "decord") as file, open_video(file, reader=reader) as source:
        return source.frame_times(), source.info.duration, source.jumps


@contextmanager
def local_file(
    path: VideoPath, *, max_bytes: int | None = None, timeout: float | None = None, ranges: bool = False
) -> Iterator[Path]:
    """Yield the local file of an input, which is downloaded for the duration of the block if it is remote.

    Args:
        path: path or address.
        max_bytes: maximum size of a download; None takes the limit for remote objects.
        timeout: seconds for the download; None disables the limit.
        ranges: whether parts of the file may be missing that PyAV fetches when it needs them.

    Raises:
        VideoError: the download failed; errors of the block name the input, not its local copy.
    """
    from capvid.video.remote_file import sparse_copy  # imports PyAV, which only worker processes need

    if not isinstance(path, Blob):
        yield path
        return
    try:
        with ExitStack() as stack:
            file = stack.enter_context(sparse_copy(path, timeout)) if ranges and is_url(path.url) else None
            if file is None:
                file = stack.enter_context(local_copy(path, max_bytes=max_bytes, timeout=timeout))
            try:
                yield file
            except VideoError as error:
                error.message = error.message.replace(str(file), str(path))
                error.path = path
                raise
    except FileNotFoundError as error:
        raise VideoError(path, "there is nothing at this address", kind="missing") from error
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


def encode_jpegs(frames: np.ndarray, *, quality: int = _THUMBNAIL_QUALITY) -> tuple[bytes, ...]:
    """Encode frames (n, h, w, 3) uint8 as JPEG files."""
    from PIL import Image

    files = [io.BytesIO() for _ in frames]
    for frame, file in zip(frames, files, strict=True):
        Image.fromarray(frame).save(file, "JPEG", quality=quality, optimize=True)
    return tuple(file.getvalue() for file in files)


class HasPath(Protocol):
    """An input with more than a path.

    Optional attributes: ``key`` names the video, ``sampling`` replaces the common sampling, and ``variants``
    lists the augmentations with which the video is decoded, ``None`` for the original view.
    """

    @property
    def path(self) -> VideoPath:
        """Path or address of the video."""


Input = str | VideoPath | HasPath


def is_feature_file(path: VideoPath) -> bool:
    """Return whether an input is a feature file rather than a video."""
    return path.suffix.lower() == ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Video:
    """One input, or one chunk of a long one: what to decode, then its frames or its error."""

    path: VideoPath
    name: str
    decoded: Decoded | None = None  # crops of all views in the first variant, then in the second, ...
    error: CapvidError | None = None  # why there are no frames
    variants: Variants = (None,)  # augmentations with which it is decoded; None for the original view
    num_chunks: int = 1  # number of consecutive chunks that make up the input
    is_features: bool = False  # whether it is a feature file, which is not decoded
    sampling: Sampling | None = None  # its own sampling until it is decoded; None for the common one

    @classmethod
    def of(cls, item: Input, *, feature_files: bool = False) -> Video:
        """Return an input that is not decoded yet; with ``feature_files``, it may be a feature file."""
        path = parse_path(item) if isinstance(item, str | Path | Blob) else item.path
        return cls(
            path=path,
            name=getattr(item, "key", path.stem),
            variants=getattr(item, "variants", (None,)),
            is_features=feature_files and is_feature_file(path),
            sampling=getattr(item, "sampling", None),
        )


@dataclass(frozen=True, kw_only=True)
class DecodeStage:
    """The first stage of every pipeline: inputs to decoded videos. Can be sent to another machine."""

    views: tuple[View, ...]
    sampling: Sampling
    segmentation: Segmentation | None = None  # only the frames that its segments need are decoded
    thumbnails: bool = False  # whether to make thumbnails of the frames
    frames: int = 32  # number of frames to prefetch
    reader: str = "auto"  # tries another reader if the first fails
    feature_files: bool = False  # whether feature files pass through without decoding

    def videos(self, pool: WorkerPool, inputs: Iterable[Input]) -> Generator[Video, None, None]:
        """Decode inputs in order in the processes of a pool; with ``segmentation``, long ones in chunks.

        Inputs are consumed lazily. Enough videos are prefetched to cover ``frames`` frames, plus one per
        worker. Closing the generator cancels pending work.
        """
        requests: Iterable[Video] = map(partial(Video.of, feature_files=self.feature_files), inputs)
        if self.segmentation is not None:
            requests = self._split(pool, requests, self.segmentation)
        num_videos, num_frames, prefetch = 0, 0, 1
        submitted = _submit_ahead(
            requests, lambda video: self._submit(pool, video, self.reader), lambda: pool.size + prefetch
        )
        with closing(submitted):
            for video, future in submitted:
                if future is not None:
                    video = self._wait(pool, video, future)
                if video.decoded:
                    num_videos += 1
                    num_frames += len(video.variants) * len(video.decoded.times)
                    prefetch = max(1, min(self.frames, math.ceil(self.frames * num_videos / num_frames)))
                yield video

    def _submit(self, pool: WorkerPool, video: Video, reader: str) -> Future[Decoded]:
        """Submit a video for decoding."""
        views = [replace(view, augmentation=variant) for variant in video.variants for view in self.views]
        sampling = video.sampling or self.sampling
        return pool.submit(decode_video, video.path, sampling, views, reader, self.thumbnails)

    def _wait(self, pool: WorkerPool, video: Video, future: Future[Decoded]) -> Video:
        """Return the video with its frames, or with an error, which concerns no other video."""
        error: CapvidError
        try:
            try:
                decoded = future.result()
            except WorkerDiedError as died:
                if not died.crashed or self.reader != "auto":
                    raise
                # PyAV may read what crashes another reader
                decoded = self._submit(pool, video, "pyav").result()
            return replace(video, decoded=decoded, sampling=None)
        except TimeoutError:
            error = _timeout_error(video.path, pool)
        except WorkerDiedError as died:
            problem = f"the decoding process was ended ({died})"
            error = VideoError(
                video.path, problem, remedy="convert it, for example with ffmpeg", kind="decoder"
            )
        except Exception as cause:
            error = input_error(video.path, cause)
        return replace(video, error=error, sampling=None)

    def _split(
        self, pool: WorkerPool, videos: Iterable[Video], segmentation: Segmentation
    ) -> Iterator[Video]:
        """Split each video into chunks, as soon as its timeline is known."""
        timelines = _submit_ahead(
            videos,
            lambda video: pool.submit(read_timeline, video.path, self.reader),
            lambda: _TIMELINES_AHEAD,
        )
        with closing(timelines):
            for video, future in timelines:
                try:
                    timeline = future.result() if future else None
                except TimeoutError:  # decoding would only hang until the same deadline
                    yield replace(video, error=_timeout_error(video.path, pool))
                    continue
                except Exception:  # decoding will raise it again
                    timeline = None
                chunks = [video]
                if timeline is not None:
                    try:
                        chunks = split_video(video, timeline, self.sampling, segmentation)
                    except Exception as cause:
                        chunks = [replace(video, error=input_error(video.path, cause))]
                yield from chunks


def split_video(
    video: Video, timeline: Timeline, sampling: Sampling, segmentation: Segmentation
) -> list[Video]:
    """Return chunks of a video with the frames that its segments need, or the video if it has no frames."""
    times, duration, jumps = timeline
    if not len(times):
        return [video]
    chosen = times[segmentation.choose(video.path, times, duration, sampling)].tolist()
    size = CHUNK_FRAMES if jumps else CHUNK_FRAMES_WITHOUT_JUMPS
    chunks = [tuple(chosen[start : start + size]) for start in range(0, len(chosen), size)]
    samplings = [ChosenTimes(chunk, sampling) for chunk in chunks]
    return [replace(video, sampling=chunk, num_chunks=len(chunks)) for chunk in samplings] or [video]


def _submit_ahead(
    videos: Iterable[Video], submit: Callable[[Video], Future[_T]], prefetch: Callable[[], int]
) -> Generator[tuple[Video, Future[_T] | None], None, None]:
    """Submit videos and yield them in order, with ``prefetch()`` videos submitted beyond the one yielded.

    Feature files and videos that have failed already are not submitted. Closing the generator cancels the
    pending videos.
    """
    pending: deque[tuple[Video, Future[_T] | None]] = deque()
    try:
        for video in videos:
            pending.append((video, None if video.is_features or video.error else submit(video)))
            while len(pending) > prefetch():
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        for _, future in pending:
            if future is not None:
                future.cancel()


def _timeout_error(path: VideoPath, pool: WorkerPool) -> VideoError:
    problem = f"not decoded within {pool.timeout:g} seconds"
    return VideoError(path, problem, remedy="allow more with --timeout", kind="decoder")
