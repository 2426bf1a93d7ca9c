"""Feature extraction: backbones compute features while worker processes decode the next videos.

Array shapes: T frames of one video, h and w height and width of a network's input, L locations, D width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from capvid.errors import CapvidError, FeatureFileError, RunError, UsageError, input_error
from capvid.features.feature_file import FeatureHeader, Features
from capvid.features.prefetch import DecodeStage as DecodeStage
from capvid.features.prefetch import Input, Video, View
from capvid.utils.storage import Blob, VideoPath
from capvid.version import __version__
from capvid.video.frame_sampling import Sampling, parse_sampling
from capvid.video.worker_pool import WorkerPool

if TYPE_CHECKING:
    from capvid.backbones.backbone import Backbone


TIMEOUT = 600.0  # seconds for one file
_DTYPES = ("float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ExtractionResult:
    """The features of one input, or its error.

    Attributes:
        path: path or address of the input.
        features: features of the first variant; ``None`` with an error, and for a feature file as input.
        error: why there are no features.
        lost: number of frames that could not be decoded.
        thumbnails: thumbnails of the frames as JPEG files, if requested.
        further: features of the other variants, such as augmented views.
        name: name of the video.
        embeddings: embeddings (T, D) of the frames by an image-text encoder, if requested.
    """

    path: VideoPath
    features: Features | None
    error: CapvidError | None
    lost: int = 0
    thumbnails: tuple[bytes, ...] = ()
    further: tuple[Features, ...] = ()
    name: str = ""
    embeddings: np.ndarray | None = None

    def failed(self, error: CapvidError) -> ExtractionResult:
        """Return the result of the same input with an error instead of features."""
        return replace(self, features=None, error=error, thumbnails=(), further=())


def extract(
    inputs: Input | Iterable[Input],
    backbones: str | Backbone | Sequence[str | Backbone],
    sampling: str | Sampling = "uniform:28",
    *,
    device: str = "auto",
    workers: int = 2,
    timeout: float | None = TIMEOUT,
    reader: str = "auto",
    batch_size: int = 32,
    dtype: str = "float16",
    pool: WorkerPool | None = None,
    progress: Callable[[ExtractionResult], None] | None = None,
) -> Generator[ExtractionResult, None, None]:
    """Extract the features of videos, yielding results in order as soon as they are ready.

    Videos are prefetched, and batches combine frames of consecutive videos. Features are rounded to
    ``dtype``, so that they are the same whether they are saved in between or not; they depend neither on the
    other videos nor on the number of workers.

    Args:
        inputs: paths or addresses of videos, or :class:`~capvid.features.prefetch.HasPath` objects, consumed
            lazily; or a single one.
        backbones: one per stream: names, whose default layers are computed on ``device``, or backbones from
            :func:`~capvid.backbones.backbone.load_backbone`.
        sampling: which frames to take, such as ``uniform:28`` or ``fps:2``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        workers: number of decoding processes.
        timeout: seconds before a file is abandoned; None disables the limit.
        reader: name of the video reader; ``auto`` tries another reader if the first fails.
        batch_size: frames per batch.
        dtype: float16 or float32.
        pool: worker processes to use instead of ``workers`` new ones; they are not closed.
        progress: function called with each result before it is yielded.

    Yields:
        One result per input; a video that cannot be read yields a result with its error.

    Raises:
        UsageError: there is no such backbone, sampling or device, no backbone, or a number is below 1.
        WeightsError: a backbone's weights are missing or damaged.
        CapvidError: an error that concerns all inputs, such as a device without enough memory.
    """
    from capvid.backbones.backbone import load_backbone
    from capvid.utils.device import resolve_device

    if isinstance(inputs, str | Path | Blob) or not isinstance(inputs, Iterable):
        inputs = [inputs]
    if isinstance(backbones, str) or not isinstance(backbones, Sequence):
        backbones = [backbones]
    if not backbones:
        raise UsageError("no backbone was given")
    for name, number in (("workers", workers), ("batch_size", batch_size)):
        if number < 1:
            raise UsageError(f"{name} must be at least 1, got {number}")
    if dtype not in _DTYPES:
        raise UsageError(f"features cannot be stored as {dtype}", remedy=f"use {' or '.join(_DTYPES)}")
    sampling = parse_sampling(sampling) if isinstance(sampling, str) else sampling
    loaded = [
        load_backbone(backbone, device=resolve_device(device)) if isinstance(backbone, str) else backbone
        for backbone in backbones
    ]
    stage = DecodeStage(views=tuple(views_of(loaded)), sampling=sampling, frames=batch_size, reader=reader)

    def run() -> Generator[ExtractionResult, None, None]:
        with ExitStack() as stack:
            processes = pool or stack.enter_context(WorkerPool(workers, timeout=timeout))
            videos = stack.enter_context(closing(stage.videos(processes, inputs)))
            for result in compute_features(videos, loaded, sampling, batch_size=batch_size, dtype=dtype):
                if progress is not None:
                    progress(result)
                yield result

    return run()


def views_of(backbones: Sequence[Backbone]) -> list[View]:
    """Return the distinct original views of the backbones."""
    entries = [backbone.entry for backbone in backbones]
    return list(dict.fromkeys([View(preprocess=entry.preprocess, clip=entry.clip) for entry in entries]))


@dataclass
class _Batch:
    """Crops that a backbone computes at once, from one video or several."""

    crops: list[np.ndarray] = field(default_factory=list)
    size: int = 0
    future: Future[np.ndarray] | None = None  # features, once the batch is full


_Rows = tuple[_Batch, int, int]  # a batch, and the range of its rows: start and stop


@dataclass
class _Stream:
    """One backbone, which computes the crops of consecutive videos in full batches."""

    backbone: Backbone
    batch_size: int
    running: list[Future[np.ndarray]] = field(default_factory=list)
    batch: _Batch = field(default_factory=_Batch)  # the batch that is being filled

    def put(self, crops: np.ndarray) -> list[_Rows]:
        """Add the crops of a video to batches, submit those that are full, and return the crops' rows."""
        rows: list[_Rows] = []
        length = self.backbone.batch_length(self.batch_size)
        while len(crops):
            batch, start = self.batch, self.batch.size
            added, crops = crops[: length - start], crops[length - start :]
            batch.size += len(added)
            full = batch.size == length
            batch.crops.append(added if full else added.copy())  # a slice would keep all crops in memory
            rows.append((batch, start, batch.size))
            if full:
                self.flush()
        return rows

    def flush(self) -> None:
        """Submit the batch that is being filled."""
        batch, self.batch = self.batch, _Batch()
        if batch.crops:
            batch.crops = [np.concatenate(batch.crops)] if len(batch.crops) > 1 else batch.crops
            batch.future = self.backbone.submit(batch.crops[0], batch_size=self.batch_size)
            self.running.append(batch.future)

    def wait(self, rows: Sequence[_Rows], dtype: str) -> np.ndarray:
        """Wait for the features of one video, (T, D) or (T, L, D) float32, rounded to ``dtype``.

        If a batch fails, the video's own frames are computed again one by one, since the cause may be a frame
        of another video; features do not depend on the other frames of a batch.
        """
        arrays = [np.zeros((0, *self.backbone.header.inner), np.float32)]
        for batch, start, stop in rows:
            assert batch.future is not None
            try:
                arrays.append(batch.future.result()[start:stop])
            except RunError:  # concerns every frame
                raise
            except Exception:
                for row in range(start, stop):
                    crops = batch.crops[0][row : row + 1]
                    arrays.append(self.backbone.submit(crops, batch_size=self.batch_size).result())
        with np.errstate(over="ignore"):
            features: np.ndarray = np.concatenate(arrays).astype(dtype).astype(np.float32)
        return features


