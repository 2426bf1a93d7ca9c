"""The vanilla transformer against a plain Python implementation of the paper's description."""

from __future__ import annotations

import pytest
import torch
from transformer_reference import masked_transformer, vanilla_transformer
from variants import VARIANTS, clip, make, weights

from capvid.captioners.base import build
from capvid.errors import UsageError

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


def test_authors_layout_matches_the_reference() -> None:
    """The frames of the second segment have a gap, and the first fills all places."""
    captioner = make("vanilla-transformer-authors", standardise=True, text_start=4)
    captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    features, mask = clip(captioner, 1, 2, 6), torch.arange(6) < torch.tensor(FRAMES).unsqueeze(-1)
    segments = [(features[0, n, : FRAMES[n]].tolist(), words) for n, words in enumerate(SENTENCES)]
    expected = masked_transformer(weights(captioner), segments, heads=2, layers=2, start=4)
    mask[1], features[0, 1, 3] = torch.tensor([True, False, False, True, False, False]), features[0, 1, 1]
    logprobs = captioner(features, mask.unsqueeze(0), WORDS).log_softmax(-1)
    for segment, expected_logprobs in enumerate(expected):
        actual = logprobs[0, segment, : len(expected_logprobs)].tolist()
        torch.testing.assert_close(actual, expected_logprobs, atol=1e-9, rtol=0)


def test_authors_layout_has_no_word_vectors() -> None:
    name, sizes = VARIANTS["vanilla-transformer-authors"]
    with pytest.raises(UsageError, match="word_vectors: the authors' masked transformer has no word"):
        build(name, {**sizes, "word_vectors": "glove.txt"})


def test_segments_are_independent() -> None:
    captioner = make("vanilla-transformer")
    features, mask = clip(captioner, 1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)
    changed_features, changed_words = features.clone(), WORDS.clone()
    changed_features[:, 0] += 1
    changed_words[:, 0, 1] = 8
    before, after = captioner(features, mask, WORDS), captioner(changed_features, mask, changed_words)
    torch.testing.assert_close(before[:, 1], after[:, 1])
    assert captioner.remember(captioner.encode(features[:, 0], mask[:, 0]), WORDS[:, 0]) == {}


def test_authors_layout_attends_to_real_frames_alone() -> None:
    captioner = make("vanilla-transformer-authors")
    state = captioner.encode(clip(captioner, 2, 3), torch.tensor([[True] * 3, [True, False, False]]))
    _, _, trace = captioner.step(torch.tensor([1, 1]), state)
    assert trace["attention"].shape == (2, 3)
    assert (trace["attention"] > 0).tolist() == [[True] * 3, [True, False, False]]
