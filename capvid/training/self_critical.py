"""Self-critical fine-tuning: captions that the captioner itself draws, made likelier the better they score.

Rennie et al., Self-critical Sequence Training for Image Captioning, CVPR 2017 (arXiv:1612.00563), with the
mean score of a video's other samples as the baseline in place of the greedy caption's (Luo, A Better Variant
of Self-Critical Sequence Training, arXiv:2003.09971). Captions are drawn, and made likelier, at a temperature
below 1: a captioner trained with smoothed labels says little of use at 1, and learns from that to be general.

Notation for tensor shapes: B videos, K samples of each, T frames, D feature width, L words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from capvid.captioners import Captioner
from capvid.captioners.checkpoint import Checkpoint, limited
from capvid.data.batches import Example
from capvid.data.captions import CaptionedVideo
from capvid.decoding import DecodingOptions, Hypothesis, decode, pad_frames
from capvid.device import release_memory
from capvid.errors import UsageError
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training.loop import Trainer
from capvid.training.recipe import Recipe


@dataclass(frozen=True)
class VideoBatch:
    """Videos with the seed of the captions that are drawn for them.

    Attributes:
        features: (B, T, D), zero beyond a video's frames.
        mask: (B, T), True at frames.
        ids: of the videos.
        seed: of the drawing.
    """

    features: Tensor
    mask: Tensor
    ids: tuple[str, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> VideoBatch:
        """Move the batch to ``device``."""
        return replace(self, features=self.features.to(device), mask=self.mask.to(device))


class VideoBatches:
    """Every video once in an epoch, in random order; the same seed and epoch always give the same batches.

    No frames are left out beyond ``data.max_frames``: videos are seen as when they are captioned.

    Args:
        examples: the videos to learn from.
        recipe: which frames are taken of each, how many videos make a batch, and the seed.
    """

    def __init__(self, examples: Sequence[Example], recipe: Recipe) -> None:
        self.examples = examples
        self.recipe = recipe
        self.captions = len(examples) * recipe.self_critical.samples

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-len(self.examples) // self.recipe.training.batch_size)

    def epoch(self, number: int) -> Iterator[VideoBatch]:
        """Batches of epoch ``number``."""
        data, options = self.recipe.data, self.recipe.training
        first = options.seed * 1_000_003 + number
        generator = torch.Generator().manual_seed(first)
        order = torch.randperm(len(self.examples), generator=generator)
        for place, rows in enumerate(order.split(options.batch_size)):
            some = [self.examples[row] for row in rows.tolist()]
            clips = [limited(e.frames, data.max_frames, data.frames) for e in some]
            features, mask = pad_frames(clips)
            yield VideoBatch(features.float(), mask, tuple(e.id for e in some), first * 100_003 + place)


class SelfCriticalTrainer(Trainer):
    """Fine-tunes a trained captioner on CIDEr-D.

    The logged loss is the mean of minus the samples' CIDEr-D. The best checkpoint is at first the one that it
    begins with, so that the run's is never worse on the validation split.

    Args:
        recipe: of the captioner; its section ``self_critical`` says how it is fine-tuned.
        start: the captioner to begin with.
        options: as for :class:`Trainer`.

    Raises:
        UsageError: it is another captioner than the recipe's, or one of paragraphs, or there is one sample,
            or a temperature of 0.
        FeatureMismatchError: it was trained on other features.
    """

    def __init__(self, recipe: Recipe, *, start: Checkpoint, **options: Any) -> None:
        if start.name != recipe.captioner:
            raise UsageError(
                f"{start.folder}: holds {start.name}, and {recipe.name} is a recipe of {recipe.captioner}",
                remedy=f"give a recipe of {start.name}",
            )
        if start.captioner.paragraphs:
            raise UsageError(
                f"{start.name} writes paragraphs, and only single captions are fine-tuned on CIDEr-D",
                remedy="choose a captioner of single captions, such as m3",
            )
        start.header.checked(options["store"].header)
        critical = recipe.self_critical
        if critical.samples < 2:
            raise UsageError(
                "self_critical.samples = 1: a caption is rewarded for being better than others of its video",
                remedy="draw at least 2",
            )
        if not critical.temperature:
            raise UsageError(
                f"self_critical.temperature = {critical.temperature}: captions are drawn at random",
                remedy="give one above 0, such as 0.7",
            )
        training = replace(
            recipe.training,
            optimizer="adam",
            schedule="constant",
            learning_rate=critical.learning_rate,
            epochs=critical.epochs,
            patience=critical.patience,
            batch_size=critical.batch_size,
            weight_decay=0.0,
            label_smoothing=0.0,
            init_range=0.0,
        )
        self.start = start
        super().__init__(replace(recipe, training=training), **options)
        train = [video for video in self.videos if video.split == "train"]
        self.scorer = CiderD({video.id: list(video.captions) for video in train})

    def _vocabulary(self, train: Sequence[CaptionedVideo]) -> Any:
        return self.start.vocabulary

    def _build(self, value_width: int) -> Captioner:
        return self.start.captioner

    def _fit(self, examples: Sequence[Any]) -> None:
        """The captioner is fitted to the features already."""

    def _batches(self, examples: Sequence[Any]) -> VideoBatches:
        return VideoBatches(examples, self.recipe)

    def _begin(self) -> None:
        """Validate the captioner as it is and keep it as the best so far."""
        cider, captions = self._validate()
        self._save("best", 0, cider)
        self.progress.begin(cider, dict(list(captions.items())[:3]))

    def _loss(self, batch: Any) -> tuple[Tensor, float, int]:
        self.captioner.eval()  # the captions that are drawn are those of the captioner as it is used
        critical, decoding = self.recipe.self_critical, self.recipe.decoding
        drawing = DecodingOptions(
            temperature=critical.temperature,
            num_captions=critical.samples,
            max_length=decoding.max_length,
            seed=batch.seed,
        )
        samples = decode(self.captioner, batch.features, batch.mask, drawing)
        rewards = self._rewards(batch.ids, samples).to(self.device)  # (B, K)
        inputs, targets = _teacher(samples, decoding.max_length, self.device)  # (B K, L)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.captioner.teacher_forced(batch.features, batch.mask, inputs)
            spoken = targets != PAD
            logits = self.captioner.logits(hidden[spoken]).float() / critical.temperature  # (words, V)
        # Luo: a sample's score against the mean of the others'
        advantage = (rewards - rewards.mean(1, keepdim=True)) * critical.samples / (critical.samples - 1)
        weights = advantage.reshape(-1, 1).expand(targets.shape)[spoken]
        loss = (F.cross_entropy(logits, targets[spoken], reduction="none") * weights).sum() / spoken.sum()
        release_memory()
        return loss, -float(rewards.mean()), rewards.numel()

    def _rewards(self, ids: Sequence[str], samples: Sequence[Sequence[Hypothesis]]) -> Tensor:
        """CIDEr-D of every sample, (B, K)."""
        spoken = [[self.vocabulary.decode(sample.tokens) for sample in some] for some in samples]
        return torch.tensor(
            [self.scorer.score_captions(name, some) for name, some in zip(ids, spoken, strict=True)]
        )

    def _run(self) -> Mapping[str, Any]:
        return {**super()._run(), "start": self.start.info}


def _teacher(
    samples: Sequence[Sequence[Hypothesis]], max_length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B K, L) of teacher forcing; a caption that was cut off has no end to learn."""
    rows = [sample.tokens for some in samples for sample in some]
    length = 1 + max(map(len, rows))
    inputs = [[BOS, *row] + [PAD] * (length - 1 - len(row)) for row in rows]
    ended = [[*row, EOS] if len(row) < max_length else row for row in rows]
    targets = [row + [PAD] * (length - len(row)) for row in ended]
    return torch.tensor(inputs, device=device), torch.tensor(targets, device=device)