def compute_features(
    videos: Iterable[Video],
    backbones: Sequence[Backbone],
    sampling: Sampling,
    *,
    batch_size: int = 32,
    dtype: str = "float16",
) -> Iterator[ExtractionResult]:
    """Compute the features of decoded videos, yielding one result per input in order.

    Arguments are those of :func:`extract`; the videos were decoded for :func:`views_of` the backbones.
    """
    streams = [_Stream(backbone, batch_size) for backbone in backbones]
    views = views_of(backbones)
    enough = 2 * max([backbone.concurrency for backbone in backbones])  # batches that keep the threads busy
    max_waiting = enough * max([backbone.batch_length(batch_size) for backbone in backbones])
    queue: deque[tuple[Video, list[list[_Rows]], list[_Batch]]] = deque()
    chunks: list[ExtractionResult] = []  # results of one input
    try:
        for video in chain(videos, [None]):
            if video is not None:
                video, rows = _submit_crops(video, streams, views)
                queue.append((video, rows, [batch for stream_rows in rows for batch, _, _ in stream_rows]))
            # a video must not wait indefinitely behind inputs that fail, which do not fill its last batch
            urgent = video is None or len(queue) > max_waiting
            if video is None or (urgent and None in [batch.future for batch in queue[0][2]]):
                for stream in streams:
                    stream.flush()
            while queue and None not in (futures := [batch.future for batch in queue[0][2]]):
                for stream in streams:
                    stream.running = [future for future in stream.running if not future.done()]
                busy = sum([len(stream.running) for stream in streams])
                waiting = [future for future in futures if future and not future.done()]
                if waiting and busy < enough and not urgent:
                    break
                finished, rows, _ = queue.popleft()
                chunks.append(_collect(finished, rows, streams, sampling, dtype))
                if len(chunks) == finished.num_chunks:
                    yield merge_chunks(chunks)
                    chunks = []
    finally:
        for stream in streams:
            for future in stream.running:
                future.cancel()


