"""Token selectors: the best tokens of all beams, or sampled ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from capvid.decoding.decoding_options import DecodingOptions
from capvid.text.vocabulary import EOS, PAD, SPECIAL

IMPOSSIBLE = float("-inf")
FIRST_WORD = len(SPECIAL)  # words proper begin after padding, start, end and unknown
COLUMNS = 256
ROWS_IN_CACHE = 64


@dataclass(frozen=True)
class NextTokens:
    """Scores of the tokens that may follow each of k beams of B videos.

    Attributes:
        logits: (B, k, V) of all tokens; minus infinity for words that are not allowed.
        norm: (B, k) logarithm of the sum over the vocabulary: ``logits - norm`` are log-probabilities.
        ends: (B, k) log-probability of the end; minus infinity where the sentence may not end.
        totals: (B, k) log-probability of the beam so far.
        may_go_on: False at the last position, where only the end is allowed.
    """

    logits: Tensor
    norm: Tensor
    ends: Tensor
    totals: Tensor
    may_go_on: bool

    @classmethod
    def of(
        cls, logits: Tensor, totals: Tensor, *, banned: Tensor | None, may_end: bool, may_go_on: bool
    ) -> NextTokens:
        """Score the logits (B * k, V), which are overwritten, without the tokens ``banned`` (B * k, n)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if logits.device.type != "cpu" or len(logits) <= ROWS_IN_CACHE:
            norm = logits.logsumexp(-1)
        else:  # in blocks, so that the exponentials of a large vocabulary stay in the processor's cache
            norm = torch.cat([block.logsumexp(-1) for block in logits.split(ROWS_IN_CACHE)])
        ends = logits[:, EOS] - norm
        if banned is not None:
            logits.scatter_(1, banned, IMPOSSIBLE)
        if not may_end and may_go_on:  # the end stays possible where no word is left
            has_words = True if banned is None else logits[:, FIRST_WORD:].amax(-1) > IMPOSSIBLE
            ends = torch.where(torch.as_tensor(has_words, device=ends.device), IMPOSSIBLE, ends)
        shape = totals.shape
        return cls(logits.unflatten(0, shape), norm.view(shape), ends.view(shape), totals, may_go_on)

    def logprobs(self, beams: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probability of each of ``tokens`` (B, n) after each of ``beams`` (B, n)."""
        logits = self.logits.flatten(1).gather(1, beams * self.logits.shape[-1] + tokens)
        return logits - self.norm.gather(1, beams)


def repeated_words(past: Tensor, free: Tensor, options: DecodingOptions) -> Tensor | None:
    """Return the tokens (R, n), and padding, that may not follow ``past`` (R, L); None if all may.

    ``past`` lacks the start token; ``no_repeat_words`` lets the tokens ``free`` repeat.
    """
    banned = [repeating_words(past, options.no_repeat_ngram)] if options.no_repeat_ngram else []
    if options.no_repeat_words and past.shape[1]:
        banned.append(past.masked_fill(torch.isin(past, free), PAD))
    tokens = [part for part in banned if part is not None]
    return torch.cat(tokens, 1) if tokens else None


def repeating_words(past: Tensor, ngram: int) -> Tensor | None:
    """Return the tokens (R, n), and padding, that would repeat an n-gram of ``past`` (R, L).

    None if the sentences are too short to repeat one.
    """
    if past.shape[1] < ngram:
        return None
    windows = past.unfold(1, ngram, 1)  # (R, n, ngram)
    prefix = past[:, past.shape[1] - ngram + 1 :].unsqueeze(1)  # (R, 1, ngram - 1)
    repeated = (windows[..., :-1] == prefix).all(-1)
    return windows[..., -1].where(repeated, PAD)


@dataclass(frozen=True)
class Selection:
    """The beams that go on, best first, and the sentences that end.

    Attributes:
        source: (B, K) beam that each one continues.
        words: (B, K) its next word.
        logprobs: (B, K) log-probability of that word.
        totals: (B, K) log-probability of the beam; minus infinity where there is none.
        end_source: (B, E) beam that ends.
        end_logprobs: (B, E) log-probability of the end.
        end_totals: (B, E) log-probability of the sentence; minus infinity where there is none.
    """

    source: Tensor
    words: Tensor
    logprobs: Tensor
    totals: Tensor
    end_source: Tensor
    end_logprobs: Tensor
    end_totals: Tensor


@dataclass(frozen=True)
class BeamSelector:
    """Beam search: the ``width`` most probable continuations; ends count if they are among the best."""

    width: int

    def __call__(self, scores: NextTokens, *, position: int, rows: Tensor) -> Selection:
        """Select word number ``position`` (from 0) of the videos number ``rows`` (B,)."""
        if scores.may_go_on:
            totals, source, words = best_words(scores, self.width)
        else:
            totals = scores.totals.new_empty(len(rows), 0)
            source = words = totals.long()
        beams = scores.totals.shape[1]
        candidates = torch.cat([scores.totals + scores.ends, totals], -1)  # (B, k + K)
        best, rank = candidates.topk(min(self.width, candidates.shape[1]), -1)
        end_source = rank.clamp_max(beams - 1)
        return Selection(
            source=source,
            words=words,
            logprobs=scores.logprobs(source, words),
            totals=totals,
            end_source=end_source,
            end_logprobs=scores.ends.gather(1, end_source),
            end_totals=best.masked_fill(rank >= beams, IMPOSSIBLE),
        )


def best_words(scores: NextTokens, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return totals, beams and words (B, K) of the ``count`` most probable continuations, best first.

    K is less than ``count`` if there are no more. The log-probabilities of the whole vocabulary are never
    formed: the words are dealt out into columns, and the best ``count`` words are in the columns of the
    ``count`` greatest maxima.
    """
    words, totals = scores.logits[..., FIRST_WORD:], scores.totals.unsqueeze(-1)
    if count == words.shape[1] == 1:  # greedy search
        logits, tokens = words.squeeze(1).max(-1, keepdim=True)
        return scores.totals + (logits - scores.norm), torch.zeros_like(tokens), tokens + FIRST_WORD
    size = words.shape[-1]
    columns = min(COLUMNS, size)
    deep, rest = divmod(size, columns)
    maxima = words[..., : deep * columns].unflatten(-1, (deep, columns)).amax(-2)  # (B, k, C)
    if rest:
        maxima[..., :rest] = torch.maximum(maxima[..., :rest], words[..., deep * columns :])
    scored = (totals + (maxima - scores.norm.unsqueeze(-1))).flatten(1)  # (B, k C)
    column = scored.topk(min(count, scored.shape[1]), -1).indices.unsqueeze(-1)  # (B, C', 1)

    tokens = column % columns + torch.arange(FIRST_WORD, FIRST_WORD + size, columns, device=words.device)
    inside = tokens < FIRST_WORD + size  # (B, C', words of a column)
    beams = (column // columns).expand_as(tokens).flatten(1)
    tokens = tokens.clamp_max(FIRST_WORD + size - 1).flatten(1)
    values = scores.totals.gather(1, beams) + scores.logprobs(beams, tokens)
    values = values.masked_fill(~inside.flatten(1), IMPOSSIBLE)
    best, chosen = values.topk(min(count, values.shape[1]), -1)  # (B, K)
    return best, beams.gather(1, chosen), tokens.gather(1, chosen)


def uniform_numbers(options: DecodingOptions) -> Tensor:
    """Return numbers in [0, 1), (samples, L + 1), that depend on seed, sample number and position alone."""
    samples = [
        np.random.default_rng([options.seed, sample]).random(options.max_length + 1, dtype=np.float32)
        for sample in range(options.num_captions)
    ]
    return torch.from_numpy(np.stack(samples))


class Sampler:
    """Sampling by inverse transform: where a uniform number falls in the cumulative probabilities.

    A sample does not depend on the other sentences of its batch.

    Args:
        options: temperature, nucleus and seed.
        videos: number of videos; sentence ``video * num_captions + sample`` is a sample of a video.
        device: device of the captioner.
    """

    width = 1

    def __init__(self, options: DecodingOptions, *, videos: int, device: torch.device) -> None:
        self.temperature = options.temperature
        self.top_p = options.top_p
        self.uniform = uniform_numbers(options).to(device).repeat(videos, 1)  # (N, L + 1)

    def __call__(self, scores: NextTokens, *, position: int, rows: Tensor) -> Selection:
        """Sample word number ``position`` (from 0) of the sentences number ``rows`` (N,)."""
        logits = scores.logits[:, 0, FIRST_WORD:]
        end = torch.where(scores.ends > IMPOSSIBLE, scores.logits[:, 0, EOS : EOS + 1], IMPOSSIBLE)
        if not scores.may_go_on:
            logits = logits[:, :0]
        allowed = torch.cat([end, logits], -1)  # (N, 1 + V'): the end, then the words proper
        weights, order = (allowed / self.temperature).softmax(-1), None
        if self.top_p < 1:
            descending, order = weights.sort(dim=-1, descending=True, stable=True)
            before = descending.cumsum(-1) - descending
            weights = descending.masked_fill(before >= self.top_p, 0.0)
            weights[:, 0] = descending[:, 0]
        # The first index at which the cumulative weight exceeds the uniform number's share of the sum.
        sums = weights.cumsum(-1)
        uniform = self.uniform[rows, position].unsqueeze(-1)  # (N, 1)
        index = torch.searchsorted(sums, uniform.to(sums.dtype) * sums[:, -1:], right=True)
        index = torch.where(index < weights.shape[1], index, weights.argmax(-1, keepdim=True))  # rounded up
        chosen = index if order is None else order.gather(1, index)  # (N, 1)
        ended = chosen == 0
        words = torch.where(ended, EOS, chosen + FIRST_WORD - 1)
        source = torch.zeros_like(words)
        logprobs = scores.logprobs(source, words)
        totals = scores.totals + logprobs
        return Selection(
            source=source,
            words=words,
            logprobs=logprobs,
            totals=totals.masked_fill(ended, IMPOSSIBLE),
            end_source=source,
            end_logprobs=logprobs,
            end_totals=totals.masked_fill(~ended, IMPOSSIBLE),
        )
