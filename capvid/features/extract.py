"""Features of many videos: decoding in other processes while the backbones compute.

Notation for array shapes: T frames of one video, h and w height and width of a network's input, L locations,
D width of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from capvid import __version__
from capvid.errors import CapvidError, FeatureFileError, UsageError
from capvid.features.ahead import Decoder, Input, Video
from capvid.features.decode import Decoded, View
from capvid.features.file import FeatureHeader, Features
from capvid.video.workers import WorkerPool

if TYPE_CHECKING:
    from capvid.features.backbones import Backbone
    from capvid.video.sampling import Sampling

TIMEOUT = 600.0  # seconds for one file


@dataclass(frozen=True, kw_only=True)
class ExtractionResult:
    """What became of one input: its features, or the error; ``lost`` frames could not be decoded."""

    path: Path
    features: Features | None
    error: CapvidError | None
    lost: int = 0


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
    pool: WorkerPool | None = None,
) -> Generator[ExtractionResult, None, None]:
    """Compute the features of videos, in their order, as they come.

    Enough videos are decoded ahead to fill the next batch, and what is kept of each is only its crops.
    Batches reach from one video into the next.
    Features are rounded to ``dtype``, so that they are the same whether they go through a file or not; they
    do not depend on which videos are worked on together, nor on the number of workers.

    Args:
        inputs: paths of videos, or objects with a ``path``; taken one by one as they are needed.
        backbones: one stream each.
        sampling: which frames to take.
        workers: processes that decode.
        batch_size: frames gathered before the backbones compute, from several videos where they are short.
        reader: name of the video reader; ``auto`` goes on to the next where one fails.
        dtype: float16 or float32, in which the features are to be stored.
        timeout: seconds after which a file is given up; None waits for ever.
        pool: processes that go on living afterwards, instead of ``workers`` of their own with ``timeout``.

    Yields:
        One result per input; a video that cannot be read is a result with its error.

    Raises:
        UsageError: no backbone, or a number below 1.
        CapvidError: what concerns all inputs, such as a device without enough memory.
    """
    if not backbones:
        raise UsageError("no backbone was given")
    if workers < 1 or batch_size < 1:
        raise UsageError("workers and batch size must be at least 1")
    if dtype not in _DTYPES:
        raise UsageError(f"features cannot be stored as {dtype}", remedy=f"use {' or '.join(_DTYPES)}")
    extraction = _Extraction(backbones, sampling, batch_size, dtype)

    def run() -> Generator[ExtractionResult, None, None]:
        with ExitStack() as stack:
            processes = pool or stack.enter_context(WorkerPool(workers, timeout=timeout))
            decoder = Decoder(processes, sampling=sampling, views=extraction.views, reader=reader)
            videos = stack.enter_context(closing(decoder.videos(inputs, frames=batch_size)))
            yield from extraction.results(videos)

    return run()


_DTYPES = ("float16", "float32")


class _Stream:
    """Crops of one video after the other, through one backbone in full batches that reach across videos."""

    def __init__(self, backbone: Backbone, batch_size: int, dtype: str) -> None:
        self.backbone = backbone
        self.view = View.of(backbone.entry)
        self._batch_size = batch_size
        self._dtype = dtype
        self._waiting: list[np.ndarray] = []
        self._computed: list[np.ndarray] = []

    def put(self, crops: np.ndarray) -> None:
        """Add the crops of a video."""
        self._waiting.append(crops)

    def run(self, *, everything: bool) -> None:
        """Compute what fills batches, or everything."""
        if not self._waiting:
            return
        rest = sum(map(len, self._waiting)) % self.backbone.together(self._batch_size)
        keep = 0 if everything else rest
        crops = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        ready = len(crops) - keep
        if ready:
            computed = self.backbone.compute(crops[:ready], batch_size=self._batch_size)
            with np.errstate(over="ignore"):
                self._computed.append(computed.astype(self._dtype).astype(np.float32))
        self._waiting = [crops[ready:].copy()] if keep else []

    def __len__(self) -> int:
        """How many frames are computed and not taken."""
        return sum(map(len, self._computed))

    def take(self, frames: int) -> np.ndarray:
        """Remove the features of the next frames, (frames, D) or (frames, L, D)."""
        features = self._computed[0] if len(self._computed) == 1 else np.concatenate(self._computed)
        self._computed = [features[frames:]]
        return features[:frames].copy()  # a view would keep the features of other videos in memory


class _Extraction:
    """What is computed of decoded videos."""

    def __init__(
        self, backbones: Sequence[Backbone], sampling: Sampling, batch_size: int, dtype: str
    ) -> None:
        self.streams = [_Stream(backbone, batch_size, dtype) for backbone in backbones]
        self.sampling = sampling
        self.batch_size = batch_size
        self.dtype = dtype
        self.room = max(batch_size, *(stream.backbone.together(batch_size) for stream in self.streams))
        self.views = list(dict.fromkeys(stream.view for stream in self.streams))

    def results(self, videos: Iterable[Video]) -> Iterator[ExtractionResult]:
        """Gather videos until their frames fill a batch, compute, and give those that are complete."""
        waiting: deque[Video] = deque()
        frames = 0
        for video in videos:
            waiting.append(video)
            frames += len(video)
            if video.decoded:
                for stream in self.streams:
                    stream.put(video.decoded.crops[self.views.index(stream.view)])
            crowded = len(waiting) > self.room  # nobody waits for ever behind inputs that fail
            if frames >= self.batch_size or crowded:
                self._run(everything=crowded)
                frames = 0
            yield from self._complete(waiting)
        self._run(everything=True)
        yield from self._complete(waiting)

    def _run(self, *, everything: bool) -> None:
        for stream in self.streams:
            stream.run(everything=everything)

    def _complete(self, waiting: deque[Video]) -> Iterator[ExtractionResult]:
        """Remove and finish the videos at the head of the queue of which everything is computed."""
        while waiting and min(map(len, self.streams)) >= len(waiting[0]):
            video = waiting.popleft()
            if video.decoded:
                yield self._result(video, video.decoded)
            else:
                yield ExtractionResult(path=video.path, features=None, error=video.error)

    def _result(self, video: Video, decoded: Decoded) -> ExtractionResult:
        parts = tuple(stream.take(len(video)) for stream in self.streams)
        for stream, part in zip(self.streams, parts, strict=True):
            if not np.isfinite(part).all():
                name = stream.backbone.entry.name
                error = FeatureFileError(
                    f"{video.path}: {name} gives features that {self.dtype} cannot hold",
                    remedy="store them as float32",
                )
                return ExtractionResult(path=video.path, features=None, error=error)
        header = FeatureHeader(
            streams=tuple(stream.backbone.header for stream in self.streams),
            sampling=self.sampling.spec(),
            reader=decoded.reader,
            dtype=self.dtype,
            capvid_version=__version__,
        )
        features = Features(header=header, streams=parts, times=decoded.times, video=video.name)
        return ExtractionResult(path=video.path, features=features, error=None, lost=decoded.lost)
