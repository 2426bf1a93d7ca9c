"""Videos without frames have finite logits and do not affect the rest of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from variants import VARIANTS, clip, make, tokens

from capvid.captioners.base import Captioner
from capvid.captioners.layers import masked_softmax, pad_frames
from capvid.decoding.beam_search import decode
from capvid.decoding.decoding_options import DecodingOptions

WORDS = tokens([1, 5, 6], [1, 7, 8])


def step_through(captioner: Captioner, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the logits (B, L, V) of single steps and the attention (B, T) of the last one, if any."""
    state = captioner.encode(features, mask)
    logits = []
    for column in WORDS.unbind(1):
        step, state, trace = captioner.step(column, state)
        logits.append(step)
    return torch.stack(logits, 1), trace.get("attention")


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_without_any_frames(variant: str) -> None:
    captioner = make(variant)
    features, mask = clip(captioner, 2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert captioner(features, mask, WORDS).isfinite().all()
    assert step_through(captioner, features, mask)[0].isfinite().all()
    assert all(hypotheses for hypotheses in decode(captioner, features, mask, DecodingOptions(beam_size=2)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_with_one_video_without_frames(variant: str) -> None:
    captioner = make(variant)
    video = clip(captioner, 3)
    empty, empty_mask = pad_frames([video, video[:0]])
    other, other_mask = pad_frames([video, video[:2]])
    expected = captioner(other, other_mask, WORDS)[0]
    logits = captioner(empty, empty_mask, WORDS)
    assert logits.isfinite().all()
    assert torch.equal(logits[0], expected)
    logits, attention = step_through(captioner, empty, empty_mask)
    assert logits.isfinite().all()
    assert torch.equal(logits[0], step_through(captioner, other, other_mask)[0][0])
    assert (attention is None) == (variant == "ham-no-attention")
    if attention is not None:
        assert attention[0].sum() > 0
        assert not attention[1].any()
    captioner(empty, empty_mask, WORDS).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in captioner.parameters())


def test_fully_masked_softmax_is_zero() -> None:
    scores = torch.randn(3, 4)
    mask = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    weights = masked_softmax(scores, mask)
    assert torch.equal(weights[:2], scores.masked_fill(~mask, float("-inf")).softmax(-1)[:2])
    assert not weights[2].any()
