"""From captioned videos and their features to examples: a video's frames with its captions in numbers.

Notation for tensor shapes: T frames, D feature width; feature maps have their locations L before D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from capvid.datasets.dataset import CaptionedVideo, Segment
from capvid.errors import DataError, FeatureFileError
from capvid.features.feature_store import NO_VIEWS, FeatureStore, Views
from capvid.text.tokenization import words
from capvid.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Example:
    """A video, or a view of it, with the video's captions in numbers."""

    id: str
    length: int  # T
    captions: tuple[list[int], ...]
    reader: Callable[[str], Tensor]
    key: str = ""  # of the view whose features are read; none for the video's own
    soft: Sequence[tuple[Tensor, Tensor]] = ()  # per caption, words and probabilities (L + 1, k) to learn

    @property
    def frames(self) -> Tensor:
        """The frames, (T, D) or (T, L, D) float16, read when asked for."""
        return self.reader(self.key or self.id)


@dataclass(frozen=True)
class ParagraphExample:
    """The segments of a video, or a view of it, with its paragraphs in numbers, a sentence per segment."""

    id: str
    rows: tuple[Tensor, ...]  # the numbers (T,) of each segment's frames, T may be 0
    paragraphs: tuple[tuple[list[int], ...], ...]
    reader: Callable[[str], Tensor]
    key: str = ""  # of the view whose features are read; none for the video's own

    @property
    def frames(self) -> Tensor:
        """All frames, (T, D) or (T, L, D) float16, read when asked for."""
        return self.reader(self.key or self.id)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """The frames of each segment, as :attr:`frames` are."""
        frames = self.frames
        return tuple(frames[rows] for rows in self.rows)


@dataclass(frozen=True)
class Lengths:
    """What is used of sentences: up to ``max_words``; longer ones are left out, or cut if ``cut``."""

    max_words: int
    cut: bool = False

    def words(self, text: str) -> list[str] | None:
        """Return the words of a sentence to train on; None if it is left out."""
        tokens = words(text)
        if len(tokens) <= self.max_words:
            return tokens or None
        return tokens[: self.max_words] if self.cut else None


def tokenised(videos: Sequence[CaptionedVideo], lengths: Lengths) -> dict[str, list[list[str]]]:
    """Words of every usable caption of every video."""
    return {
        video.id: [tokens for caption in video.captions if (tokens := lengths.words(caption))]
        for video in videos
    }


def tokenised_paragraphs(
    videos: Sequence[CaptionedVideo], lengths: Lengths, *, max_segments: int
) -> dict[str, list[list[list[str]]]]:
    """Words of the sentences of every paragraph; a paragraph with a sentence that is left out is as well."""
    usable: dict[str, list[list[list[str]]]] = {}
    for video in videos:
        usable[video.id] = []
        for paragraph in video.paragraphs:
            sentences = [lengths.words(sentence) for sentence in paragraph[:max_segments]]
            complete = [sentence for sentence in sentences if sentence]
            if len(complete) == len(sentences):
                usable[video.id].append(complete)
    return usable


def check_features(videos: Sequence[CaptionedVideo], store: FeatureStore) -> None:
    """Raise DataError if a video has no features."""
    missing = [video.id for video in videos if video.id not in store]
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(
            f"{len(missing)} of {len(videos)} videos have no features ({names})",
            remedy="extract them with capvid extract, or give the features file that holds them",
        )


def make_examples(
    videos: Sequence[CaptionedVideo],
    reader: FrameReader,
    vocabulary: Vocabulary | None,
    lengths: Lengths,
    views: Views = NO_VIEWS,
) -> list[Example]:
    """Put videos and captions together; videos without a usable caption are left out.

    Without a ``vocabulary``, as for evaluation, all videos are kept and no captions. Each video's ``views``
    follow it, with the same captions.

    Raises:
        DataError: a video has no features.
    """
    check_features(videos, reader.store)
    spoken = tokenised(videos, lengths)
    return [
        Example(
            video.id,
            reader.length(key or video.id),
            tuple(vocabulary.encode(caption) for caption in spoken[video.id])
            if vocabulary is not None
            else (),
            reader,
            key,
        )
        for video, key in _used(videos, views, None if vocabulary is None else spoken)
    ]


