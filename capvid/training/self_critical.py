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

from capvid.captioners import Captioner
from capvid.captioners.checkpoint import Checkpoint, limited
from capvid.data.batches import Batch
from capvid.data.captions import CaptionedVideo
from capvid.data.examples import Example
from capvid.decoding import DecodingOptions, Hypothesis, decode, pad_frames
from capvid.device import release_memory
from capvid.errors import UsageError
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training.lessons import Lessons, Share, spoken
from capvid.training.loop import Trainer
from capvid.training.optimise import Objective
from capvid.training.recipe import Recipe

OTHERS = 4  # videos for which a caption is scored to see how well it does for any


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

    def to(self, device: torch.device) -> VideoBatch:
        """Move the batch to ``device``, and its features into single precision; maps stay, for their size."""
        features = self.features.to(device)
        features = features if features.dim() == 4 else features.float()
        return replace(self, features=features, mask=self.mask.to(device))


@dataclass(frozen=True)
class VideoPlan:
    """The videos of a batch with the numbers (T,) of the frames that are seen of each, not read yet."""

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
    """Every example once in an epoch, in random order; the same seed and epoch always give the same batches.

    No frames are left out beyond ``data.max_frames``: videos are seen as when they are captioned.

    Args:
        examples: the videos, and views of them, to learn from.
        recipe: which frames are taken of each, how many videos make a batch, and the seed.
    """

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
        for place, rows in enumerate(order.split(options.batch_size)):
            some = [self.examples[row] for row in rows.tolist()]
            seen = [limited(torch.arange(e.length), data.max_frames, data.frames) for e in some]
            yield VideoPlan(list(zip(some, seen, strict=True)), (first * 100_003 + place) % 2**63)


class SelfCriticalTrainer(Trainer):
    """Fine-tunes a trained captioner on CIDEr-D.

    The logged loss is the mean of minus the samples' rewards: their CIDEr-D, less the contrast. The best
    checkpoint is at first the one that it begins with, so that the run's is never worse on the validation
    split.

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

    def _objective(self) -> Objective:
        """The gradient goes through the distribution that captions are drawn from."""
        return Objective(self.captioner, 0.0, temperature=self.recipe.self_critical.temperature)

    def _lessons(self, share: Share) -> Lessons:
        """Captions that the captioner draws, each weighed by how much better it scores than the others."""
        self.captioner.eval()  # they are drawn by the captioner as it is used
        samples = self.recipe.self_critical.samples
        shown = torch.zeros_like(self.unseen)
        parts: list[tuple[Batch, Tensor | None]] = []
        for part in share.parts:
            batch, rewards = self._drawn(part.to(self.device))
            # Luo: a sample's score against the mean of the others'
            advantage = (rewards - rewards.mean(1, keepdim=True)) * samples / (samples - 1)  # (B, K)
            weights = advantage.to(self.device).reshape(-1, 1).expand(batch.targets.shape)
            parts.append((batch, weights))
            shown -= rewards.sum().to(self.device)
        words = spoken([batch for batch, _ in parts], self.accelerator)
        release_memory()
        return Lessons(parts, words, share.captions * samples, shown)

    def _drawn(self, videos: VideoBatch) -> tuple[Batch, Tensor]:
        """Captions (B K, L) of the videos as a batch to learn from, and their rewards (B, K)."""
        critical, decoding = self.recipe.self_critical, self.recipe.decoding
        drawing = DecodingOptions(
            temperature=critical.temperature,
            num_captions=critical.samples,
            max_length=decoding.max_length,
            seed=videos.seed,
        )
        samples = decode(self.captioner, videos.features, videos.mask, drawing)
        inputs, targets = _teacher(samples, decoding.max_length, self.device)
        if not videos.ids:  # a share without videos learns nothing
            return Batch(videos.features, videos.mask, inputs, torch.full_like(targets, PAD)), torch.zeros(
                1, critical.samples
            )
        return Batch(videos.features, videos.mask, inputs, targets), self._rewards(videos.ids, samples)

    def _rewards(self, ids: Sequence[str], samples: Sequence[Sequence[Hypothesis]]) -> Tensor:
        """CIDEr-D of every sample, (B, K), less ``contrast`` times its mean for a few other videos.

        A view of its own video is none of these.
        """
        spoken = [self.vocabulary.decode(sample.tokens) for some in samples for sample in some]
        contrast = self.recipe.self_critical.contrast
        others = range(1, min(OTHERS + 1, len(ids))) if contrast else range(0)
        turned = [[*ids[shift:], *ids[:shift]] for shift in (0, *others)]
        rewards, *foreign = (self._scores(some, spoken) for some in turned)
        if not foreign:
            return rewards
        differ = torch.tensor([[[a != b] for a, b in zip(ids, some, strict=True)] for some in turned[1:]])
        total, count = (torch.stack(foreign) * differ).sum(0), differ.sum(0).clamp_min(1)
        return rewards - contrast * (total / count)

    def _scores(self, ids: Sequence[str], spoken: Sequence[Sequence[str]]) -> Tensor:
        """CIDEr-D (B, K) of K captions each for the videos ``ids``."""
        samples = len(spoken) // len(ids)
        videos = [name for name in ids for _ in range(samples)]
        return torch.tensor(self.scorer.score_captions(videos, spoken)).view(len(ids), -1)

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
