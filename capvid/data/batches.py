"""From captioned videos and their features to batches of tensors.

Notation for tensor shapes: B captions (or paragraphs) of a batch, S segments, T frames, L words of a
sentence, D feature width; feature maps have their locations before D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from capvid.data.captions import CaptionedVideo
from capvid.data.frames import FrameReader, segment_rows
from capvid.decoding import pad_frames, pad_segments
from capvid.errors import DataError
from capvid.features.store import FeatureStore
from capvid.features.views import NO_VIEWS, Views
from capvid.text.tokenize import words
from capvid.text.vocabulary import BOS, EOS, PAD, Vocabulary


@dataclass(frozen=True)
class Batch:
    """Captions with the frames of their videos; for paragraphs there are S segments after B.

    Attributes:
        features: (B, T, D) or (B, S, T, D), zero beyond a video's frames, in half precision.
        mask: (B, T) or (B, S, T), True at frames.
        inputs: (B, L) or (B, S, L) the words, from the start token on.
        targets: of the same shape, the words after them, up to the end token; padding after that.
    """

    features: Tensor
    mask: Tensor
    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Batch:
        """Move the batch to ``device``, and its features into single precision; maps stay, for their size."""
        features = self.features.to(device, non_blocking=True)
        maps = features.dim() == 3 + self.inputs.dim() - 1
        rest = (part.to(device, non_blocking=True) for part in (self.mask, self.inputs, self.targets))
        return Batch(features if maps else features.float(), *rest)


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
        for video in videos
        if spoken[video.id] or vocabulary is None
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
        for video in videos
        if spoken[video.id] or vocabulary is None
        for key in ("", *views.get(video.id, ()))
    ]


def thinned(length: int, count: int, dropout: float, generator: torch.Generator) -> Tensor:
    """The numbers of at most ``count`` of ``length`` frames at random, in order.

    Each is left out at rate ``dropout``, but never all.
    """
    if not length:
        return torch.empty(0, dtype=torch.long)
    kept = torch.randperm(length, generator=generator)[:count]
    stay = torch.rand(len(kept), generator=generator) >= dropout
    stay[0] = True
    return kept[stay].sort().values


_Example = TypeVar("_Example")
_Drawn = Any  # the frames that are seen this time: numbers (T,), or those of each segment


@dataclass(frozen=True)
class Row(Generic[_Example]):
    """One of a batch's captions: whose, which, and the frames that go with it."""

    example: _Example
    choice: int
    drawn: _Drawn


@dataclass(frozen=True)
class Plan(Generic[_Example]):
    """What a batch is made of, drawn but not read yet.

    Attributes:
        rows: its captions, or paragraphs; none of a batch that has no share for a process.
        words: of the whole batch, ends of sentences included.
        make: reads the frames and puts the batch together.
    """

    rows: Sequence[Row[_Example]]
    words: int
    make: Callable[[Sequence[Row[_Example]]], Batch]

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, number: int, parts: int) -> Callable[[], Batch]:
        """What reads part ``number`` of ``parts``; one that would be empty has a caption without words."""
        rows = self.rows[number::parts]
        return partial(self.make, rows) if rows else partial(self._silent, self.rows[:1])

    def _silent(self, rows: Sequence[Row[_Example]]) -> Batch:
        batch = self.make(rows)
        return replace(batch, targets=torch.full_like(batch.targets, PAD))


