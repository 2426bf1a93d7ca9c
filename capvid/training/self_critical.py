"""Self-critical fine-tuning: captions that the captioner itself draws, made likelier the better they score.

Rennie et al., Self-critical Sequence Training for Image Captioning, CVPR 2017 (arXiv:1612.00563), with the
mean score of a video's other samples as the baseline in place of the greedy caption's (Luo, A Better Variant
of Self-Critical Sequence Training, arXiv:2003.09971). Captions are drawn, and made likelier, at a temperature
below 1: a captioner trained with smoothed labels says little of use at 1, and learns from that to be general.
With a ``contrast``, what a caption scores for other videos counts against it, after Luo et al.,
Discriminability Objective for Training Descriptive Captions, CVPR 2018 (arXiv:1803.04376), who ask a
retrieval model instead.

Notation for tensor shapes: B videos, K samples of each, T frames, D feature width, L words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from capvid.captioners.base import Captioner
from capvid.captioners.checkpoint import Checkpoint, limited
from capvid.captioners.layers import pad_frames
from capvid.datasets.batches import Batch
from capvid.datasets.dataset import CaptionedVideo
from capvid.datasets.examples import Example
from capvid.decoding.beam_search import decode
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.errors import UsageError
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import BOS, EOS, PAD, Vocabulary
from capvid.training.objectives import Lessons, Objective, spoken
from capvid.training.optimization import Share
from capvid.training.recipe import Recipe
from capvid.training.trainer import Trainer
from capvid.utils.device import release_memory

OTHERS = 4  # videos for which a caption is scored to see how well it does for any


@dataclass(frozen=True)
class VideoBatch:
    """Videos (features (B, T, D), mask (B, T), ids), and the seed of the captions sampled for them."""

    features: Tensor
    mask: Tensor
    ids: tuple[str, ...]
    seed: int

    def to(self, device: torch.device) -> VideoBatch:
        """Move the batch to ``device``, and its features into single precision; maps stay, for their size."""
        features = self.features.to(device)
        features = features if features.dim() == 4 else features.float()
        return replace(self, features=features, mask=self.mask.to(device))


@dataclass(frozen=True)
class VideoPlan:
    """The videos of a batch with the numbers (T,) of their frames, not read yet."""

    rows: Sequence[tuple[Example, Tensor]]
    seed: int
    words: int = 0  # not known before captions are drawn

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, number: int, parts: int) -> Callable[[], VideoBatch]:
        """What reads part ``number`` of ``parts``; one that would be empty has the first video, unnamed."""
        return partial(self._read, self.rows[number::parts])

    def _read(self, rows: Sequence[tuple[Example, Tensor]]) -> VideoBatch:
        features, mask = pad_frames([example.frames[drawn] for example, drawn in rows or self.rows[:1]])
        return VideoBatch(features, mask, tuple(example.id for example, _ in rows), self.seed)


class VideoBatches:
    """Every example once per epoch, in an order that depends on seed and epoch; frames as for captioning."""

    def __init__(self, examples: Sequence[Example], recipe: Recipe) -> None:
        self.examples = examples
        self.recipe = recipe
        self.captions = len(examples) * recipe.self_critical.samples

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-len(self.examples) // self.recipe.training.batch_size)

    def epoch(self, number: int) -> Iterator[VideoPlan]:
        """Batches of epoch ``number``."""
        data, options = self.recipe.data, self.recipe.training
        first = options.seed * 1_000_003 + number
        generator = torch.Generator().manual_seed(first)
        order = torch.randperm(len(self.examples), generator=generator)
        for index, rows in enumerate(order.split(options.batch_size)):
            examples = [self.examples[row] for row in rows.tolist()]
            frames = [limited(torch.arange(e.length), data.max_frames, data.frames) for e in examples]
            seed = (first * 100_003 + index) % 2**63
            yield VideoPlan(list(zip(examples, frames, strict=True)), seed)


class SelfCriticalTrainer(Trainer):
    """Fine-tunes a trained captioner on CIDEr-D.

    The logged loss is minus the mean reward: CIDEr-D of the samples, less the contrast. The first best
    checkpoint is the one to begin with, so that the run's is never worse on the validation split.

    Args:
        recipe: recipe of the captioner, with a section ``self_critical``.
        start: captioner to begin with.
        options: as for :class:`Trainer`.

    Raises:
        UsageError: it is another captioner than the recipe's, or one of paragraphs, or there is one sample,
            or a temperature of 0.
        FeatureMismatchError: it was trained on other features.
    """

    fine_tunes = True

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

    def _captioner(self, train: Sequence[CaptionedVideo], value_width: int) -> tuple[Vocabulary, Captioner]:
        return self.start.vocabulary, self.start.captioner

    def _batches(self, examples: Sequence[Any]) -> VideoBatches:
        return VideoBatches(examples, self.recipe)

    def _objective(self) -> Objective:
        # the gradient goes through the distribution that captions are sampled from
        return Objective(self.captioner, 0.0, temperature=self.recipe.self_critical.temperature)

    def _lessons(self, share: Share) -> Lessons:
        """Sample captions; weigh each by how much better it scores than the others of its video."""
        self.captioner.eval()  # they are sampled from the captioner as it is used
        critical, decoding = self.recipe.self_critical, self.recipe.decoding
        samples = critical.samples
        shown = torch.zeros_like(self.unseen)
        parts: list[tuple[Batch, Tensor | None]] = []
        for part in share.parts:
            videos = part.to(self.device)
            options = DecodingOptions(
                temperature=critical.temperature,
                num_captions=samples,
                max_length=decoding.max_length,
                seed=videos.seed,
            )
            drawn = decode(self.captioner, videos.features, videos.mask, options)
            inputs, targets = _teacher(drawn, decoding.max_length, self.device)
            if videos.ids:
                rewards = self._rewards(videos.ids, drawn)  # (B, K)
            else:  # a share without videos learns nothing
                targets, rewards = torch.full_like(targets, PAD), torch.zeros(1, samples)
            # Luo: a sample's score against the mean of the others'
            advantage = (rewards - rewards.mean(1, keepdim=True)) * samples / (samples - 1)
            weights = advantage.to(self.device).reshape(-1, 1).expand(targets.shape)
            parts.append((Batch(videos.features, videos.mask, inputs, targets), weights))
            shown -= rewards.sum().to(self.device)
        words = spoken([batch for batch, _ in parts], self.accelerator)
        release_memory()
        return Lessons(parts, words, share.captions * samples, shown)

    def _rewards(self, ids: Sequence[str], samples: Sequence[Sequence[Hypothesis]]) -> Tensor:
        """Return CIDEr-D of every sample, (B, K), less ``contrast`` times its mean for a few other videos.

        An augmented view of the same video is none of these.
        """
        captions = [self.vocabulary.decode(sample.tokens) for video in samples for sample in video]
        count = len(captions) // len(ids)

        def scores(names: Sequence[str]) -> Tensor:
            videos = [name for name in names for _ in range(count)]
            return torch.tensor(self.scorer.score_captions(videos, captions)).view(len(names), -1)

        rewards, contrast = scores(ids), self.recipe.self_critical.contrast
        rotated = [[*ids[k:], *ids[:k]] for k in range(1, min(OTHERS + 1, len(ids)))] if contrast else []
        if not rotated:
            return rewards
        foreign = torch.stack([scores(names) for names in rotated])
        differ = torch.tensor([[[a != b] for a, b in zip(ids, names, strict=True)] for names in rotated])
        return rewards - contrast * ((foreign * differ).sum(0) / differ.sum(0).clamp_min(1))

    def _identity(self) -> Mapping[str, Any]:
        return {**super()._identity(), "start": self.start.info}


def _teacher(
    samples: Sequence[Sequence[Hypothesis]], max_length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B K, L) of teacher forcing; a caption that was cut off has no end."""
    rows = [sample.tokens for video in samples for sample in video]
    length = 1 + max(map(len, rows))
    inputs = [[BOS, *row] + [PAD] * (length - 1 - len(row)) for row in rows]
    ended = [[*row, EOS] if len(row) < max_length else row for row in rows]
    targets = [row + [PAD] * (length - len(row)) for row in ended]
    return torch.tensor(inputs, device=device), torch.tensor(targets, device=device)
