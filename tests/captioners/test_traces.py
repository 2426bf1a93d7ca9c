"""Attention traces of captions, for every captioner."""

from __future__ import annotations

import pytest
import torch
from variants import VARIANTS, all_real, clip, make

from capvid.decoding.decoding_options import Hypothesis
from capvid.decoding.rescoring import rescore

FRAMES = 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_trace_weights_are_probabilities(variant: str) -> None:
    captioner = make(variant)
    features, mask = clip(captioner, 1, FRAMES), all_real(1, FRAMES)
    hypothesis = Hypothesis(tokens=[5, 6, 7], logprobs=[], score=0.0)
    ((caption,),) = rescore(captioner, features, mask, [[hypothesis]], trace=True)
    assert caption.trace is not None
    for name, rows in caption.trace.items():
        assert (rows >= 0).all() and (rows.sum(1) <= 1 + 1e-9).all(), name
    if variant == "ham-no-attention":
        assert not caption.trace
        return
    name = VARIANTS[variant][0]
    attention_sums = caption.trace["attention"].sum(1)
    if name == "m3":
        torch.testing.assert_close(
            attention_sums + caption.trace["blank"][:, 0], torch.ones_like(attention_sums)
        )
    elif name == "ham":  # nothing is attended to before the first word
        assert not attention_sums[0] and torch.allclose(
            attention_sums[1:], torch.ones_like(attention_sums[1:])
        )
    elif name in ("soft-attention", "dense-lstm", "kv-memory"):
        torch.testing.assert_close(attention_sums, torch.ones_like(attention_sums))
    else:  # a transformer also attends to markers and previous words
        assert ((attention_sums > 0) & (attention_sums < 1)).all()
