"""Transformer-XL against a plain Python implementation of the paper's equations."""

from __future__ import annotations

import pytest
import torch
from transformer_reference import authors_transformer_xl, transformer_xl
from variants import clip, make, weights

from capvid.errors import UsageError

SENTENCES = [[1, 7, 4], [1, 5, 9, 10], [1, 8]]
FRAMES = [4, 2, 3]
WORDS = torch.tensor([[[1, 7, 4, 0], [1, 5, 9, 10], [1, 8, 0, 0]]])


@pytest.mark.parametrize("variant", ["transformer-xl", "transformer-xl-gradient"])
def test_three_segments_match_the_reference(variant: str) -> None:
    captioner = make(variant)
    features, mask = clip(captioner, 1, 3, 4), torch.arange(4) < torch.tensor(FRAMES).unsqueeze(-1)
    segments = [(features[0, n, : FRAMES[n]].tolist(), words) for n, words in enumerate(SENTENCES)]
    expected = transformer_xl(weights(captioner), segments, heads=2, layers=2)
    logprobs = captioner(features, mask.unsqueeze(0), WORDS).log_softmax(-1)
    for segment, expected_logprobs in enumerate(expected):
        actual = logprobs[0, segment, : len(expected_logprobs)].tolist()
        torch.testing.assert_close(actual, expected_logprobs, atol=1e-5, rtol=0)


def test_authors_layout_matches_the_reference() -> None:
    """The second sentence leaves no room for its end, and the frames of the third have a gap."""
    captioner = make("transformer-xl-authors", standardise=True)
    captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    features, mask = clip(captioner, 1, 3, 4), torch.arange(4) < torch.tensor(FRAMES).unsqueeze(-1)
    segments = [(features[0, n, : FRAMES[n]].tolist(), words) for n, words in enumerate(SENTENCES)]
    expected = authors_transformer_xl(weights(captioner), segments, heads=2, layers=2, start=9, length=4)
    mask[2], features[0, 2, 3] = torch.tensor([True, False, True, True]), features[0, 2, 2]
    features[0, 2, 2] = features[0, 2, 1]
    logprobs = captioner(features, mask.unsqueeze(0), WORDS).log_softmax(-1)
    for segment, expected_logprobs in enumerate(expected):
        actual = logprobs[0, segment, : len(expected_logprobs)].tolist()
        torch.testing.assert_close(actual, expected_logprobs, atol=1e-9, rtol=0)


def test_more_frames_than_the_authors_layout_has_places_for() -> None:
    captioner = make("transformer-xl-authors")
    with pytest.raises(UsageError, match="8 frames: at most 7 fit the authors' layout"):
        captioner(clip(captioner, 1, 8), torch.ones(1, 8, dtype=torch.bool), WORDS[:, 0])


@pytest.mark.parametrize(("variant", "flows"), [("transformer-xl", False), ("transformer-xl-gradient", True)])
def test_gradients_cross_segments_only_if_enabled(variant: str, flows: bool) -> None:
    captioner = make(variant)
    features = clip(captioner, 1, 3, 4).requires_grad_()
    captioner(features, torch.ones(1, 3, 4, dtype=torch.bool), WORDS)[:, 2, :, 5].sum().backward()
    assert bool(features.grad[:, 1].any()) == flows
    assert features.grad[:, 2].any()


def test_second_segment_depends_on_the_first() -> None:
    captioner = make("transformer-xl")
    features, mask = clip(captioner, 1, 3, 4), torch.ones(1, 3, 4, dtype=torch.bool)
    changed = features.clone()
    changed[:, 0] += 1
    assert not torch.allclose(captioner(features, mask, WORDS)[:, 1], captioner(changed, mask, WORDS)[:, 1])


def test_order_is_known_by_relative_positions_alone() -> None:
    captioner = make("transformer-xl")
    features, mask = clip(captioner, 1, 4), torch.ones(1, 4, dtype=torch.bool)
    reversed_logits = captioner(features.flip(1), mask, WORDS[:, 1])
    assert not torch.allclose(captioner(features, mask, WORDS[:, 1]), reversed_logits)
    with torch.no_grad():
        for layer in captioner.layers:
            layer.attention.relative.weight.zero_()
    reversed_logits = captioner(features.flip(1), mask, WORDS[:, 1])
    torch.testing.assert_close(captioner(features, mask, WORDS[:, 1]), reversed_logits)
