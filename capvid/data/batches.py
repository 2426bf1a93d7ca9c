"""From captioned videos and their features to batches of tensors.

Notation for tensor shapes: B captions of a batch, T frames, D feature width, L words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from capvid.data.captions import CaptionedVideo
from capvid.decoding.search import pad_frames
from capvid.errors import DataError
from capvid.features.store import FeatureStore
from capvid.text.tokenize import words
from capvid.text.vocabulary import BOS, EOS, PAD, Vocabulary


@dataclass(frozen=True)
class Batch:
    """Captions with the frames of their videos.

    Attributes:
        features: (B, T, D) float32, zero beyond a video's frames.
        mask: (B, T), True at frames.
        inputs: (B, L) the words, from the start token on.
        targets: (B, L) the words after them, up to the end token; padding after that.
    """

    features: Tensor
    mask: Tensor
    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        """Move the batch to ``device``."""
        return Batch(
            self.features.to(device), self.mask.to(device), self.inputs.to(device), self.targets.to(device)
        )


@dataclass(frozen=True)
class Example:
    """A video with its captions in numbers."""

    id: str
    frames: Tensor  # (T, D) float16
    captions: tuple[list[int], ...]


def tokenised(videos: Sequence[CaptionedVideo], max_words: int) -> dict[str, list[list[str]]]:
    """Words of every caption of every video, without empty captions and those over ``max_words``."""
    return {
        video.id: [found for caption in video.captions if 0 < len(found := words(caption)) <= max_words]
        for video in videos
    }


def make_examples(
    videos: Sequence[CaptionedVideo], store: FeatureStore, vocabulary: Vocabulary, *, max_words: int
) -> list[Example]:
    """Put frames and captions together; videos without a usable caption are left out.

    Raises:
        DataError: a video has no features.
    """
    missing = [video.id for video in videos if video.id not in store]
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(
            f"{len(missing)} of {len(videos)} videos have no features ({names})",
            remedy="extract them with capvid extract, or give the features file that holds them",
        )
    spoken = tokenised(videos, max_words)
    return [
        Example(
            video.id,
            torch.from_numpy(store.get(video.id).concatenated().astype(np.float16)),
            tuple(vocabulary.encode(caption) for caption in spoken[video.id]),
        )
        for video in videos
        if spoken[video.id]
    ]


def spread(frames: Tensor, count: int) -> Tensor:
    """At most ``count`` frames, evenly spread over (T, D): the middles of ``count`` equal slices."""
    if len(frames) <= count:
        return frames
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) * len(frames) / count
    return frames[middles.long()]


def thinned(frames: Tensor, count: int, dropout: float, generator: torch.Generator) -> Tensor:
    """At most ``count`` frames at random, in order; each is left out at rate ``dropout``, but never all."""
    kept = torch.randperm(len(frames), generator=generator)[:count]
    stay = torch.rand(len(kept), generator=generator) >= dropout
    stay[0] = True
    return frames[kept[stay].sort().values]


class TrainingBatches:
    """Batches of one epoch after another; the same seed and epoch always give the same batches.

    Args:
        examples: the videos to learn from.
        batch_size: captions per batch.
        captions_per_video: captions drawn from each video in an epoch, without repetition.
        max_frames: frames drawn at random from videos that have more.
        frame_dropout: rate at which frames are left out besides; one at least stays.
        seed: of all the drawing.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        batch_size: int,
        captions_per_video: int,
        max_frames: int,
        frame_dropout: float = 0.0,
        seed: int,
    ) -> None:
        self.examples = examples
        self.batch_size = batch_size
        self.captions_per_video = captions_per_video
        self.max_frames = max_frames
        self.frame_dropout = frame_dropout
        self.seed = seed
        self.captions = sum(min(captions_per_video, len(example.captions)) for example in examples)

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.captions // self.batch_size)

    def epoch(self, number: int) -> Iterator[Batch]:
        """Batches of epoch ``number``: captions of like length together, in random order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        drawn = [
            (index, choice)
            for index, example in enumerate(self.examples)
            for choice in torch.randperm(len(example.captions), generator=generator)[
                : self.captions_per_video
            ].tolist()
        ]
        lengths = torch.tensor([len(self.examples[index].captions[choice]) for index, choice in drawn])
        # Sorted by length with noise of two words: little padding, and no batch of one length only.
        noise = torch.rand(len(drawn), generator=generator) * 2
        order = (lengths + noise).argsort().split(self.batch_size)
        for batch in torch.randperm(len(order), generator=generator).tolist():
            yield self._batch([drawn[row] for row in order[batch].tolist()], generator)

    def _batch(self, rows: Sequence[tuple[int, int]], generator: torch.Generator) -> Batch:
        features, mask = pad_frames(
            [
                thinned(self.examples[index].frames, self.max_frames, self.frame_dropout, generator)
                for index, _ in rows
            ]
        )
        captions = [self.examples[index].captions[choice] for index, choice in rows]
        length = max(map(len, captions)) + 1
        inputs = torch.tensor([[BOS, *c] + [PAD] * (length - 1 - len(c)) for c in captions])
        targets = torch.tensor([[*c, EOS] + [PAD] * (length - 1 - len(c)) for c in captions])
        return Batch(features.float(), mask, inputs, targets)
