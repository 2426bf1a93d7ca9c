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
        pictures: thumbnails of the frames as JPEG files, if requested.
        further: features of the other variants, such as augmented views.
        name: name of the video.
    """

    path: VideoPath
    features: Features | None
    error: CapvidError | None
    lost: int = 0
    pictures: tuple[bytes, ...] = ()
    further: tuple[Features, ...] = ()
    name: str = ""

    def failed(self, error: CapvidError) -> ExtractionResult:
        """Return the result of the same input with an error instead of features."""
        return replace(self, features=None, error=error, pictures=(), further=())


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
    if workers < 1:
        raise UsageError("there must be at least 1 worker")
    sampling = parse_sampling(sampling) if isinstance(sampling, str) else sampling
    loaded = [_load(backbone, device) if isinstance(backbone, str) else backbone for backbone in backbones]
    computation = _Computation(loaded, sampling, batch_size, dtype)
    stage = DecodeStage(views=tuple(views_of(loaded)), sampling=sampling, frames=batch_size, reader=reader)

    def run() -> Generator[ExtractionResult, None, None]:
        with ExitStack() as stack:
            processes = pool or stack.enter_context(WorkerPool(workers, timeout=timeout))
            videos = stack.enter_context(closing(stage.videos(processes, inputs)))
            for result in computation.results(videos):
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
    return list(dict.fromkeys(View.of(backbone.entry) for backbone in backbones))


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
    return _Computation(backbones, sampling, batch_size, dtype).results(videos)


@dataclass
class _Batch:
    """Crops that a backbone computes together, from one video or several."""

    crops: list[np.ndarray] = field(default_factory=list)
    future: Future[np.ndarray] | None = None  # features, once the batch is full

    def __len__(self) -> int:
        return sum(map(len, self.crops))


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
            batch, start = self._batch, len(self._batch)
            added, crops = crops[: self.together - start], crops[self.together - start :]
            full = start + len(added) == self.together
            batch.crops.append(added if full else added.copy())  # a view would keep all crops in memory
            rows.append((batch, start, start + len(added)))
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

    def busy(self) -> int:
        """Return the number of batches that are being computed."""
        self.running = [future for future in self.running if not future.done()]
        return len(self.running)

    def wait(self, rows: Sequence[_Rows], dtype: str) -> np.ndarray:
        """Wait for the features of one video, (T, D) or (T, L, D) float32, rounded to ``dtype``.

        Of a batch that fails, the video's own frames are computed again one by one, since the frame at fault
        may be another video's; features do not depend on the other frames of a batch.
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

    def submitted(self) -> bool:
        """Whether all of its batches are full."""
        return all(batch.future is not None for rows in self.rows for batch, _, _ in rows)

    def done(self) -> bool:
        """Whether its features are there."""
        return all(batch.future and batch.future.done() for rows in self.rows for batch, _, _ in rows)


class _Computation:
    """The features of decoded videos, computed by several backbones."""

    def __init__(
        self, backbones: Sequence[Backbone], sampling: Sampling, batch_size: int, dtype: str
    ) -> None:
        if not backbones:
            raise UsageError("no backbone was given")
        if batch_size < 1:
            raise UsageError("the batch size must be at least 1")
        if dtype not in _DTYPES:
            raise UsageError(f"features cannot be stored as {dtype}", remedy=f"use {' or '.join(_DTYPES)}")
        self.streams = [_Stream(backbone, batch_size) for backbone in backbones]
        self.views = views_of(backbones)
        self.sampling = sampling
        self.dtype = dtype

    def results(self, videos: Iterable[Video]) -> Iterator[ExtractionResult]:
        """Submit videos as they come, and yield the features of those that are complete, in order."""
        enough = 2 * max(stream.backbone.lanes.count for stream in self.streams)  # batches to keep lanes busy
        room = enough * max(stream.together for stream in self.streams)
        queue: deque[_Pending] = deque()
        parts: list[ExtractionResult] = []  # of one input
        try:
            for video in chain(videos, [None]):
                if video is not None:
                    queue.append(self._put(video))
                # a video does not wait for ever behind inputs that fail, which do not fill its last batch
                urgent = video is None or len(queue) > room
                if video is None or (urgent and not queue[0].submitted()):
                    for stream in self.streams:
                        stream.flush()
                while queue and queue[0].submitted():
                    busy = sum(stream.busy() for stream in self.streams)
                    if not (urgent or busy >= enough or queue[0].done()):
                        break
                    pending = queue.popleft()
                    parts.append(self._result(pending))
                    if len(parts) == pending.video.parts:
                        yield _merge_parts(parts)
                        parts = []
        finally:
            for stream in self.streams:
                for future in stream.running:
                    future.cancel()

    def _put(self, video: Video) -> _Pending:
        """Add a video's crops to the batches."""
        if video.decoded is None:
            return _Pending(video, [])
        rows: list[list[_Rows]] = []
        try:
            for stream in self.streams:
                crops = video.decoded.crops[self.views.index(stream.view) :: len(self.views)]
                rows.append([row for variant in crops for row in stream.put(variant)])
        except Exception as cause:
            return _Pending(replace(video, decoded=None, error=input_error(video.path, cause)), [])
        return _Pending(replace(video, decoded=replace(video.decoded, crops=())), rows)

    def _result(self, pending: _Pending) -> ExtractionResult:
        """Wait for the features of a video, or of one part of it."""
        video, decoded = pending.video, pending.video.decoded
        result = ExtractionResult(path=video.path, features=None, error=video.error, name=video.name)
        if decoded is None:
            return result
        try:
            streams = []
            for stream, rows in zip(self.streams, pending.rows, strict=True):
                streams.append(stream.wait(rows, self.dtype))
                if not np.isfinite(streams[-1]).all():
                    name = stream.backbone.entry.name
                    raise FeatureFileError(
                        f"{video.path}: {name} gives features that {self.dtype} cannot hold",
                        remedy="store them as float32",
                    )
            header = FeatureHeader(
                streams=tuple(stream.backbone.header for stream in self.streams),
                sampling=self.sampling.spec(),
                reader=decoded.reader,
                dtype=self.dtype,
                capvid_version=__version__,
            )
            num_frames = len(decoded.times)
            features, *further = (
                Features(
                    header=header,
                    streams=tuple(array[at * num_frames : (at + 1) * num_frames] for array in streams),
                    times=decoded.times,
                    video=video.name,
                    duration=decoded.duration,
                    view=variant.number if variant else 0,
                )
                for at, variant in enumerate(video.variants)
            )
        except Exception as cause:
            return result.failed(input_error(video.path, cause))
        return replace(
            result,
            features=features,
            further=tuple(further),
            lost=decoded.lost,
            pictures=decoded.pictures,
        )


def _merge_parts(parts: Sequence[ExtractionResult]) -> ExtractionResult:
    """Return one result of the parts of an input; its error is the first one of a part."""
    features = [part.features for part in parts if part.features is not None]
    if len(features) < len(parts) or len(parts) == 1:
        return next((part for part in parts if part.features is None), parts[0])
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
        pictures=tuple(picture for part in parts for picture in part.pictures),
    )
