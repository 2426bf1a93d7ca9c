"""The vanilla transformer against a plain Python implementation of the paper's description."""

from __future__ import annotations

import torch
from transformer_reference import vanilla_transformer
from variants import clip, make, weights

SENTENCES = [[1, 7, 4], [1, 5, 9, 10]]
FRAMES = [4, 2]
WORDS = torch.tensor([[[1, 7, 4, 0], [1, 5, 9, 10]]])


def test_two_segments_match_the_reference() -> None:
    captioner = make("vanilla-transformer")
    features, mask = clip(captioner, 1, 2, 4), torch.arange(4) < torch.tensor(FRAMES).unsqueeze(-1)
    segments = [
        (features[0, n, : FRAMES[n]].tolist(), changed_words) for n, changed_words in enumerate(SENTENCES)
    ]
    expected = vanilla_transformer(weights(captioner), segments, heads=2, layers=2)
    logprobs = captioner(features, mask.unsqueeze(0), WORDS).log_softmax(-1)
    for segment, expected_logprobs in enumerate(expected):
        actual = logprobs[0, segment, : len(expected_logprobs)].tolist()
        torch.testing.assert_close(actual, expected_logprobs, atol=1e-5, rtol=0)


def test_segments_are_independent() -> None:
    captioner = make("vanilla-transformer")
    features, mask = clip(captioner, 1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)
    changed_features, changed_words = features.clone(), WORDS.clone()
    changed_features[:, 0] += 1
    changed_words[:, 0, 1] = 8
    before, after = captioner(features, mask, WORDS), captioner(changed_features, mask, changed_words)
    torch.testing.assert_close(before[:, 1], after[:, 1])
    assert captioner.remember(captioner.encode(features[:, 0], mask[:, 0]), WORDS[:, 0]) == {}
