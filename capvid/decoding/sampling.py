"""Words drawn at random, from all of the vocabulary or its likeliest part.

Notation for tensor shapes: N sentences, each of one beam, V vocabulary, L words.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from capvid.decoding.choice import FIRST_WORD, IMPOSSIBLE, Choice, Outlook
from capvid.decoding.options import DecodingOptions
from capvid.text.vocabulary import EOS


def uniform_numbers(options: DecodingOptions) -> Tensor:
    """(samples, L + 1) numbers from 0 to below 1: of the seed, the sample's number and the place only."""
    places = options.max_length + 1
    drawn = [
        np.random.default_rng([options.seed, sample]).random(places, dtype=np.float32)
        for sample in range(options.num_captions)
    ]
    return torch.from_numpy(np.stack(drawn))


class Drawn:
    """Sampling by inverse transform: where a uniform number falls in the summed probabilities.

    Neither the other sentences nor their order have a part in it, so that a sample is the same in any batch.

    Args:
        options: temperature, nucleus and seed.
        videos: number of videos; sentence ``video * num_captions + sample`` is a sample of a video.
        device: where the captioner computes.
    """

    width = 1

    def __init__(self, options: DecodingOptions, *, videos: int, device: torch.device) -> None:
        self.temperature = options.temperature
        self.top_p = options.top_p
        self.uniform = uniform_numbers(options).to(device).repeat(videos, 1)  # (N, L + 1)

    def __call__(self, outlook: Outlook, *, place: int, rows: Tensor) -> Choice:
        """Draw word number ``place`` (from 0) of the sentences number ``rows`` (N,)."""
        logits = outlook.logits[:, 0, FIRST_WORD:]
        end = torch.where(outlook.ends > IMPOSSIBLE, outlook.logits[:, 0, EOS : EOS + 1], IMPOSSIBLE)
        if not outlook.may_go_on:
            logits = logits[:, :0]
        allowed = torch.cat([end, logits], -1)  # (N, 1 + V'): the end, then the words proper
        chosen = self._draw(allowed / self.temperature, self.uniform[rows, place].unsqueeze(-1))  # (N, 1)
        ended = chosen == 0
        words = torch.where(ended, EOS, chosen + FIRST_WORD - 1)
        source = torch.zeros_like(words)
        logprobs = outlook.logprobs(source, words)
        totals = outlook.totals + logprobs
        return Choice(
            source=source,
            words=words,
            logprobs=logprobs,
            totals=totals.masked_fill(ended, IMPOSSIBLE),
            end_source=source,
            end_logprobs=logprobs,
            end_totals=totals.masked_fill(~ended, IMPOSSIBLE),
        )

    def _draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """One index (N, 1) of each row of ``logits`` (N, V), by ``uniform`` (N, 1)."""
        probabilities = logits.softmax(-1)
        if self.top_p == 1:
            return _inverse(probabilities, uniform)
        descending, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = descending.cumsum(-1) - descending
        nucleus = descending.masked_fill(before >= self.top_p, 0.0)
        nucleus[:, 0] = descending[:, 0]
        return order.gather(1, _inverse(nucleus, uniform))


def _inverse(weights: Tensor, uniform: Tensor) -> Tensor:
    """First index (N, 1) at which the sum of ``weights`` (N, V) exceeds ``uniform`` (N, 1) of the whole."""
    sums = weights.cumsum(-1)
    index = torch.searchsorted(sums, uniform.to(sums.dtype) * sums[:, -1:], right=True)
    return torch.where(index < weights.shape[1], index, weights.argmax(-1, keepdim=True))  # if rounded up