class _Batches(ABC, Generic[_Example]):
    """Batches of one epoch after another; the same seed and epoch always give the same batches.

    Args:
        examples: the videos, and views of them, to learn from.
        batch_size: captions, or paragraphs, per batch.
        captions_per_video: how many are drawn for each example in an epoch, without repetition.
        max_frames: frames drawn from videos, or segments, that have more.
        first: take the first ones instead of drawing.
        frame_dropout: rate at which frames are left out besides; one at least stays.
        seed: of all the drawing.
    """

    def __init__(
        self,
        examples: Sequence[_Example],
        *,
        batch_size: int,
        captions_per_video: int,
        max_frames: int,
        first: bool = False,
        frame_dropout: float = 0.0,
        seed: int,
    ) -> None:
        self.examples = examples
        self.batch_size = batch_size
        self.captions_per_video = captions_per_video
        self.max_frames = max_frames
        self.first = first
        self.frame_dropout = frame_dropout
        self.seed = seed
        self.captions = sum(min(captions_per_video, len(self.sizes(example))) for example in examples)

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.captions // self.batch_size)

    @abstractmethod
    def sizes(self, example: _Example) -> Sequence[int]:
        """The length of every caption, or paragraph, of an example, by which batches are sorted."""

    @abstractmethod
    def words(self, example: _Example, choice: int) -> int:
        """The number of words, ends of sentences included, of a caption or paragraph."""

    @abstractmethod
    def drawn(self, example: _Example, generator: torch.Generator) -> _Drawn:
        """The frames of a video, or of its segments, that are seen this time."""

    @abstractmethod
    def batch(self, rows: Sequence[Row[_Example]]) -> Batch:
        """Read the frames and put everything into one batch."""

    def epoch(self, number: int) -> Iterator[Plan[_Example]]:
        """Batches of epoch ``number``: captions of like length together, in random order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        drawn = [
            (index, choice, sizes[choice])
            for index, sizes in enumerate(map(self.sizes, self.examples))
            for choice in torch.randperm(len(sizes), generator=generator)[: self.captions_per_video].tolist()
        ]
        lengths = torch.tensor([length for *_, length in drawn])
        # Sorted by length with noise of two words: little padding, and no batch of one length only.
        noise = torch.rand(len(drawn), generator=generator) * 2
        order = (lengths + noise).argsort().split(self.batch_size)
        for batch in torch.randperm(len(order), generator=generator).tolist():
            chosen = [drawn[row] for row in order[batch].tolist()]
            rows = [
                Row(self.examples[index], choice, self.drawn(self.examples[index], generator))
                for index, choice, _ in chosen
            ]
            words = sum(self.words(row.example, row.choice) for row in rows)
            yield Plan(rows, words, self.batch)

    def thinned(self, length: int, generator: torch.Generator) -> Tensor:
        """The numbers (T,) of frames that are drawn of a video or segment."""
        length = min(length, self.max_frames) if self.first else length
        return thinned(length, self.max_frames, self.frame_dropout, generator)


class TrainingBatches(_Batches[Example]):
    """Batches of captions."""

    def sizes(self, example: Example) -> Sequence[int]:
        """The number of words of every caption."""
        return [len(caption) for caption in example.captions]

    def words(self, example: Example, choice: int) -> int:
        """The words of a caption and its end."""
        return len(example.captions[choice]) + 1

    def drawn(self, example: Example, generator: torch.Generator) -> Tensor:
        """Some of the video's frames."""
        return self.thinned(example.length, generator)

    def batch(self, rows: Sequence[Row[Example]]) -> Batch:
        """A batch of captions with their videos."""
        features, mask = pad_frames([row.example.frames[row.drawn] for row in rows])
        return Batch(features, mask, *_padded([row.example.captions[row.choice] for row in rows]))


class ParagraphBatches(_Batches[ParagraphExample]):
    """Batches of paragraphs."""

    def sizes(self, example: ParagraphExample) -> Sequence[int]:
        """The number of words of the longest sentence of every paragraph."""
        return [max(map(len, paragraph)) for paragraph in example.paragraphs]

    def words(self, example: ParagraphExample, choice: int) -> int:
        """The words of all sentences of a paragraph and their ends."""
        return sum(len(sentence) + 1 for sentence in example.paragraphs[choice])

    def drawn(self, example: ParagraphExample, generator: torch.Generator) -> list[Tensor]:
        """Some frames of every segment."""
        return [rows[self.thinned(len(rows), generator)] for rows in example.rows]

    def batch(self, rows: Sequence[Row[ParagraphExample]]) -> Batch:
        """A batch of paragraphs with their videos' segments; missing segments have no frames and no words."""
        clips = []
        for row in rows:
            frames = row.example.frames
            clips.append([frames[some] for some in row.drawn])
        features, mask, _ = pad_segments(clips)  # (B, S, T, D), (B, S, T)
        segments = mask.shape[1]
        sentences: list[list[int] | None] = []
        for row in rows:
            paragraph = row.example.paragraphs[row.choice]
            sentences += [*paragraph, *[None] * (segments - len(paragraph))]
        inputs, targets = _padded(sentences)
        shape = (len(rows), segments)
        return Batch(features, mask, inputs.unflatten(0, shape), targets.unflatten(0, shape))


def _padded(sentences: Sequence[list[int] | None]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (N, L) of teacher forcing; of None nothing but padding."""
    length = max(len(sentence) for sentence in sentences if sentence is not None) + 1
    none = [PAD] * length
    inputs = [none if s is None else [BOS, *s] + [PAD] * (length - 1 - len(s)) for s in sentences]
    targets = [none if s is None else [*s, EOS] + [PAD] * (length - 1 - len(s)) for s in sentences]
    return torch.tensor(inputs), torch.tensor(targets)
