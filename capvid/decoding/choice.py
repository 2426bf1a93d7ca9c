"""Which words come next: what all ways of choosing have in common, and the best words of all beams.

Notation for tensor shapes: B videos, k beams before a word and K after it, V vocabulary, L words so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from capvid.captioners.layers import at_least_float32
from capvid.text.vocabulary import EOS, SPECIAL

IMPOSSIBLE = float("-inf")
FIRST_WORD = len(SPECIAL)  # words that are said begin after padding, start, end and unknown
COLUMNS = 256
ROWS_IN_CACHE = 64


def _logsumexp(logits: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials (R,) of ``logits`` (R, V); a processor does it part by part.

    So the exponentials of a large vocabulary stay in its cache instead of taking fresh memory at every word.
    """
    if logits.device.type != "cpu" or len(logits) <= ROWS_IN_CACHE:
        return logits.logsumexp(-1)
    return torch.cat([part.logsumexp(-1) for part in logits.split(ROWS_IN_CACHE)])


@dataclass(frozen=True)
class Outlook:
    """What may follow every beam.

    Attributes:
        logits: (B, k, V) of all tokens; words that may not be said are at minus infinity.
        norm: (B, k) logarithm of the sum over the vocabulary: ``logits - norm`` are log-probabilities.
        ends: (B, k) log-probability of the end; minus infinity where the sentence may not end.
        totals: (B, k) log-probability of the beam so far.
        may_go_on: False at the last place, where nothing but the end can be said.
    """

    logits: Tensor
    norm: Tensor
    ends: Tensor
    totals: Tensor
    may_go_on: bool

    @property
    def words(self) -> Tensor:
        """(B, k, V') logits of the words proper, from :data:`FIRST_WORD` on."""
        return self.logits[..., FIRST_WORD:]

    def logprobs(self, beams: Tensor, tokens: Tensor) -> Tensor:
        """Log-probability of each of ``tokens`` (B, n) after each of ``beams`` (B, n)."""
        logits = self.logits.flatten(1).gather(1, beams * self.logits.shape[-1] + tokens)
        return logits - self.norm.gather(1, beams)

    @classmethod
    def of(
        cls, logits: Tensor, totals: Tensor, *, banned: Tensor | None, may_end: bool, may_go_on: bool
    ) -> Outlook:
        """Of the logits (B * k, V), which are overwritten, and the tokens ``banned`` (B * k, n) if any."""
        logits = at_least_float32(logits)
        norm = _logsumexp(logits)
        ends = logits[:, EOS] - norm
        if banned is not None:
            logits.scatter_(1, banned, IMPOSSIBLE)
        if not may_end and may_go_on:
            has_words = True if banned is None else logits[:, FIRST_WORD:].amax(-1) > IMPOSSIBLE
            ends = torch.where(torch.as_tensor(has_words, device=ends.device), IMPOSSIBLE, ends)
        shape = totals.shape
        return cls(logits.unflatten(0, shape), norm.view(shape), ends.view(shape), totals, may_go_on)


@dataclass(frozen=True)
class Choice:
    """The beams that go on, best first, and the sentences that end.

    Attributes:
        source: (B, K) the beam that each one continues.
        words: (B, K) what it says.
        logprobs: (B, K) log-probability of that word.
        totals: (B, K) of the beam; minus infinity where there is none.
        end_source: (B, E) the beam that ends.
        end_logprobs: (B, E) log-probability of the end.
        end_totals: (B, E) of the sentence; minus infinity where there is none.
    """

    source: Tensor
    words: Tensor
    logprobs: Tensor
    totals: Tensor
    end_source: Tensor
    end_logprobs: Tensor
    end_totals: Tensor


class Chooser(Protocol):
    """Chooses the next words of all beams."""

    width: int

    def __call__(self, outlook: Outlook, *, place: int, rows: Tensor) -> Choice:
        """Choose word number ``place`` (from 0) of the videos number ``rows`` (B,)."""


class BestOfBeams:
    """Beam search: the ``width`` most probable continuations; ends count if they are among the best."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, outlook: Outlook, *, place: int, rows: Tensor) -> Choice:
        """Choose word number ``place`` (from 0) of the videos number ``rows`` (B,)."""
        if outlook.may_go_on:
            going, source, words = best_words(outlook, self.width)
        else:
            going = outlook.totals.new_empty(len(rows), 0)
            source = words = going.long()
        beams = outlook.totals.shape[1]
        candidates = torch.cat([outlook.totals + outlook.ends, going], -1)  # (B, k + K)
        best, rank = candidates.topk(min(self.width, candidates.shape[1]), -1)
        end_source = rank.clamp_max(beams - 1)
        return Choice(
            source=source,
            words=words,
            logprobs=outlook.logprobs(source, words),
            totals=going,
            end_source=end_source,
            end_logprobs=outlook.ends.gather(1, end_source),
            end_totals=best.masked_fill(rank >= beams, IMPOSSIBLE),
        )


def best_words(outlook: Outlook, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` most probable continuations of each video, best first.

    Without forming the log-probabilities of the whole vocabulary: the words are dealt out into columns; the
    best ``count`` words are in the columns of the ``count`` greatest maxima.

    Returns:
        totals, beams and words, each (B, K); fewer than ``count`` if there are no more.
    """
    words, totals = outlook.words, outlook.totals.unsqueeze(-1)
    if count == words.shape[1] == 1:  # greedy search
        logits, tokens = words.squeeze(1).max(-1, keepdim=True)
        return outlook.totals + (logits - outlook.norm), torch.zeros_like(tokens), tokens + FIRST_WORD
    size = words.shape[-1]
    columns = min(COLUMNS, size)
    deep, rest = divmod(size, columns)
    maxima = words[..., : deep * columns].unflatten(-1, (deep, columns)).amax(-2)  # (B, k, C)
    if rest:
        maxima[..., :rest] = torch.maximum(maxima[..., :rest], words[..., deep * columns :])
    scored = (totals + (maxima - outlook.norm.unsqueeze(-1))).flatten(1)  # (B, k C)
    column = scored.topk(min(count, scored.shape[1]), -1).indices.unsqueeze(-1)  # (B, C', 1)

    tokens = column % columns + torch.arange(FIRST_WORD, FIRST_WORD + size, columns, device=words.device)
    inside = tokens < FIRST_WORD + size  # (B, C', words of a column)
    beams = (column // columns).expand_as(tokens).flatten(1)
    tokens = tokens.clamp_max(FIRST_WORD + size - 1).flatten(1)
    values = outlook.totals.gather(1, beams) + outlook.logprobs(beams, tokens)
    values = values.masked_fill(~inside.flatten(1), IMPOSSIBLE)
    best, chosen = values.topk(min(count, values.shape[1]), -1)  # (B, K)
    return best, beams.gather(1, chosen), tokens.gather(1, chosen)
