"""What a captioner learns from a batch: the loss, scheduled sampling and own memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners.base import Captioner, ParagraphCaptioner
from capvid.datasets.batches import Batch, in_segments
from capvid.decoding.beam_search import as_tokens, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.text.vocabulary import PAD, SPECIAL


class Objective(nn.Module):
    """Negative log-likelihood of a batch's words, ends included (M3, Eq. 24, without its regularisation).

    A module of its own, so that several processes can share it. Padding skips the vocabulary layer.

    Args:
        captioner: the captioner.
        label_smoothing: probability spread over the vocabulary.
        temperature: divisor of the logits.
    """

    def __init__(self, captioner: Captioner, label_smoothing: float, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.captioner = captioner
        self.label_smoothing = label_smoothing
        self.temperature = temperature

    def forward(
        self,
        features: Tensor,
        mask: Tensor,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        remembered: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over all words, weighted by ``weights`` in the shape of ``targets``.

        ``remembered`` is for captioners of paragraphs (:attr:`capvid.datasets.batches.Batch.remembered`).
        """
        z = teacher_forced(self.captioner, features, mask, inputs, remembered)  # (B, L, Z)
        spoken = targets != PAD
        logits = self.captioner.logits(z[spoken]).float() / self.temperature  # (words, V)
        if weights is None:
            return F.cross_entropy(
                logits, targets[spoken], label_smoothing=self.label_smoothing, reduction="sum"
            )
        return (F.cross_entropy(logits, targets[spoken], reduction="none") * weights[spoken]).sum()


def teacher_forced(
    captioner: Captioner, features: Tensor, mask: Tensor, inputs: Tensor, remembered: Tensor | None
) -> Tensor:
    """Return the input of the vocabulary layer after each of the words ``inputs``, (..., L, Z)."""
    if remembered is not None and isinstance(captioner, ParagraphCaptioner):
        return captioner.teacher_forced(features, mask, inputs, remembered)
    return captioner.teacher_forced(features, mask, inputs)


@dataclass(frozen=True)
class Lessons:
    """A process's micro-batches of a batch.

    Attributes:
        parts: micro-batches, each with the weights of its words, if they have any.
        divisor: divisor of the losses of all micro-batches of all processes.
        count: words, or samples, of the batch: the divisor of the logged sum.
        shown: the sum that is logged, where it is not that of the losses.
    """

    parts: Sequence[tuple[Batch, Tensor | None]]
    divisor: float
    count: int
    shown: Tensor | None = None


def spoken(parts: Sequence[Batch], accelerator: Accelerator) -> int:
    """Return the number of words, ends included, in the micro-batches of all processes; at least 1."""
    mine = torch.stack([(part.targets != PAD).sum() for part in parts]).sum()
    return max(1, int(accelerator.reduce(mine)))


@torch.no_grad()
def with_own_words(captioner: Captioner, batch: Batch, rate: float) -> Batch:
    """Return the batch with input words, but the first, replaced at ``rate`` by samples of ``captioner``."""
    z = teacher_forced(captioner, batch.features, batch.mask, batch.inputs, batch.remembered)  # (..., L, Z)
    words = batch.inputs[..., 1:]
    places = (words != PAD) & (torch.rand(words.shape, device=words.device) < rate)  # (..., L - 1)
    logits = captioner.logits(z[..., :-1, :][places]).float()  # (N, V)
    if not len(logits):
        return batch
    logits[:, : len(SPECIAL)] = -torch.inf
    drawn = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
    inputs = batch.inputs.clone()
    inputs[..., 1:][places] = drawn
    return replace(batch, inputs=inputs)


REPEATED = 3  # words in a row that are said again


def with_own_memory(captioner: Captioner, batch: Batch, *, max_length: int) -> Batch:
    """Return the batch with the greedy sentences of ``captioner`` as its memory.

    The targets are those that repeat the least of them. Captioners without memory keep their batch.
    """
    if not isinstance(captioner, ParagraphCaptioner) or not captioner.recurrent:
        return batch
    followed = (batch.inputs != PAD).any(-1).sum(1) - 1  # (B,) segments that another one follows
    if not (followed > 0).any() or not (batch.targets != PAD).any():
        return batch
    greedy = DecodingOptions(max_length=max_length)
    found = decode_paragraphs(captioner, batch.features[:, :-1], batch.mask[:, :-1], followed, greedy)
    captioner.train()
    said = [[hypotheses[0].tokens for hypotheses in video] for video in found]
    segments, device = batch.inputs.shape[1], batch.inputs.device
    taught = [fresh(paragraphs, own) for paragraphs, own in zip(batch.paragraphs, said, strict=True)]
    inputs, targets = in_segments(taught, segments)
    padded = [own[k] if k < len(own) else [] for own in said for k in range(segments - 1)]
    remembered = as_tokens(padded, device).unflatten(0, (len(said), segments - 1))
    return replace(batch, inputs=inputs.to(device), targets=targets.to(device), remembered=remembered)


def fresh(paragraphs: Sequence[Sequence[list[int]]], said: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each segment's first sentence among those that repeat the least of what was ``said``."""
    chosen: list[list[int]] = []
    before: set[tuple[int, ...]] = set()
    for segment, sentences in enumerate(zip(*paragraphs, strict=True)):
        chosen.append(min(sentences, key=lambda sentence: len(before & _grams(sentence))))
        before |= _grams(said[segment]) if segment < len(said) else set()
    return chosen


def _grams(sentence: Sequence[int]) -> set[tuple[int, ...]]:
    return set(zip(*(sentence[first:] for first in range(REPEATED)), strict=False))
