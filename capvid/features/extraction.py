"""Feature extraction: videos are decoded in worker processes while the backbones compute.

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
        features: of the first variant; ``None`` with an error, or for a feature file that passed through.
        error: why there are no features.
        lost: number of frames that could not be decoded.
        thumbnails: thumbnails of the frames as JPEG files, if requested.
        further: features of the other variants, such as augmented views.
        name: name of the video.
    """

    path: VideoPath
    features: Features | None
    error: CapvidError | None
    lost: int = 0
    thumbnails: tuple[bytes, ...] = ()
    further: tuple[Features, ...] = ()
    name: str = ""

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
    """Extract the features of videos, in order, as they come.

    Videos are decoded ahead of the backbones, and batches reach from one video into the next. Features are
    rounded to ``dtype``, so that they are the same whether they go through a file or not; they depend neither
    on the other videos nor on the number of workers.

    Args:
        inputs: paths or addresses of videos, or :class:`~capvid.features.prefetch.HasPath` objects, consumed
            lazily; or a single one.
        backbones: one stream each: names, whose default layers are computed on ``device``, or backbones from
            :func:`~capvid.backbones.backbone.load_backbone`.
        sampling: which frames to take, such as ``uniform:28`` or ``fps:2``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        workers: number of processes that decode.
        timeout: seconds before a file is given up; None disables the limit.
        reader: name of the video reader; ``auto`` tries another one where the first fails.
        batch_size: frames gathered before the backbones compute, from several videos where they are short.
        dtype: float16 or float32.
        pool: worker processes to use instead of ``workers`` new ones; they are kept alive.
        progress: function called with each result before it is yielded.

    Yields:
        One result per input; a video that cannot be read is a result with its error.

    Raises:
        UsageError: no such backbone, sampling or device, no backbone at all, or a number below 1.
        WeightsError: a backbone's weights are missing or damaged.
        CapvidError: an error that concerns all inputs, such as a device without enough memory.
    """
    if isinstance(inputs, str | Path | Blob) or not isinstance(inputs, Iterable):
        inputs = [inputs]
    if isinstance(backbones, str) or not isinstance(backbones, Sequence):
        backbones = [backbones]
    if not backbones:
        raise UsageError("no backbone was given")
    if workers < 1:
        raise UsageError("there must be at least 1 worker")
    if batch_size < 1:
        raise UsageError("the batch size must be at least 1")
    if dtype not in _DTYPES:
        raise UsageError(f"features cannot be stored as {dtype}", remedy=f"use {' or '.join(_DTYPES)}")
    sampling = parse_sampling(sampling) if isinstance(sampling, str) else sampling
    loaded = [_load(backbone, device) if isinstance(backbone, str) else backbone for backbone in backbones]
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


def _load(name: str, device: str) -> Backbone:
    from capvid.backbones.backbone import load_backbone
    from capvid.utils.device import resolve_device

    return load_backbone(name, device=resolve_device(device))


def views_of(backbones: Sequence[Backbone]) -> list[View]:
    """Return what the backbones see of a video; those that see the same share it."""
    return list(dict.fromkeys([View.of(backbone.entry) for backbone in backbones]))


@dataclass
class _Batch:
    """Crops that a backbone computes together, from one video or several."""

    crops: list[np.ndarray] = field(default_factory=list)
    size: int = 0
    future: Future[np.ndarray] | None = None  # features, once the batch is full


_Rows = tuple[_Batch, int, int]  # rows of a batch, from and to


class _Stream:
    """One backbone, which computes the crops of successive videos in full batches."""

    def __init__(self, backbone: Backbone, batch_size: int) -> None:
        self.backbone = backbone
        self.view = View.of(backbone.entry)
        self.together = backbone.together(batch_size)
        self.running: list[Future[np.ndarray]] = []
        self._batch_size = batch_size
        self._batch = _Batch()  # the one that is being filled

    def put(self, crops: np.ndarray) -> list[_Rows]:
        """Add the crops of a video to batches, submit those that are full, and return the crops' rows."""
        rows: list[_Rows] = []
        while len(crops):
            batch, start = self._batch, self._batch.size
            added, crops = crops[: self.together - start], crops[self.together - start :]
            batch.size += len(added)
            full = batch.size == self.together
            batch.crops.append(added if full else added.copy())  # a view would keep all crops in memory
            rows.append((batch, start, batch.size))
            if full:
                self.flush()
        return rows

    def flush(self) -> None:
        """Submit the batch that is being filled."""
        batch, self._batch = self._batch, _Batch()
        if batch.crops:
            batch.crops = [np.concatenate(batch.crops)] if len(batch.crops) > 1 else batch.crops
            batch.future = self.backbone.submit(batch.crops[0], batch_size=self._batch_size)
            self.running.append(batch.future)

    def wait(self, rows: Sequence[_Rows], dtype: str) -> np.ndarray:
        """Wait for the features of one video, (T, D) or (T, L, D) float32, rounded to ``dtype``.

        If a batch fails, the video's own frames are computed again one by one, since the frame at fault may
        be another video's; features do not depend on the other frames of a batch.
        """
        parts = [np.zeros((0, *self.backbone.header.inner), np.float32)]
        for batch, start, stop in rows:
            assert batch.future is not None
            try:
                parts.append(batch.future.result()[start:stop])
            except RunError:  # concerns every frame
                raise
            except Exception:
                for row in range(start, stop):
                    crops = batch.crops[0][row : row + 1]
                    parts.append(self.backbone.submit(crops, batch_size=self._batch_size).result())
        with np.errstate(over="ignore"):
            features: np.ndarray = np.concatenate(parts).astype(dtype).astype(np.float32)
        return features


