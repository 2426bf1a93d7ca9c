"""From captioned videos and their features to examples: a video's frames with its captions in numbers.

Notation for tensor shapes: T frames, D feature width; feature maps have their locations L before D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from capvid.data.captions import CaptionedVideo
from capvid.data.frames import FrameReader, segment_rows
from capvid.errors import DataError
from capvid.features.store import FeatureStore
from capvid.features.views import NO_VIEWS, Views
from capvid.text.tokenize import words
from capvid.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Example:
    """A video, or a view of it, with the video's captions in numbers."""

    id: str
    length: int  # T
    captions: tuple[list[int], ...]
    reader: Callable[[str], Tensor]
    key: str = ""  # of the view whose features are read; none for the video's own

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
        """The words of a sentence as they are used; None if it is left out."""
        found = words(text)
        if len(found) <= self.max_words:
            return found or None
        return found[: self.max_words] if self.cut else None


def tokenised(videos: Sequence[CaptionedVideo], lengths: Lengths) -> dict[str, list[list[str]]]:
    """Words of every usable caption of every video."""
    return {
        video.id: [found for caption in video.captions if (found := lengths.words(caption))]
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
            whole = [sentence for sentence in sentences if sentence]
            if len(whole) == len(sentences):
                usable[video.id].append(whole)
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
