"""From captioned videos and their features to batches of tensors.

Notation for tensor shapes: B captions (or paragraphs) of a batch, S segments, T frames, L words of a
sentence, D feature width; feature maps have their locations before D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from capvid.data.captions import CaptionedVideo, Segment
from capvid.decoding import pad_frames, pad_segments
from capvid.errors import DataError
from capvid.features.file import Features
from capvid.features.store import FeatureStore
from capvid.text.tokenize import words
from capvid.text.vocabulary import BOS, EOS, PAD, Vocabulary


@dataclass(frozen=True)
class Batch:
    """Captions with the frames of their videos; for paragraphs there are S segments after B.

    Attributes:
        features: (B, T, D) or (B, S, T, D), zero beyond a video's frames; maps in half precision.
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
        """Move the batch to ``device``."""
        return Batch(
            self.features.to(device), self.mask.to(device), self.inputs.to(device), self.targets.to(device)
        )


@dataclass(frozen=True)
class Example:
    """A video with its captions in numbers."""

    id: str
    frames: Tensor  # (T, D) or (T, L, D) float16
    captions: tuple[list[int], ...]


@dataclass(frozen=True)
class ParagraphExample:
    """The segments of a video with its paragraphs in numbers, a sentence for each segment."""

    id: str
    segments: tuple[Tensor, ...]  # each (T, D) or (T, L, D) float16, T may be 0
    paragraphs: tuple[tuple[list[int], ...], ...]


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
    videos: Sequence[CaptionedVideo], store: FeatureStore, vocabulary: Vocabulary | None, lengths: Lengths
) -> list[Example]:
    """Put frames and captions together; videos without a usable caption are left out.

    Without a ``vocabulary``, as for evaluation, all videos are kept and no captions.

    Raises:
        DataError: a video has no features.
    """
    check_features(videos, store)
    spoken = tokenised(videos, lengths)
    return [
        Example(
            video.id,
            torch.from_numpy(store.get(video.id).concatenated().astype(np.float16)),
            tuple(vocabulary.encode(caption) for caption in spoken[video.id])
            if vocabulary is not None
            else (),
        )
        for video in videos
        if spoken[video.id] or vocabulary is None
    ]


def make_paragraph_examples(
    videos: Sequence[CaptionedVideo],
    store: FeatureStore,
    vocabulary: Vocabulary | None,
    lengths: Lengths,
    *,
    max_segments: int,
) -> list[ParagraphExample]:
    """Put segments and paragraphs together; videos without a usable paragraph are left out.

    Without a ``vocabulary``, as for evaluation, all videos are kept and no paragraphs.

    Raises:
        DataError: a video has no features, or a segment lies beyond them.
    """
    check_features(videos, store)
    spoken = tokenised_paragraphs(videos, lengths, max_segments=max_segments)
    return [
        ParagraphExample(
            video.id,
            tuple(cut_segments(store.get(video.id), video.segments[:max_segments])),
            tuple(tuple(map(vocabulary.encode, paragraph)) for paragraph in spoken[video.id])
            if vocabulary is not None
            else (),
        )
        for video in videos
        if spoken[video.id] or vocabulary is None
    ]


def cut_segments(features: Features, segments: Sequence[Segment]) -> list[Tensor]:
    """The frames (T, ...) float16 of every segment; one that lies between two frames has T = 0.

    Raises:
        DataError: a segment of frames ends beyond the last one, or seconds are given and the features do not
            know their times.
    """
    frames = torch.from_numpy(features.concatenated().astype(np.float16))
    parts = []
    for segment in segments:
        if segment.unit == "seconds":
            if features.times is None:
                raise DataError(
                    f"{features.video}: segments in seconds, and features that do not know their times",
                    remedy="extract the features with capvid, or give segments in frames",
                )
            inside = (features.times >= segment.start) & (features.times < segment.end)
            parts.append(frames[torch.from_numpy(inside)])
        elif segment.end > len(frames):
            raise DataError(
                f"{features.video}: a segment ends at frame {segment.end:g}, the features at {len(frames)}",
                remedy="extract the frames that the segments count",
            )
        else:
            parts.append(frames[int(segment.start) : int(segment.end)])
    return parts


