"""Training objectives: cross-entropy, and self-critical training on CIDEr-D.

An objective decides what an epoch's batches hold (``batches``), turns a shard of a batch into weighted
micro-batches (``micro_batches``) and scores those (``loss``).

Self-critical training samples captions and makes them likelier the better they score: Rennie et al.,
Self-critical Sequence Training for Image Captioning, CVPR 2017 (arXiv:1612.00563). The baseline is the mean
score of a video's other samples instead of the greedy caption's (Luo, A Better Variant of Self-Critical
Sequence Training, arXiv:2003.09971). Sampling and loss use a temperature below 1: a captioner trained with
smoothed labels samples little of use at 1. With a ``contrast``, a caption's score for other videos counts
against it, after Luo et al., Discriminability Objective for Training Descriptive Captions, CVPR 2018
(arXiv:1803.04376), who ask a retrieval model instead.

Notation for tensor shapes: B captions or videos, K samples of a video, T frames, D feature width, L words,
Z width before the vocabulary layer, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners.base import Captioner, ParagraphCaptioner
from capvid.captioners.checkpoint import Checkpoint, limited
from capvid.captioners.layers import pad_frames
from capvid.datasets.batches import Batch, Example, paragraph_teacher_tokens
from capvid.decoding.beam_search import as_tokens, decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.errors import UsageError
from capvid.features.feature_file import FeatureHeader
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import BOS, EOS, PAD, Vocabulary
from capvid.training.evaluation import Task
from capvid.training.optimization import Shard
from capvid.training.recipe import Recipe
from capvid.utils.device import release_memory

NGRAM = 3  # words; the unit of repetition between segments
CONTRAST_VIDEOS = 4  # other videos that each caption is scored for


class TeacherForcedLoss(nn.Module):
    """Negative log-likelihood of a batch's words, end tokens included (M3, Eq. 24, unregularized).

    A module, so that several processes can share it. Padding skips the vocabulary layer.
    """

    def __init__(self, captioner: Captioner, label_smoothing: float, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.captioner, self.label_smoothing, self.temperature = captioner, label_smoothing, temperature

    def forward(self, batch: Batch, weights: Tensor | None = None) -> Tensor:
        """Return the sum over all words, weighted by ``weights`` in the shape of the targets."""
        z, targets = teacher_forced(self.captioner, batch), batch.targets  # (B, L, Z), (B, L)
        real = targets != PAD
        logits = self.captioner.logits(z[real]).float() / self.temperature  # (words, V)
        if weights is not None:
            return (F.cross_entropy(logits, targets[real], reduction="none") * weights[real]).sum()
        return F.cross_entropy(logits, targets[real], label_smoothing=self.label_smoothing, reduction="sum")


def teacher_forced(captioner: Captioner, batch: Batch) -> Tensor:
    """Return the input of the vocabulary layer after each input word, (..., L, Z)."""
    if batch.remembered is not None and isinstance(captioner, ParagraphCaptioner):
        return captioner.teacher_forced(batch.features, batch.mask, batch.inputs, batch.remembered)
    return captioner.teacher_forced(batch.features, batch.mask, batch.inputs)


@dataclass(frozen=True)
class MicroBatches:
    """A process's micro-batches of a batch, each with the weights of its words, if any."""

    pairs: Sequence[tuple[Batch, Tensor | None]]
    divisor: float  # of the losses of all processes
    count: int  # words, or samples, of the batch: the divisor of the logged sum
    logged: Tensor | None = None  # sum to log; None logs the losses


def count_words(batches: Sequence[Batch], accelerator: Accelerator) -> int:
    """Return the number of words, end tokens included, in the batches of all processes; at least 1."""
    own = torch.stack([(batch.targets != PAD).sum() for batch in batches]).sum()
    return max(1, int(accelerator.reduce(own)))


def count_sentences(batches: Sequence[Batch], accelerator: Accelerator) -> int:
    """Return the number of sentences in the batches of all processes; at least 1."""
    own = torch.stack([(batch.targets != PAD).any(-1).sum() for batch in batches]).sum()
    return max(1, int(accelerator.reduce(own)))


@dataclass(eq=False)
class CrossEntropy:
    """Cross-entropy of the reference captions, with own memory.

    It is summed over a batch and divided by ``training.loss``: by the number of words; by that of sentences,
    as in M3, Eq. 24, and key-value memory, Eq. 15; or by nothing, as in HAM, Eq. 12.
    """

    recipe: Recipe
    task: Task
    captioner: Captioner
    examples: Sequence[Any]
    accelerator: Accelerator
    device: torch.device

    def __post_init__(self) -> None:
        options = self.recipe.training
        self.loss = TeacherForcedLoss(self.captioner, options.label_smoothing)
        self.batches = self.task.batches(self.examples, batch_size=options.batch_size, seed=options.seed)

    def micro_batches(self, shard: Shard, epoch: int, *, bf16: bool) -> MicroBatches:
        """Return the micro-batches of a shard."""
        options, words = self.recipe.training, shard.words
        batches = [batch.to(self.device) for batch in shard.micro_batches]
        if options.own_memory and epoch > 1:  # in the first epoch the captioner writes little of use
            length = self.recipe.decoding.max_length
            batches = [with_own_memory(self.captioner, batch, max_length=length) for batch in batches]
            words = count_words(batches, self.accelerator)
        divisor = {"word": words, "sum": 1}.get(options.loss) or count_sentences(batches, self.accelerator)
        return MicroBatches([(batch, None) for batch in batches], divisor, words)


