"""Scheduled sampling: learning to go on from the captioner's own words instead of the right ones.

Bengio et al., Scheduled Sampling for Sequence Prediction with Recurrent Neural Networks, NeurIPS 2015
(arXiv:1506.03099), with all words drawn at once from what the right ones make likely (Duckworth et al.,
Parallel Scheduled Sampling, arXiv:1906.04331), so that it costs one more forward pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from capvid.captioners import Captioner
from capvid.data.batches import Batch
from capvid.text.vocabulary import PAD, SPECIAL
from capvid.training.optimise import teacher_forced


@torch.no_grad()
def with_own_words(captioner: Captioner, batch: Batch, rate: float) -> Batch:
    """The batch with input words replaced, each at ``rate``, by words that ``captioner`` draws.

    The start of a sentence stays, and so do the targets.
    """
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
