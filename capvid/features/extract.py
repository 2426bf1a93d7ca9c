"""Features of many videos: decoding in other processes while the backbones compute.

Notation for array shapes: T frames of one video, h and w height and width of a network's input, L locations,
D width of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from capvid import __version__
from capvid.errors import CapvidError, FeatureFileError, RunError, UsageError
from capvid.features.ahead import Decoder, Input, Video
from capvid.features.decode import Decoded, View
from capvid.features.file import FeatureHeader, Features
from capvid.isolation import input_error
from capvid.storage import VideoPath
from capvid.video.workers import WorkerPool

if TYPE_CHECKING:
    from capvid.features.backbones import Backbone
    from capvid.video.sampling import Sampling

TIMEOUT = 600.0  # seconds for one file


@dataclass(frozen=True, kw_only=True)
class ExtractionResult:
    """What became of one input: its features, or the error; ``lost`` frames could not be decoded.

    ``pictures`` are its frames, small and as JPEG files, if they were asked for. Of an input with several
    variants, ``features`` are those of the first and ``further`` those of the others. Of one that is decoded
    in several ``parts``, there are so many results one after the other. A file of features that only passed
    has neither features nor an error. ``name`` is the video's.
    """

    path: VideoPath
    features: Features | None
    error: CapvidError | None
    lost: int = 0
    pictures: tuple[bytes, ...] = ()
    further: tuple[Features, ...] = ()
    parts: int = 1
    name: str = ""

    def failed(self, error: CapvidError) -> ExtractionResult:
        """Return the result of the same input with an error instead of features."""
        return replace(self, features=None, error=error, pictures=(), further=())


def extract_features(
    inputs: Iterable[Input],
    backbones: Sequence[Backbone],
    sampling: Sampling,
    *,
    workers: int = 2,
    batch_size: int = 32,
    reader: str = "auto",
    dtype: str = "float16",
    timeout: float | None = TIMEOUT,
    pictures: bool = False,
    pool: WorkerPool | None = None,
) -> Generator[ExtractionResult, None, None]:
    """Compute the features of videos, in their order, as they come.

    Enough videos are decoded ahead to fill the next batch, and what is kept of each is only its crops.
    Batches reach from one video into the next.
    Features are rounded to ``dtype``, so that they are the same whether they go through a file or not; they
    do not depend on which videos are worked on together, nor on the number of workers.

    Args:
        inputs: paths of videos, or objects as :class:`~capvid.features.ahead.HasPath` says; taken one by one
            as they are needed.
        backbones: one stream each.
        sampling: which frames to take.
        workers: processes that decode.
        batch_size: frames gathered before the backbones compute, from several videos where they are short.
        reader: name of the video reader; ``auto`` goes on to the next where one fails.
        dtype: float16 or float32, in which the features are to be stored.
        timeout: seconds after which a file is given up; None waits for ever.
        pictures: whether to give small pictures of the frames as well.
        pool: processes that go on living afterwards, instead of ``workers`` of their own with ``timeout``.

    Yields:
        One result per input; a video that cannot be read is a result with its error.

    Raises:
        UsageError: no backbone, or a number below 1.
        CapvidError: what concerns all inputs, such as a device without enough memory.
    """
    if workers < 1:
        raise UsageError("there must be at least 1 worker")
    _check(backbones, batch_size, dtype)

    def run() -> Generator[ExtractionResult, None, None]:
        with ExitStack() as stack:
            processes = pool or stack.enter_context(WorkerPool(workers, timeout=timeout))
            decoder = Decoder(
                processes, sampling=sampling, views=views_of(backbones), reader=reader, pictures=pictures
            )
            videos = stack.enter_context(closing(decoder.videos(inputs, frames=batch_size)))
            yield from compute_features(videos, backbones, sampling, batch_size=batch_size, dtype=dtype)

    return run()


def compute_features(
    videos: Iterable[Video],
    backbones: Sequence[Backbone],
    sampling: Sampling,
    *,
    batch_size: int = 32,
    dtype: str = "float16",
) -> Iterator[ExtractionResult]:
    """Compute the features of videos that were decoded for these backbones (:func:`views_of`), in order.

    Arguments and results are those of :func:`extract_features`.
    """
    _check(backbones, batch_size, dtype)
    return _Extraction(backbones, sampling, batch_size, dtype).results(videos)


def views_of(backbones: Sequence[Backbone]) -> list[View]:
    """What of a video these backbones look at; those that look at the same share it."""
    return list(dict.fromkeys(View.of(backbone.entry) for backbone in backbones))


def _check(backbones: Sequence[Backbone], batch_size: int, dtype: str) -> None:
    if not backbones:
        raise UsageError("no backbone was given")
    if batch_size < 1:
        raise UsageError("the batch size must be at least 1")
    if dtype not in _DTYPES:
        raise UsageError(f"features cannot be stored as {dtype}", remedy=f"use {' or '.join(_DTYPES)}")


_DTYPES = ("float16", "float32")


class _Stream:
    """Crops of one video after the other, through one backbone in full batches that reach across videos."""

    def __init__(self, backbone: Backbone, batch_size: int, dtype: str) -> None:
        self.backbone = backbone
        self.view = View.of(backbone.entry)
        self.together = backbone.together(batch_size)
        self._batch_size = batch_size
        self._dtype = dtype
        self._waiting: list[np.ndarray] = []  # crops that do not fill a batch
        self._begun: deque[tuple[np.ndarray, Future[np.ndarray]]] = deque()  # batches of crops
        self._computed: list[np.ndarray] = []  # features that belong to the next videos
        self._taken = 0  # frames
        self._failures: dict[int, Exception] = {}  # by number of the frame

    def put(self, crops: np.ndarray) -> None:
        """Add the crops of a video, and begin to compute what fills batches."""
        crops = np.concatenate([*self._waiting, crops]) if self._waiting else crops
        full = len(crops) - len(crops) % self.together
        for start in range(0, full, self.together):
            self._begin(crops[start : start + self.together])
        self._waiting = [crops[full:].copy()] if full < len(crops) else []

    def flush(self) -> None:
        """Begin to compute the rest as well."""
        if self._waiting:
            self._begin(np.concatenate(self._waiting))
            self._waiting = []

    def _begin(self, crops: np.ndarray) -> None:
        self._begun.append((crops, self.backbone.submit(crops, batch_size=self._batch_size)))

    def begun(self) -> int:
        """Of how many frames features are there or being computed."""
        return sum(map(len, self._computed)) + sum(len(crops) for crops, _ in self._begun)

    def busy(self) -> int:
        """How many batches are being computed."""
        return sum(not future.done() for _, future in self._begun)

    def there(self, frames: int) -> bool:
        """Whether the features of the next frames can be had without waiting."""
        count = sum(map(len, self._computed))
        for crops, future in self._begun:
            if count >= frames or not future.done():
                break
            count += len(crops)
        return count >= frames

    def take(self, frames: int) -> np.ndarray | Exception:
        """Wait for the features of the next frames, (frames, D) or (frames, L, D), and remove them.

        Returns:
            The features, or what was raised while those of one of the frames were computed.
        """
        while (count := sum(map(len, self._computed))) < frames:
            computed = self._compute(*self._begun.popleft(), first=self._taken + count)
            with np.errstate(over="ignore"):
                self._computed.append(computed.astype(self._dtype).astype(np.float32))
        failures = [
            self._failures.pop(n) for n in range(self._taken, self._taken + frames) if n in self._failures
        ]
        self._taken += frames
        if not frames:
            return np.zeros((0, *self._inner), np.float32)
        features = self._computed[0] if len(self._computed) == 1 else np.concatenate(self._computed)
        self._computed = [features[frames:]]
        if failures:
            return failures[0]
        return features[:frames].copy()  # a view would keep the features of other videos in memory

    def _compute(self, crops: np.ndarray, future: Future[np.ndarray], *, first: int) -> np.ndarray:
        """Wait for the features of a batch that begins with frame number ``first``.

        A batch that fails is computed again frame by frame, since it may hold frames of several videos and
        only one of them may be at fault; features do not depend on the other frames of a batch.

        Raises:
            RunError: the error concerns every frame.
        """
        try:
            return future.result()
        except RunError:
            raise
        except Exception:
            return np.concatenate(
                [self._compute_frame(crops[n : n + 1], first + n) for n in range(len(crops))]
            )

    def _compute_frame(self, crops: np.ndarray, number: int) -> np.ndarray:
        try:
            return self.backbone.submit(crops, batch_size=self._batch_size).result()
        except RunError:
            raise
        except Exception as error:
            self._failures[number] = error
            return np.zeros((1, *self._inner), np.float32)

    @property
    def _inner(self) -> tuple[int, ...]:
        """Shape of the features of one frame."""
        header = self.backbone.header
        return (header.locations, header.width) if header.locations else (header.width,)

    def close(self) -> None:
        """Give up what has not been begun."""
        for _, future in self._begun:
            future.cancel()


@dataclass
class _Pending:
    """A video whose features are being computed, and how many frames of it each stream was given."""

    video: Video
    frames: list[int] = field(default_factory=list)


class _Extraction:
    """What is computed of decoded videos."""

    def __init__(
        self, backbones: Sequence[Backbone], sampling: Sampling, batch_size: int, dtype: str
    ) -> None:
        self.streams = [_Stream(backbone, batch_size, dtype) for backbone in backbones]
        self.sampling = sampling
        self.dtype = dtype
        self.views = views_of(backbones)
        self._enough = 2 * max(stream.backbone.lanes.count for stream in self.streams)
        self._room = self._enough * max(stream.together for stream in self.streams)
        self._waiting: deque[_Pending] = deque()

    def results(self, videos: Iterable[Video]) -> Iterator[ExtractionResult]:
        """Begin to compute videos as they come, and give those that are complete, in order."""
        try:
            for video in videos:
                self._waiting.append(self._put(video))
                crowded = len(self._waiting) > self._room  # nobody waits for ever behind inputs that fail
                if crowded and not self._begun():
                    self._flush()
                yield from self._finished(everything=crowded)
            self._flush()
            yield from self._finished(everything=True)
        finally:
            for stream in self.streams:
                stream.close()

    def _put(self, video: Video) -> _Pending:
        """Give a video's crops to the streams."""
        pending = _Pending(video, [0] * len(self.streams))
        try:
            for number, stream in enumerate(self.streams):
                crops = video.decoded.crops if video.decoded else ()
                for each in crops[self.views.index(stream.view) :: len(self.views)]:
                    stream.put(each)
                    pending.frames[number] += len(each)
        except Exception as cause:
            pending.video = replace(video, decoded=None, error=input_error(video.path, cause))
        return pending

    def _begun(self) -> bool:
        """Whether all of the next video is there or being computed."""
        return all(s.begun() >= n for s, n in zip(self.streams, self._waiting[0].frames, strict=True))

    def _flush(self) -> None:
        for stream in self.streams:
            stream.flush()

    def _finished(self, *, everything: bool = False) -> Iterator[ExtractionResult]:
        """Remove and finish the videos at the head of the queue of which everything is computed.

        Where more is being computed than keeps the lanes busy, those are waited for that come next; all that
        can be had, if ``everything`` is.
        """
        while self._waiting and self._begun():
            wanted = zip(self.streams, self._waiting[0].frames, strict=True)
            there = all(stream.there(frames) for stream, frames in wanted)
            enough = sum(stream.busy() for stream in self.streams) >= self._enough
            if not (there or enough or everything):
                return
            yield self._result(self._waiting.popleft())

    def _result(self, pending: _Pending) -> ExtractionResult:
        """Wait for the features of a video; also of one that failed, whose frames must leave the streams."""
        video = pending.video
        parts = [stream.take(n) for stream, n in zip(self.streams, pending.frames, strict=True)]
        failed = ExtractionResult(
            path=video.path, features=None, error=video.error, parts=video.parts, name=video.name
        )
        if video.decoded is None:
            return failed
        try:
            return self._features(video, video.decoded, parts)
        except Exception as cause:
            return failed.failed(input_error(video.path, cause))

    def _features(
        self, video: Video, decoded: Decoded, taken: Sequence[np.ndarray | Exception]
    ) -> ExtractionResult:
        parts = []
        for stream, part in zip(self.streams, taken, strict=True):
            if isinstance(part, Exception):
                raise part
            if not np.isfinite(part).all():
                name = stream.backbone.entry.name
                raise FeatureFileError(
                    f"{video.path}: {name} gives features that {self.dtype} cannot hold",
                    remedy="store them as float32",
                )
            parts.append(part)
        header = FeatureHeader(
            streams=tuple(stream.backbone.header for stream in self.streams),
            sampling=self.sampling.spec(),
            reader=decoded.reader,
            dtype=self.dtype,
            capvid_version=__version__,
        )
        frames = len(decoded.times)
        features, *further = (
            Features(
                header=header,
                streams=tuple(part[number * frames : (number + 1) * frames] for part in parts),
                times=decoded.times,
                video=video.name,
                duration=decoded.duration,
                view=variant.number if variant else 0,
            )
            for number, variant in enumerate(video.variants)
        )
        return ExtractionResult(
            path=video.path,
            features=features,
            error=None,
            lost=decoded.lost,
            pictures=decoded.pictures,
            further=tuple(further),
            parts=video.parts,
            name=video.name,
        )