def with_own_memory(captioner: Captioner, batch: Batch, *, max_length: int) -> Batch:
    """Return the batch with the greedy sentences of ``captioner`` as its memory.

    The targets are those that repeat these sentences the least. Captioners without memory keep their batch.
    """
    if not isinstance(captioner, ParagraphCaptioner) or not captioner.recurrent:
        return batch
    counts = (batch.inputs != PAD).any(-1).sum(1) - 1  # (B,) segments before the last
    if not (counts > 0).any() or not (batch.targets != PAD).any():
        return batch
    greedy = DecodingOptions(max_length=max_length)
    decoded = decode_paragraphs(captioner, batch.features[:, :-1], batch.mask[:, :-1], counts, greedy)
    captioner.train()
    own = [[hypotheses[0].tokens for hypotheses in video] for video in decoded]
    segments, device = batch.inputs.shape[1], batch.inputs.device
    references = [least_repeated(*pair) for pair in zip(batch.paragraphs, own, strict=True)]
    inputs, targets = paragraph_teacher_tokens(references, segments)
    padded = [video[k] if k < len(video) else [] for video in own for k in range(segments - 1)]
    remembered = as_tokens(padded, device).unflatten(0, (len(own), segments - 1))
    return replace(batch, inputs=inputs.to(device), targets=targets.to(device), remembered=remembered)


def least_repeated(
    paragraphs: Sequence[Sequence[list[int]]], own: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return each segment's first sentence among those that repeat the fewest n-grams of ``own``."""
    chosen: list[list[int]] = []
    before: set[tuple[int, ...]] = set()

    def ngrams(sentence: Sequence[int]) -> set[tuple[int, ...]]:
        return set(zip(*(sentence[first:] for first in range(NGRAM)), strict=False))

    for segment, sentences in enumerate(zip(*paragraphs, strict=True)):
        chosen.append(min(sentences, key=lambda sentence: len(before & ngrams(sentence))))
        before |= ngrams(own[segment]) if segment < len(own) else set()
    return chosen


@dataclass(frozen=True)
class VideoBatch:
    """Videos (features (B, T, D), mask (B, T), ids), and the seed of the captions sampled for them."""

    features: Tensor
    mask: Tensor
    ids: tuple[str, ...]
    seed: int

    def to(self, device: torch.device) -> VideoBatch:
        """Move the batch to ``device``; features become float32, except feature maps, for their size."""
        features = self.features.to(device)
        features = features if features.dim() == 4 else features.float()
        return replace(self, features=features, mask=self.mask.to(device))


@dataclass(frozen=True)
class VideoPlan:
    """Videos of a batch with the frame numbers (T,) to read."""

    rows: Sequence[tuple[Example, Tensor]]
    seed: int
    words: int = 0  # unknown before captions are sampled

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, number: int, parts: int) -> Callable[[], VideoBatch]:
        """Return a reader of part ``number`` of ``parts``; an empty one reads a video without id."""
        return partial(self._read, self.rows[number::parts])

    def _read(self, rows: Sequence[tuple[Example, Tensor]]) -> VideoBatch:
        features, mask = pad_frames([example.frames[numbers] for example, numbers in rows or self.rows[:1]])
        return VideoBatch(features, mask, tuple(example.id for example, _ in rows), self.seed)


