"""Features of many videos: decoding in other processes while the backbones compute.

Notation for array shapes: T frames of one video, h and w height and width of a network's input, L locations,
D width of a layer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from capvid import __version__
from capvid.errors import CapvidError, FeatureFileError, UsageError
from capvid.features.ahead import Decoder, Input, Video
from capvid.features.decode import View
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


class _Extraction:
    """What is computed of decoded videos."""

    def __init__(
        self, backbones: Sequence[Backbone], sampling: Sampling, batch_size: int, dtype: str
    ) -> None:
        self.backbones = backbones
        self.sampling = sampling
        self.batch_size = batch_size
        self.dtype = dtype
        self.views = list(dict.fromkeys(View.of(backbone.entry) for backbone in backbones))

    def results(self, videos: Iterable[Video]) -> Iterator[ExtractionResult]:
        """Group the videos until they fill a batch, and compute one group after the other."""
        group: list[Video] = []
        frames = 0
        for video in videos:
            group.append(video)
            frames += len(video)
            # a failed input waits for nobody: without frames before it, it goes out at once
            if frames == 0 or frames >= self.batch_size or len(group) > self.batch_size:
                yield from self._computed(group)
                group, frames = [], 0
        yield from self._computed(group)

    def _computed(self, group: Sequence[Video]) -> Iterator[ExtractionResult]:
        """Run the backbones over all frames of a group of videos, and give each its part."""
        good = [video.decoded for video in group if video.decoded]
        ends = np.cumsum([len(decoded.times) for decoded in good])[:-1]
        streams = []  # per backbone, per video: (T, D) or (T, L, D)
        for backbone in self.backbones if good else ():
            view = self.views.index(View.of(backbone.entry))
            crops = [decoded.crops[view] for decoded in good]
            computed = backbone.compute(
                crops[0] if len(crops) == 1 else np.concatenate(crops), batch_size=self.batch_size
            )
            with np.errstate(over="ignore"):
                rounded = computed.astype(self.dtype).astype(np.float32)
            streams.append(np.split(rounded, ends))
        parts = iter(zip(*streams, strict=True))
        for video in group:
            if video.decoded is None:
                yield ExtractionResult(path=video.path, features=None, error=video.error)
            else:
                yield self._result(video, next(parts))

    def _result(self, video: Video, streams: tuple[np.ndarray, ...]) -> ExtractionResult:
        decoded = video.decoded
        if decoded is None:
            raise ValueError("only decoded videos have features")
        for backbone, stream in zip(self.backbones, streams, strict=True):
            if not np.isfinite(stream).all():
                error = FeatureFileError(
                    f"{video.path}: {backbone.entry.name} gives features that {self.dtype} cannot hold",
                    remedy="store them as float32",
                )
                return ExtractionResult(path=video.path, features=None, error=error)
        header = FeatureHeader(
            streams=tuple(backbone.header for backbone in self.backbones),
            sampling=self.sampling.spec(),
            reader=decoded.reader,
            dtype=self.dtype,
            capvid_version=__version__,
        )
        # a copy each: a view would keep the features of the whole group in memory
        kept = tuple(stream.copy() for stream in streams)
        features = Features(header=header, streams=kept, times=decoded.times, video=video.name)
        return ExtractionResult(path=video.path, features=features, error=None, lost=decoded.lost)
