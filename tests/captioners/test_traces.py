"""What captions say about where the captioner looked, for every captioner."""

from __future__ import annotations

import pytest
import torch
from variants import VARIANTS, all_real, clip, make

from capvid.decoding.decoding_options import Hypothesis
from capvid.decoding.rescoring import rescore

FRAMES = 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_shares(variant: str) -> None:
    captioner = make(variant)
    features, mask = clip(captioner, 1, FRAMES), all_real(1, FRAMES)
    said = Hypothesis(tokens=[5, 6, 7], logprobs=[], score=0.0)
    ((caption,),) = rescore(captioner, features, mask, [[said]], trace=True)
    assert caption.trace is not None
    for name, rows in caption.trace.items():
        assert (rows >= 0).all() and (rows.sum(1) <= 1 + 1e-9).all(), name
    name = VARIANTS[variant][0]
    shares = caption.trace["attention"].sum(1)
    if name == "m3":
        torch.testing.assert_close(shares + caption.trace["blank"][:, 0], torch.ones_like(shares))
    elif name == "ham":  # nothing is attended to before the first word
        assert not shares[0] and torch.allclose(shares[1:], torch.ones_like(shares[1:]))
    elif name in ("soft-attention", "dense-lstm", "kv-memory"):
        torch.testing.assert_close(shares, torch.ones_like(shares))
    else:  # a transformer looks at the marks and the words before, too
        assert ((shares > 0) & (shares < 1)).all()