def make_paragraph_examples(
    videos: Sequence[CaptionedVideo],
    reader: FrameReader,
    vocabulary: Vocabulary | None,
    lengths: Lengths,
    views: Views = NO_VIEWS,
    *,
    max_segments: int,
) -> list[ParagraphExample]:
    """Put segments and paragraphs together; videos without a usable paragraph are left out.

    Without a ``vocabulary``, as for evaluation, all videos are kept and no paragraphs. Each video's ``views``
    follow it, with the same paragraphs.

    Raises:
        DataError: a video has no features, or a segment lies beyond them.
    """
    check_features(videos, reader.store)
    spoken = tokenised_paragraphs(videos, lengths, max_segments=max_segments)
    return [
        ParagraphExample(
            video.id,
            segment_rows(key or video.id, video.segments[:max_segments], reader.store),
            tuple(tuple(map(vocabulary.encode, paragraph)) for paragraph in spoken[video.id])
            if vocabulary is not None
            else (),
            reader,
            key,
        )
        for video, key in _used(videos, views, None if vocabulary is None else spoken)
    ]


def _used(
    videos: Sequence[CaptionedVideo], views: Views, spoken: Mapping[str, Sequence[object]] | None
) -> Iterator[tuple[CaptionedVideo, str]]:
    """Each video of which something is ``spoken``, or all: with no key, and with those of its views."""
    for video in videos:
        if spoken is None or spoken[video.id]:
            yield from ((video, key) for key in ("", *views.get(video.id, ())))


SHARE = 0.25  # of the memory that is free at the beginning
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")


class FrameReader:
    """Reads the features of videos through a memory map, and keeps them as long as there is room.

    Any number of threads may read.

    Args:
        store: the features.
        memory: bytes of features that are kept; None takes a quarter of the memory that is free.
    """

    def __init__(self, store: FeatureStore, *, memory: int | None = None) -> None:
        self.store = store
        self.memory = int(SHARE * free_memory()) if memory is None else memory
        self._kept: dict[str, Tensor] = {}

    def length(self, video: str) -> int:
        """Return the number of frames of a video without reading them."""
        return self.store.length(video)

    def __call__(self, video: str) -> Tensor:
        """Return the frames of a video, (T, D) or (T, L, D) float16.

        Raises:
            FeatureFileError: they cannot be read, or are not those that were there at the beginning.
        """
        frames = self._kept.get(video)
        if frames is None:
            frames = torch.from_numpy(self.store.get(video).concatenated().astype(np.float16))
            if len(frames) != self.length(video):
                raise FeatureFileError(
                    f"{video}: {len(frames)} frames of features, {self.length(video)} when opened",
                    remedy="leave features alone while they are in use",
                )
            size = frames.numel() * frames.element_size()
            if size <= self.memory:  # threads that ask at once may each count it: no harm
                self.memory -= size
                self._kept[video] = frames
        return frames


def free_memory() -> int:
    """Bytes of memory that can be had, of the machine or of the container if that has less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        return min(free, int(_LIMIT.read_text()) - int(_USED.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def segment_rows(video: str, segments: Sequence[Segment], store: FeatureStore) -> tuple[Tensor, ...]:
    """Return the frame indices (T,) of each segment; none for one that lies between two frames.

    Raises:
        DataError: a segment of frames ends beyond the last one, or seconds are given and the features do not
            know their times.
    """
    times = store.times(video) if any(segment.unit == "seconds" for segment in segments) else None
    length = store.length(video)
    rows = []
    for segment in segments:
        if segment.unit == "seconds":
            if times is None:
                raise DataError(
                    f"{video}: segments in seconds, and features that do not know their times",
                    remedy="extract the features with capvid, or give segments in frames",
                )
            rows.append(torch.from_numpy(np.flatnonzero((times >= segment.start) & (times < segment.end))))
        elif segment.end > length:
            raise DataError(
                f"{video}: a segment ends at frame {segment.end:g}, the features at {length}",
                remedy="extract the frames that the segments count",
            )
        else:
            rows.append(torch.arange(int(segment.start), int(segment.end)))
    return tuple(rows)
