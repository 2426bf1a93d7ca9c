"""Features of many videos: decoding in the background while the backbones compute.

Notation for tensor shapes: T frames of one video, C frames of the window around each that a network of clips
sees, h and w height and width of a network's input, L locations, D width of a layer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from capvid import __version__
from capvid.errors import CapvidError, FeatureFileError, UsageError, VideoError
from capvid.features.file import FeatureHeader, Features
from capvid.video.clean import useful
from capvid.video.source import read_frames

if TYPE_CHECKING:
    from torch import Tensor

    from capvid.features.backbones import Backbone
    from capvid.video.sampling import UniformSampling


class HasPath(Protocol):
    """An input that carries more than its path; a ``key``, if it has one, names the video."""

    @property
    def path(self) -> Path:
        """Where the video is."""


@dataclass(frozen=True, kw_only=True)
class ExtractionResult:
    """What became of one input: its features, or the error."""

    path: Path
    features: Features | None
    error: CapvidError | None


@dataclass(frozen=True, kw_only=True)
class _Decoded:
    """Sampled frames of one video, ready for each backbone: uint8 crops (T, 3, h, w) or (T, C, 3, h, w)."""

    path: Path
    video: str
    crops: tuple[Tensor, ...]
    times: np.ndarray
    reader: str


def extract_features(
    inputs: Iterable[str | Path | HasPath],
    backbones: Sequence[Backbone],
    sampling: UniformSampling,
    *,
    workers: int = 2,
    batch_size: int = 32,
    reader: str = "auto",
    dtype: str = "float16",
) -> Generator[ExtractionResult, None, None]:
    """Compute the features of videos, in their order, as they come.

    Enough videos are decoded ahead to fill the next batch, and what is kept of each is only its crops.
    Features are rounded to ``dtype``, so that they are the same whether they go through a file or not.

    Args:
        inputs: paths of videos, or objects with a ``path``; taken one by one as they are needed.
        backbones: one stream each.
        sampling: which frames to take.
        workers: threads that decode.
        batch_size: frames computed together, from several videos where they are short.
        reader: name of the video reader.
        dtype: float16 or float32, in which the features are to be stored.

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
    if dtype not in ("float16", "float32"):
        raise UsageError(f"features cannot be stored as {dtype}", remedy="use float16 or float32")
    return _extract(iter(inputs), backbones, sampling, workers, batch_size, reader, dtype)


def _extract(
    inputs: Iterator[str | Path | HasPath],
    backbones: Sequence[Backbone],
    sampling: UniformSampling,
    workers: int,
    batch_size: int,
    reader: str,
    dtype: str,
) -> Generator[ExtractionResult, None, None]:
    group: list[_Decoded | ExtractionResult] = []
    frames = 0
    pool = ThreadPoolExecutor(workers, thread_name_prefix="capvid-decode")
    try:
        for decoded in _decode_all(pool, inputs, backbones, sampling, workers, batch_size, reader):
            group.append(decoded)
            frames += len(decoded.times) if isinstance(decoded, _Decoded) else 0
            # a failed input waits for nobody: without frames before it, it goes out at once
            if frames == 0 or frames >= batch_size or len(group) > batch_size:
                yield from _compute(group, backbones, sampling, batch_size, dtype)
                group, frames = [], 0
        yield from _compute(group, backbones, sampling, batch_size, dtype)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _decode_all(
    pool: ThreadPoolExecutor,
    inputs: Iterator[str | Path | HasPath],
    backbones: Sequence[Backbone],
    sampling: UniformSampling,
    workers: int,
    batch_size: int,
    reader: str,
) -> Iterator[_Decoded | ExtractionResult]:
    """Decode in order, ahead by the videos that fill a batch (at most ``batch_size``) and one per worker."""
    pending: deque[Future[_Decoded | ExtractionResult]] = deque()
    videos, frames = 0, 0
    fill = 1
    for item in inputs:
        pending.append(pool.submit(_decode, item, backbones, sampling, reader))
        while len(pending) > workers + fill:
            decoded = pending.popleft().result()
            if isinstance(decoded, _Decoded):
                videos, frames = videos + 1, frames + len(decoded.times)
                fill = max(1, math.ceil(batch_size * videos / frames))
            yield decoded
    while pending:
        yield pending.popleft().result()