@dataclass
class _Pending:
    """A video whose features are being computed, and its rows in the batches of each stream."""

    video: Video
    rows: list[list[_Rows]]

    @property
    def futures(self) -> list[Future[np.ndarray] | None]:
        """The features of its batches; None for batches that are not full yet."""
        return [batch.future for rows in self.rows for batch, _, _ in rows]


def compute_features(
    videos: Iterable[Video],
    backbones: Sequence[Backbone],
    sampling: Sampling,
    *,
    batch_size: int = 32,
    dtype: str = "float16",
) -> Iterator[ExtractionResult]:
    """Compute the features of decoded videos, one result per input, in order.

    Arguments are those of :func:`extract`; the videos were decoded for :func:`views_of` the backbones.
    """
    streams = [_Stream(backbone, batch_size) for backbone in backbones]
    views = list(dict.fromkeys([stream.view for stream in streams]))
    enough = 2 * max([backbone.lanes.count for backbone in backbones])  # batches that keep the lanes busy
    room = enough * max([stream.together for stream in streams])
    queue: deque[_Pending] = deque()
    parts: list[ExtractionResult] = []  # of one input
    try:
        for video in chain(videos, [None]):
            if video is not None:
                queue.append(_submit_crops(video, streams, views))
            # a video does not wait for ever behind inputs that fail, which do not fill its last batch
            urgent = video is None or len(queue) > room
            if video is None or (urgent and None in queue[0].futures):
                for stream in streams:
                    stream.flush()
            while queue and None not in queue[0].futures:
                for stream in streams:
                    stream.running = [future for future in stream.running if not future.done()]
                busy = sum([len(stream.running) for stream in streams])
                waiting = [future for future in queue[0].futures if future and not future.done()]
                if waiting and busy < enough and not urgent:
                    break
                pending = queue.popleft()
                parts.append(_collect(pending, streams, sampling, dtype))
                if len(parts) == pending.video.parts:
                    yield _merge_parts(parts)
                    parts = []
    finally:
        for stream in streams:
            for future in stream.running:
                future.cancel()


def _submit_crops(video: Video, streams: Sequence[_Stream], views: Sequence[View]) -> _Pending:
    """Add the crops of a video to the batches of each stream."""
    if video.decoded is None:
        return _Pending(video, [])
    rows: list[list[_Rows]] = []
    try:
        for stream in streams:
            crops = video.decoded.crops[views.index(stream.view) :: len(views)]
            rows.append([row for variant in crops for row in stream.put(variant)])
    except Exception as cause:
        return _Pending(replace(video, decoded=None, error=input_error(video.path, cause)), [])
    return _Pending(replace(video, decoded=replace(video.decoded, crops=())), rows)


def _collect(
    pending: _Pending, streams: Sequence[_Stream], sampling: Sampling, dtype: str
) -> ExtractionResult:
    """Wait for the features of a video, or of one part of it."""
    video, decoded = pending.video, pending.video.decoded
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
        arrays = [stream.wait(rows, dtype) for stream, rows in zip(streams, pending.rows, strict=True)]
        for stream, array in zip(streams, arrays, strict=True):
            if not np.isfinite(array).all():
                raise FeatureFileError(
                    f"{video.path}: {stream.backbone.entry.name} gives features that {dtype} cannot hold",
                    remedy="store them as float32",
                )
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


def _merge_parts(parts: Sequence[ExtractionResult]) -> ExtractionResult:
    """Return one result of the parts of an input; its error is the first one of a part."""
    failed = [part for part in parts if part.features is None]
    if failed or len(parts) == 1:
        return (failed or parts)[0]
    features = [part.features for part in parts if part.features is not None]
    try:
        merged = replace(
            features[0],
            streams=tuple(map(np.concatenate, zip(*(part.streams for part in features), strict=True))),
            times=np.concatenate([part.times for part in features if part.times is not None]),
        )
    except Exception as cause:
        return parts[-1].failed(input_error(parts[0].path, cause))
    return replace(
        parts[0],
        features=merged,
        lost=max(part.lost for part in parts),
        thumbnails=tuple(thumbnail for part in parts for thumbnail in part.thumbnails),
    )
