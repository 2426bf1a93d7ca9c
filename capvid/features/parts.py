"""Features of any number of frames of a video, decoded part by part, so that memory stays bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from capvid.features.ahead import Decoder, Input
from capvid.features.decode import Timeline
from capvid.features.extract import ExtractionResult, extract_features
from capvid.video.sampling import ChosenTimes, Sampling
from capvid.video.workers import WorkerPool

if TYPE_CHECKING:
    from capvid.features.backbones import Backbone

Choose = Callable[[Path, Timeline], np.ndarray]
FRAMES_AT_ONCE = 128  # of one video that are decoded together
WITHOUT_JUMPS = 2048  # the same where each part is decoded from the beginning of the video on
_AHEAD = 2  # videos that are looked into before their turn


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Some frames of a video."""

    path: Path
    key: str
    sampling: Sampling


def extract_in_parts(
    inputs: Iterable[Input],
    backbones: Sequence[Backbone],
    sampling: Sampling,
    choose: Choose,
    *,
    pool: WorkerPool,
    reader: str = "auto",
    **options: Any,
) -> Generator[ExtractionResult, None, None]:
    """Compute the features of the frames that ``choose`` picks of each video, in order, as they come.

    Args:
        inputs: as for :func:`~capvid.features.extract.extract_features`.
        backbones: one stream each.
        sampling: which frames are usually looked at, for headers and for what can be seen of an input only
            by decoding it.
        choose: gives the indices of the frames to take, by the video's path and timeline.
        pool: processes that decode.
        reader: name of the video reader.
        options: further ones of :func:`~capvid.features.extract.extract_features`.

    Yields:
        One result per input, with the features of all its frames.
    """
    counts: deque[int] = deque()  # parts of each video that was begun and is not given yet
    decoder = Decoder(pool, sampling=sampling, views=(), reader=reader)

    def parts() -> Iterator[Input]:
        with closing(decoder.timelines(inputs, ahead=_AHEAD)) as found:
            for item, timeline in found:
                cut = [item] if timeline is None else _cut(item, timeline, sampling, choose)
                counts.append(len(cut))
                yield from cut

    extraction = extract_features(parts(), backbones, sampling, pool=pool, reader=reader, **options)
    with closing(extraction) as results:
        gathered: list[ExtractionResult] = []
        for result in results:
            gathered.append(result)
            if len(gathered) == counts[0]:
                counts.popleft()
                yield _joined(gathered)
                gathered = []


def _cut(item: Input, timeline: Timeline, sampling: Sampling, choose: Choose) -> list[Input]:
    """The parts of one video; the video itself where it has no frames."""
    path = Path(item) if isinstance(item, str | Path) else item.path
    indices = choose(path, timeline) if len(timeline.times) else np.arange(0)
    times = timeline.times[indices].tolist()
    size = FRAMES_AT_ONCE if timeline.jumps else WITHOUT_JUMPS
    return [
        _Part(
            path=path,
            key=getattr(item, "key", path.stem),
            sampling=ChosenTimes(tuple(times[first : first + size]), sampling),
        )
        for first in range(0, len(times), size)
    ] or [item]


def _joined(parts: Sequence[ExtractionResult]) -> ExtractionResult:
    """One result of the parts of a video; its error is that of the first part that has one."""
    features = [part.features for part in parts if part.features is not None]
    if len(features) < len(parts) or len(parts) == 1:
        return next((part for part in parts if part.features is None), parts[0])
    streams = zip(*(part.streams for part in features), strict=True)
    times = [part.times for part in features if part.times is not None]
    whole = replace(
        features[0],
        streams=tuple(np.concatenate(stream) for stream in streams),
        times=np.concatenate(times),
    )
    lost = max(part.lost for part in parts)
    pictures = tuple(picture for part in parts for picture in part.pictures)
    return ExtractionResult(path=parts[0].path, features=whole, error=None, lost=lost, pictures=pictures)