def _submit_crops(
    video: Video, streams: Sequence[_Stream], views: Sequence[View]
) -> tuple[Video, list[list[_Rows]]]:
    """Add the crops of a video to the batches; return the video without them, and its rows by stream."""
    if video.decoded is None:
        return video, []
    rows: list[list[_Rows]] = []
    try:
        for stream in streams:
            crops = video.decoded.crops[views.index(views_of([stream.backbone])[0]) :: len(views)]
            rows.append([row for variant in crops for row in stream.put(variant)])
    except Exception as cause:
        return replace(video, decoded=None, error=input_error(video.path, cause)), []
    return replace(video, decoded=replace(video.decoded, crops=())), rows


def _collect(
    video: Video, rows: list[list[_Rows]], streams: Sequence[_Stream], sampling: Sampling, dtype: str
) -> ExtractionResult:
    """Wait for the features of a video, or of one chunk of it."""
    decoded = video.decoded
    result = ExtractionResult(path=video.path, features=None, error=video.error, name=video.name)
    if decoded is None:
        return result
    header = FeatureHeader(
        streams=tuple([stream.backbone.header for stream in streams]),
        sampling=sampling.spec(),
        reader=decoded.reader,
        dtype=dtype,
        capvid_version=__version__,
    )
    try:
        arrays = [stream.wait(stream_rows, dtype) for stream, stream_rows in zip(streams, rows, strict=True)]
        for stream, array in zip(streams, arrays, strict=True):
            if not np.isfinite(array).all():
                problem = f"{stream.backbone.entry.name} computes features that {dtype} cannot hold"
                raise FeatureFileError(f"{video.path}: {problem}", remedy="store them as float32")
        variants = []
        for number, variant in enumerate(video.variants):
            frames = slice(number * len(decoded.times), (number + 1) * len(decoded.times))
            variants.append(
                Features(
                    header=header,
                    streams=tuple([array[frames] for array in arrays]),
                    times=decoded.times,
                    video=video.name,
                    duration=decoded.duration,
                    view=variant.number if variant else 0,
                )
            )
    except Exception as cause:
        return result.failed(input_error(video.path, cause))
    features, *further = variants
    return replace(
        result, features=features, further=tuple(further), lost=decoded.lost, thumbnails=decoded.thumbnails
    )


def merge_chunks(chunks: Sequence[ExtractionResult]) -> ExtractionResult:
    """Return one result for the chunks of an input; its error is the first error of a chunk."""
    if len(chunks) == 1:
        return chunks[0]
    failed = [chunk for chunk in chunks if chunk.features is None]
    if failed:
        return failed[0]
    features = [chunk.features for chunk in chunks if chunk.features is not None]
    try:
        merged = replace(
            features[0],
            streams=tuple(map(np.concatenate, zip(*(chunk.streams for chunk in features), strict=True))),
            times=np.concatenate([chunk.times for chunk in features if chunk.times is not None]),
        )
    except Exception as cause:
        return chunks[-1].failed(input_error(chunks[0].path, cause))
    return replace(
        chunks[0],
        features=merged,
        lost=max(chunk.lost for chunk in chunks),
        thumbnails=tuple(thumbnail for chunk in chunks for thumbnail in chunk.thumbnails),
    )