def thinned(frames: Tensor, count: int, dropout: float, generator: torch.Generator) -> Tensor:
    """At most ``count`` frames at random, in order; each is left out at rate ``dropout``, but never all."""
    if not len(frames):
        return frames
    kept = torch.randperm(len(frames), generator=generator)[:count]
    stay = torch.rand(len(kept), generator=generator) >= dropout
    stay[0] = True
    return frames[kept[stay].sort().values]


_Example = TypeVar("_Example")


class _Batches(ABC, Generic[_Example]):
    """Batches of one epoch after another; the same seed and epoch always give the same batches.

    Args:
        examples: the videos to learn from.
        batch_size: captions, or paragraphs, per batch.
        captions_per_video: how many are drawn from each video in an epoch, without repetition.
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
        """The length of every caption, or paragraph, of an example."""

    def epoch(self, number: int) -> Iterator[Batch]:
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
            rows = [drawn[row] for row in order[batch].tolist()]
            yield self.batch([(self.examples[index], choice) for index, choice, _ in rows], generator)

    @abstractmethod
    def batch(self, rows: Sequence[tuple[_Example, int]], generator: torch.Generator) -> Batch:
        """Put examples, each with the number of one of its captions, into one batch."""

    def drawn(self, frames: Tensor, generator: torch.Generator) -> Tensor:
        """The frames of a video or segment that are seen this time."""
        frames = frames[: self.max_frames] if self.first else frames
        return thinned(frames, self.max_frames, self.frame_dropout, generator)


class TrainingBatches(_Batches[Example]):
    """Batches of captions."""

    def sizes(self, example: Example) -> Sequence[int]:
        """The number of words of every caption."""
        return [len(caption) for caption in example.captions]

    def batch(self, rows: Sequence[tuple[Example, int]], generator: torch.Generator) -> Batch:
        """A batch of captions with their videos."""
        features, mask = pad_frames([self.drawn(example.frames, generator) for example, _ in rows])
        inputs, targets = _padded([example.captions[choice] for example, choice in rows])
        maps = features.dim() == 4  # (B, T, L, D): they stay as they are kept, for their size
        return Batch(features if maps else features.float(), mask, inputs, targets)


class ParagraphBatches(_Batches[ParagraphExample]):
    """Batches of paragraphs."""

    def sizes(self, example: ParagraphExample) -> Sequence[int]:
        """The number of words of the longest sentence of every paragraph."""
        return [max(map(len, paragraph)) for paragraph in example.paragraphs]

    def batch(self, rows: Sequence[tuple[ParagraphExample, int]], generator: torch.Generator) -> Batch:
        """A batch of paragraphs with their videos' segments; missing segments have no frames and no words."""
        clips = [[self.drawn(segment, generator) for segment in example.segments] for example, _ in rows]
        features, mask, _ = pad_segments(clips)  # (B, S, T, D), (B, S, T)
        segments = mask.shape[1]
        sentences: list[list[int] | None] = []
        for example, choice in rows:
            paragraph = example.paragraphs[choice]
            sentences += [*paragraph, *[None] * (segments - len(paragraph))]
        inputs, targets = _padded(sentences)
        shape = (len(rows), segments)
        return Batch(features.float(), mask, inputs.unflatten(0, shape), targets.unflatten(0, shape))


def _padded(sentences: Sequence[list[int] | None]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (N, L) of teacher forcing; of None nothing but padding."""
    length = max(len(sentence) for sentence in sentences if sentence is not None) + 1
    none = [PAD] * length
    inputs = [none if s is None else [BOS, *s] + [PAD] * (length - 1 - len(s)) for s in sentences]
    targets = [none if s is None else [*s, EOS] + [PAD] * (length - 1 - len(s)) for s in sentences]
    return torch.tensor(inputs), torch.tensor(targets)