def _decode(
    item: str | Path | HasPath, backbones: Sequence[Backbone], sampling: UniformSampling, reader: str
) -> _Decoded | ExtractionResult:
    import torch

    path = Path(item) if isinstance(item, str | Path) else Path(item.path)
    try:
        inputs = {_input_of(backbone): backbone for backbone in backbones}  # each is prepared once
        windows = {
            key: found for key, backbone in inputs.items() if (found := backbone.windows()) is not None
        }
        sampled = read_frames(path, sampling, reader=reader, windows=list(windows.values()))
        if sampling.clean:
            sampled = sampled.take(useful(sampled.frames))
        crops = {
            key: torch.from_numpy(array) for key, array in zip(windows, sampled.windows, strict=True)
        } | {key: inputs[key].prepare(sampled.frames) for key in inputs.keys() - windows.keys()}
        return _Decoded(
            path=path,
            video=getattr(item, "key", path.stem),
            crops=tuple(crops[_input_of(backbone)] for backbone in backbones),
            times=sampled.times,
            reader=sampled.info.reader,
        )
    except CapvidError as error:
        return ExtractionResult(path=path, features=None, error=error)
    except Exception as cause:  # whatever a decoder throws, the other videos go on
        wrapped = VideoError(path, f"could not be read ({type(cause).__name__}: {cause})")
        wrapped.__cause__ = cause
        return ExtractionResult(path=path, features=None, error=wrapped)


def _input_of(backbone: Backbone) -> Any:
    """What of a video the backbone sees, as a key: backbones that see the same share it."""
    return backbone.entry.preprocess, backbone.entry.clip


def _compute(
    group: Sequence[_Decoded | ExtractionResult],
    backbones: Sequence[Backbone],
    sampling: UniformSampling,
    batch_size: int,
    dtype: str,
) -> Iterator[ExtractionResult]:
    """Run the backbones over all frames of a group of videos, and give each its part."""
    import torch

    videos = [item for item in group if isinstance(item, _Decoded)]
    ends = np.cumsum([len(video.times) for video in videos])[:-1]
    streams = []  # per backbone, per video: (T, D) or (T, L, D)
    for index, backbone in enumerate(backbones if videos else ()):
        crops = torch.cat([video.crops[index] for video in videos])
        computed = backbone.compute(crops, batch_size=batch_size)
        with np.errstate(over="ignore"):
            rounded = computed.astype(dtype).astype(np.float32)
        streams.append(np.split(rounded, ends))
    parts = iter(zip(*streams, strict=True))
    for item in group:
        yield _result(item, next(parts), backbones, sampling, dtype) if isinstance(item, _Decoded) else item


def _result(
    video: _Decoded,
    streams: tuple[np.ndarray, ...],
    backbones: Sequence[Backbone],
    sampling: UniformSampling,
    dtype: str,
) -> ExtractionResult:
    for backbone, stream in zip(backbones, streams, strict=True):
        if not np.isfinite(stream).all():
            error = FeatureFileError(
                f"{video.path}: {backbone.entry.name} gives features that {dtype} cannot hold",
                remedy="store them as float32",
            )
            return ExtractionResult(path=video.path, features=None, error=error)
    header = FeatureHeader(
        streams=tuple(backbone.header for backbone in backbones),
        sampling=sampling.spec(),
        reader=video.reader,
        dtype=dtype,
        capvid_version=__version__,
    )
    # a copy each: a view would keep the features of the whole group in memory
    kept = tuple(stream.copy() for stream in streams)
    features = Features(header=header, streams=kept, times=video.times, video=video.video)
    return ExtractionResult(path=video.path, features=features, error=None)
