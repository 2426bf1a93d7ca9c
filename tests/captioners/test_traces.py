"""What captions say about where the captioner looked, for every captioner."""

from __future__ import annotations

import pytest
import torch
from variants import VARIANTS, all_real, clip, make

from capvid.decoding import DecodingOptions, Hypothesis, decode
from capvid.decoding.follow import follow
from capvid.text.vocabulary import BOS, EOS

FRAMES = 5
WIDTHS = {  # of what M3 and MART of the variants say besides
    "blank": 1,
    "write_text": 4,
    "read_attention": 4,
    "write_visual": 4,
    "read_decoder": 4,
    "memory": 2,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_traces_are_those_of_the_words(variant: str) -> None:
    """A row for each word and one for the end, as stepping from word to word gives them."""
    captioner = make(variant)
    features, mask = clip(captioner, 1, FRAMES), all_real(1, FRAMES)
    options = DecodingOptions(beam_size=3, num_captions=2, min_length=2, max_length=6)
    (found,) = decode(captioner, features, mask, options)
    for caption in follow(captioner, captioner.encode(features, mask), found, trace=True):
        assert caption.trace is not None
        length = len(caption.tokens) + 1
        widths = {"attention": FRAMES, "states": length, **WIDTHS}
        state = captioner.encode(features, mask)
        for place, word in enumerate([BOS, *caption.tokens]):
            _, state, seen = captioner.step(torch.tensor([word]), state)
            assert set(seen) == set(caption.trace)
            for name, rows in caption.trace.items():
                assert rows.shape == (length, widths[name])
                wanted = seen[name].flatten()
                torch.testing.assert_close(rows[place, : len(wanted)], wanted)
                assert not rows[place, len(wanted) :].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_shares(variant: str) -> None:
    captioner = make(variant)
    features, mask = clip(captioner, 1, FRAMES), all_real(1, FRAMES)
    said = Hypothesis(tokens=[5, 6, 7], logprobs=[], score=0.0)
    (caption,) = follow(captioner, captioner.encode(features, mask), [said], trace=True)
    assert caption.trace is not None and caption.tokens == [5, 6, 7] and EOS not in caption.tokens
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
