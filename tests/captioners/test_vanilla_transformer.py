"""The vanilla transformer against a plain re-computation of the paper's description."""

from __future__ import annotations

import torch
from transformer_reference import vanilla_transformer
from variants import clip, make, weights

SENTENCES = [[1, 7, 4], [1, 5, 9, 10]]
FRAMES = [4, 2]
WORDS = torch.tensor([[[1, 7, 4, 0], [1, 5, 9, 10]]])


def test_vanilla_transformer_over_two_segments() -> None:
    captioner = make("vanilla-transformer")
    features, mask = clip(captioner, 1, 2, 4), torch.arange(4) < torch.tensor(FRAMES).unsqueeze(-1)
    segments = [(features[0, n, : FRAMES[n]].tolist(), words) for n, words in enumerate(SENTENCES)]
    expected = vanilla_transformer(weights(captioner), segments, heads=2, layers=2)
    logprobs = captioner(features, mask.unsqueeze(0), WORDS).log_softmax(-1)
    for segment, wanted in enumerate(expected):
        found = logprobs[0, segment, : len(wanted)].tolist()
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_segments_know_nothing_of_each_other() -> None:
    captioner = make("vanilla-transformer")
    features, mask = clip(captioner, 1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)
    moved, words = features.clone(), WORDS.clone()
    moved[:, 0] += 1
    words[:, 0, 1] = 8
    before, after = captioner(features, mask, WORDS), captioner(moved, mask, words)
    torch.testing.assert_close(before[:, 1], after[:, 1])
    assert captioner.remember(captioner.encode(features[:, 0], mask[:, 0]), WORDS[:, 0]) == {}
