"""Training examples: the frames of a video with its captions as tokens.

Notation for tensor shapes: T frames, D feature width; feature maps have their locations L before D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from capvid.datasets.annotation_files import first_ids
from capvid.datasets.dataset import CaptionedVideo, Segment
from capvid.errors import DataError, FeatureFileError
from capvid.features.feature_store import NO_VIEWS, FeatureStore, Views
from capvid.text.tokenization import words
from capvid.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Example:
    """A video, or an augmented view of it, with the captions of the video as tokens."""

    id: str
    length: int  # T
    captions: tuple[list[int], ...]
    reader: Callable[[str], Tensor]
    key: str = ""  # of the augmented view; empty for the video itself
    soft: Sequence[tuple[Tensor, Tensor]] = ()  # per caption, words and probabilities (L + 1, k) to learn

    @property
    def frames(self) -> Tensor:
        """The frames (T, D) or (T, L, D) float16, read on access."""
        return self.reader(self.key or self.id)


@dataclass(frozen=True)
class ParagraphExample:
    """The segments of a video, or of an augmented view, with its paragraphs as tokens."""

    id: str
    rows: tuple[Tensor, ...]  # frame indices (T,) of each segment; T may be 0
    paragraphs: tuple[tuple[list[int], ...], ...]
    reader: Callable[[str], Tensor]
    key: str = ""  # of the augmented view; empty for the video itself

    @property
    def frames(self) -> Tensor:
        """All frames (T, D) or (T, L, D) float16, read on access."""
        return self.reader(self.key or self.id)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """The frames of each segment."""
        frames = self.frames
        return tuple(frames[rows] for rows in self.rows)


@dataclass(frozen=True)
class Lengths:
    """Maximum length of sentences; longer ones are dropped, or cut with ``cut``."""

    max_words: int
    cut: bool = False

    def words(self, text: str) -> list[str] | None:
        """Return the words of a sentence to train on; None if it is dropped."""
        tokens = words(text)
        if len(tokens) <= self.max_words:
            return tokens or None
        return tokens[: self.max_words] if self.cut else None


def tokenize_captions(videos: Sequence[CaptionedVideo], lengths: Lengths) -> dict[str, list[list[str]]]:
    """Return the words of the usable captions of each video."""
    return {
        video.id: [tokens for caption in video.captions if (tokens := lengths.words(caption))]
        for video in videos
    }


def tokenize_paragraphs(
    videos: Sequence[CaptionedVideo], lengths: Lengths, *, max_segments: int
) -> dict[str, list[list[list[str]]]]:
    """Return the words of each sentence of each paragraph; a dropped sentence drops its paragraph."""
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
        raise DataError(
            f"{len(missing)} of {len(videos)} videos have no features ({first_ids(missing, 3)})",
            remedy="extract them with capvid extract, or give the features file that holds them",
        )


def make_examples(
    videos: Sequence[CaptionedVideo],
    reader: FrameReader,
    vocabulary: Vocabulary | None,
    lengths: Lengths,
    views: Views = NO_VIEWS,
) -> list[Example]:
    """Return an example for each video with usable captions, followed by its ``views``.

    Without a ``vocabulary``, as for evaluation, all videos are kept, without captions.

    Raises:
        DataError: a video has no features.
    """
    check_features(videos, reader.store)
    encoded: dict[str, tuple[list[int], ...]] = {}
    if vocabulary is not None:
        for name, captions in tokenize_captions(videos, lengths).items():
            encoded[name] = tuple(map(vocabulary.encode, captions))
    return [
        Example(video.id, reader.store.length(key or video.id), encoded.get(video.id, ()), reader, key)
        for video in videos
        if vocabulary is None or encoded[video.id]
        for key in ("", *views.get(video.id, ()))
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
    """Return an example for each video with usable paragraphs, followed by its ``views``.

    Without a ``vocabulary``, as for evaluation, all videos are kept, without paragraphs.

    Raises:
        DataError: a video has no features, or a segment lies beyond them.
    """
    check_features(videos, reader.store)
    encoded: dict[str, tuple[tuple[list[int], ...], ...]] = {}
    if vocabulary is not None:
        for name, texts in tokenize_paragraphs(videos, lengths, max_segments=max_segments).items():
            encoded[name] = tuple(tuple(map(vocabulary.encode, paragraph)) for paragraph in texts)
    return [
        ParagraphExample(
            video.id,
            segment_rows(key or video.id, video.segments[:max_segments], reader.store),
            encoded.get(video.id, ()),
            reader,
            key,
        )
        for video in videos
        if vocabulary is None or encoded[video.id]
        for key in ("", *views.get(video.id, ()))
    ]


SHARE = 0.25  # of the free memory
_CGROUP = Path("/sys/fs/cgroup")


class FrameReader:
    """Thread-safe reader of features, with a cache.

    Args:
        store: the features.
        memory: size of the cache in bytes; None takes a quarter of the free memory.
    """

    def __init__(self, store: FeatureStore, *, memory: int | None = None) -> None:
        self.store = store
        self.memory = int(SHARE * free_memory()) if memory is None else memory
        self._cache: dict[str, Tensor] = {}

    def __call__(self, video: str) -> Tensor:
        """Return the frames of a video, (T, D) or (T, L, D) float16.

        Raises:
            FeatureFileError: they cannot be read, or have changed since the store was opened.
        """
        frames = self._cache.get(video)
        if frames is None:
            frames = torch.from_numpy(self.store.get(video).concatenated().astype(np.float16))
            if len(frames) != self.store.length(video):
                raise FeatureFileError(
                    f"{video}: {len(frames)} frames of features, {self.store.length(video)} when opened",
                    remedy="do not change features while they are in use",
                )
            size = frames.numel() * frames.element_size()
            if size <= self.memory:  # concurrent reads may subtract it twice: harmless
                self.memory -= size
                self._cache[video] = frames
        return frames


def free_memory() -> int:
    """Return the free memory in bytes, of the machine or its container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return min(free, limit - used)
    except (OSError, ValueError):  # no container, or no limit
        return free


def segment_rows(video: str, segments: Sequence[Segment], store: FeatureStore) -> tuple[Tensor, ...]:
    """Return the frame indices (T,) of each segment; T is 0 for a segment between two frames.

    Raises:
        DataError: a segment ends after the last frame, or is in seconds and the features have no times.
    """
    times = store.times(video) if any(segment.unit == "seconds" for segment in segments) else None
    length = store.length(video)
    rows = []
    for segment in segments:
        if segment.unit == "seconds":
            if times is None:
                raise DataError(
                    f"{video}: segments in seconds, and features without times",
                    remedy="extract the features with capvid, or give segments in frames",
                )
            rows.append(torch.from_numpy(np.flatnonzero((times >= segment.start) & (times < segment.end))))
        elif segment.end > length:
            raise DataError(
                f"{video}: a segment ends at frame {segment.end:g}, the features at {length}",
                remedy="extract the frames that the segments refer to",
            )
        else:
            rows.append(torch.arange(int(segment.start), int(segment.end)))
    return tuple(rows)
