"""Features of any number of frames of a video, decoded part by part, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from capvid.features.ahead import Decoder, Input, Video, failed_input, path_of
from capvid.features.decode import Timeline, View
from capvid.features.extract import ExtractionResult
from capvid.isolation import input_error
from capvid.storage import VideoPath
from capvid.video.sampling import ChosenTimes, Sampling
from capvid.video.segments import Segmentation
from capvid.video.workers import WorkerPool

FRAMES_AT_ONCE = 128  # of one video that are decoded together
WITHOUT_JUMPS = 2048  # the same where each part is decoded from the beginning of the video on
_AHEAD = 2  # videos that are looked into before their turn


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Some frames of a video, which has so many parts."""

    path: VideoPath
    key: str
    sampling: Sampling
    parts_in_all: int


def decode_in_parts(
    decoder: Decoder, inputs: Iterable[Input], sampling: Sampling, cut: Segmentation, *, frames: int
) -> Generator[Video, None, None]:
    """Decode the frames of each input that its segments need, in order, as they come.

    Args:
        decoder: decodes them.
        inputs: as for :func:`~capvid.features.extract.extract_features`.
        sampling: which frames are usually looked at.
        cut: cuts videos into segments.
        frames: so many are decoded ahead.

    Yields:
        the parts of each input, one after the other; the input itself where it cannot be looked into, as
        decoding it will say.
    """

    def parts() -> Iterator[Input]:
        with closing(decoder.timelines(inputs, ahead=_AHEAD)) as found:
            for item, timeline in found:
                yield from [item] if timeline is None else _parts(item, timeline, sampling, cut)

    with closing(decoder.videos(parts(), frames=frames)) as videos:
        yield from videos


@dataclass(frozen=True, kw_only=True)
class DecodeStage:
    """How videos are decoded: the first stage of every pipeline. Can be sent to another machine.

    Attributes:
        views: what backbones look at.
        sampling: which frames are taken.
        cut: what cuts videos into segments; None takes them whole.
        pictures: whether small pictures of the frames are kept.
        frames: so many are decoded ahead.
        reader: name of the video reader.
        stored: whether files of features pass.
    """

    views: tuple[View, ...]
    sampling: Sampling
    cut: Segmentation | None = None
    pictures: bool = False
    frames: int = 32
    reader: str = "auto"
    stored: bool = False

    def videos(self, pool: WorkerPool, inputs: Iterable[Input]) -> Generator[Video, None, None]:
        """Decode inputs in order, in the processes of a pool; in several parts if they are cut."""
        decoder = Decoder(
            pool,
            sampling=self.sampling,
            views=self.views,
            reader=self.reader,
            pictures=self.pictures,
            stored=self.stored,
        )
        if self.cut is None:
            return decoder.videos(inputs, frames=self.frames)
        return decode_in_parts(decoder, inputs, self.sampling, self.cut, frames=self.frames)


def joined(results: Iterable[ExtractionResult]) -> Iterator[ExtractionResult]:
    """One result for each input, with the features of all its parts."""
    gathered: list[ExtractionResult] = []
    for result in results:
        gathered.append(result)
        if len(gathered) == result.parts:
            try:
                complete = _joined(gathered)
            except Exception as cause:
                complete = result.failed(input_error(result.path, cause))
            yield complete
            gathered = []


def _parts(item: Input, timeline: Timeline, sampling: Sampling, cut: Segmentation) -> list[Input]:
    """The parts of one video, or its error."""
    try:
        return _cut(item, timeline, sampling, cut)
    except Exception as cause:
        return [failed_input(item, cause)]


def _cut(item: Input, timeline: Timeline, sampling: Sampling, cut: Segmentation) -> list[Input]:
    """The parts of one video; the video itself where it has no frames."""
    path = path_of(item)
    indices = (
        cut.choose(path, timeline.times, timeline.duration, sampling) if len(timeline.times) else np.arange(0)
    )
    times = timeline.times[indices].tolist()
    size = FRAMES_AT_ONCE if timeline.jumps else WITHOUT_JUMPS
    starts = range(0, len(times), size)
    return [
        _Part(
            path=path,
            key=getattr(item, "key", path.stem),
            sampling=ChosenTimes(tuple(times[first : first + size]), sampling),
            parts_in_all=len(starts),
        )
        for first in starts
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
    return replace(parts[0], features=whole, lost=lost, pictures=pictures, parts=1)