class VideoBatches:
    """Every example once per epoch, in an order that depends on seed and epoch; frames as for captioning."""

    def __init__(self, examples: Sequence[Example], recipe: Recipe) -> None:
        self.examples, self.recipe = examples, recipe
        self.captions = len(examples) * recipe.self_critical.samples

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return -(-len(self.examples) // self.recipe.training.batch_size)

    def epoch(self, number: int) -> Iterator[VideoPlan]:
        """Iterate over the batches of epoch ``number``."""
        data, options = self.recipe.data, self.recipe.training
        first = options.seed * 1_000_003 + number
        order = torch.randperm(len(self.examples), generator=torch.Generator().manual_seed(first))
        for index, rows in enumerate(order.split(options.batch_size)):
            examples = [self.examples[row] for row in rows.tolist()]
            frames = [limited(torch.arange(e.length), data.max_frames, data.frames) for e in examples]
            seed = (first * 100_003 + index) % 2**63
            yield VideoPlan(list(zip(examples, frames, strict=True)), seed)


@dataclass(eq=False)
class SelfCritical:
    """Expected CIDEr-D of sampled captions, less the contrast; the logged loss is minus the mean reward."""

    recipe: Recipe
    vocabulary: Vocabulary
    captioner: Captioner
    examples: Sequence[Example]
    references: Mapping[str, Sequence[str]]
    accelerator: Accelerator
    device: torch.device

    def __post_init__(self) -> None:
        # the gradient goes through the distribution that captions are sampled from
        self.loss = TeacherForcedLoss(self.captioner, 0.0, temperature=self.recipe.self_critical.temperature)
        self.batches = VideoBatches(self.examples, self.recipe)
        self.scorer = CiderD(self.references)

    @staticmethod
    def recipe_for(recipe: Recipe, start: Checkpoint, header: FeatureHeader) -> Recipe:
        """Return ``recipe`` with its section ``self_critical`` as training options, if they fit ``start``."""
        critical = recipe.self_critical
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
        start.header.require_match(header)
        if critical.samples < 2:
            raise UsageError(
                "self_critical.samples = 1: a caption is rewarded for being better than others of its video",
                remedy="draw at least 2",
            )
        if not critical.temperature:
            raise UsageError(
                f"self_critical.temperature = {critical.temperature}: captions are sampled at random",
                remedy="give one above 0, such as 0.7",
            )
        shared = ("learning_rate", "epochs", "patience", "batch_size")
        options: dict[str, Any] = {name: getattr(critical, name) for name in shared}
        options |= {"optimizer": "adam", "schedule": "constant", "weight_decay": 0.0}
        training = replace(recipe.training, label_smoothing=0.0, init_range=0.0, **options)
        return replace(recipe, training=training)

    def micro_batches(self, shard: Shard, epoch: int, *, bf16: bool) -> MicroBatches:
        """Sample captions, and weight each by its advantage over the other samples of its video."""
        self.captioner.eval()  # sample without dropout, as in use
        critical, max_length = self.recipe.self_critical, self.recipe.decoding.max_length
        samples, reward_sum = critical.samples, torch.zeros((), dtype=torch.float64, device=self.device)
        pairs: list[tuple[Batch, Tensor | None]] = []
        for batch in shard.micro_batches:
            videos = batch.to(self.device)
            options = DecodingOptions(
                temperature=critical.temperature,
                num_captions=samples,
                max_length=max_length,
                seed=videos.seed,
            )
            sampled = decode(self.captioner, videos.features, videos.mask, options)
            inputs, targets = _teacher(sampled, max_length, self.device)
            if videos.ids:
                rewards = self.rewards(videos.ids, sampled)  # (B, K)
            else:  # a shard without videos learns nothing
                targets, rewards = torch.full_like(targets, PAD), torch.zeros(1, samples)
            # Luo: a sample's score against the mean of the others'
            advantage = (rewards - rewards.mean(1, keepdim=True)) * samples / (samples - 1)
            weights = advantage.to(self.device).reshape(-1, 1).expand(targets.shape)
            pairs.append((Batch(videos.features, videos.mask, inputs, targets), weights))
            reward_sum += rewards.sum().to(self.device)
        words = count_words([batch for batch, _ in pairs], self.accelerator)
        release_memory()
        return MicroBatches(pairs, words, shard.captions * samples, -reward_sum)

    def rewards(self, ids: Sequence[str], samples: Sequence[Sequence[Hypothesis]]) -> Tensor:
        """Return CIDEr-D of every sample, (B, K), less ``contrast`` times its mean for a few other videos.

        Augmented views of the same video do not count as other videos.
        """
        decoded = [self.vocabulary.decode(sample.tokens) for video in samples for sample in video]
        # words of another tokenizer than the scorer's are scored as text
        ours = self.recipe.data.tokenizer == "scorer"
        captions = decoded if ours else [" ".join(words) for words in decoded]
        count = len(captions) // len(ids)

        def scores(names: Sequence[str]) -> Tensor:
            videos = [name for name in names for _ in range(count)]
            return torch.tensor(self.scorer.score_captions(videos, captions)).view(len(names), -1)

        rewards, contrast = scores(ids), self.recipe.self_critical.contrast
        rotated = [[*ids[k:], *ids[:k]] for k in range(1, min(CONTRAST_VIDEOS + 1, len(ids)))]
        if not contrast or not rotated:
            return rewards
        foreign = torch.stack([scores(names) for names in rotated])
        differ = torch.tensor([[[a != b] for a, b in zip(ids, names, strict=True)] for names in rotated])
        return rewards - contrast * ((foreign * differ).sum(0) / differ.sum(0).clamp_min(1))


def _teacher(
    samples: Sequence[Sequence[Hypothesis]], max_length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B K, L) of teacher forcing; truncated captions have no end token."""
    rows = [sample.tokens for video in samples for sample in video]
    length = 1 + max(map(len, rows))
    inputs = [[BOS, *row] + [PAD] * (length - 1 - len(row)) for row in rows]
    ended = [[*row, EOS] if len(row) < max_length else row for row in rows]
    targets = [row + [PAD] * (length - len(row)) for row in ended]
    return torch.tensor(inputs, device=device), torch.tensor(targets, device=device)
