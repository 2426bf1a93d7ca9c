"""Sampling: words drawn at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from slow_search import by_teacher_forcing, videos
from torch import Tensor
from variants import VARIANTS, make

from capvid.captioners.base import Captioner
from capvid.decoding.beam_search import decode
from capvid.decoding.decoding_options import DecodingOptions
from capvid.decoding.token_selection import uniform_numbers
from capvid.text.vocabulary import BOS, EOS, PAD, UNK

every_variant = pytest.mark.parametrize("variant", VARIANTS)
NEVER = [PAD, BOS, UNK]


def drawn_from(logprobs: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Probabilities (V,) that words are drawn with."""
    weights = (logprobs / temperature).exp().index_fill(0, torch.tensor(NEVER), 0.0)
    weights = weights / weights.sum()
    nucleus, mass = [], 0.0
    for word in weights.argsort(descending=True).tolist():
        nucleus.append(word)
        mass += float(weights[word])
        if mass >= top_p:
            break
    kept = torch.zeros_like(weights)
    kept[nucleus] = weights[nucleus]
    return kept / kept.sum()


def first_words(captioner: Captioner, features: Tensor, mask: Tensor, options: DecodingOptions) -> Tensor:
    """How often each token is the first of video 0's samples (V,)."""
    found = decode(captioner, features, mask, options)[0]
    said = torch.tensor([hypothesis.tokens[0] if hypothesis.tokens else EOS for hypothesis in found])
    return said.bincount(minlength=11)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["soft-attention", "m3", "mart"])
@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (2.5, 1.0), (0.6, 1.0), (2.0, 0.7)])
def test_first_words_are_as_frequent_as_they_are_probable(
    variant: str, temperature: float, top_p: float
) -> None:
    captioner = make(variant)
    features, mask = videos(captioner, 1)
    options = DecodingOptions(num_captions=4000, max_length=1, temperature=temperature, top_p=top_p, seed=3)
    counts = first_words(captioner, features, mask, options)
    logprobs = by_teacher_forcing(captioner, features, mask)([[]])[0].detach()
    expected = 4000 * drawn_from(logprobs, temperature, top_p)
    assert not counts[expected == 0].any()
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 27.9  # of at most 8 tokens: once in a thousand


def test_seeds_draw_as_samples_do() -> None:
    captioner = make("soft-attention")
    features, mask = videos(captioner, 1)
    options = DecodingOptions(num_captions=1, max_length=1, temperature=1.5)
    counts = sum(first_words(captioner, features, mask, replace(options, seed=seed)) for seed in range(200))
    expected = 200 * drawn_from(by_teacher_forcing(captioner, features, mask)([[]])[0].detach(), 1.5)
    assert (counts - expected).abs().max() < 4 * expected.max().sqrt()


@every_variant
def test_samples_are_those_of_the_captioner(variant: str) -> None:
    """Their log-probabilities are the captioner's own; no word lies outside the nucleus; best first."""
    captioner = make(variant)
    features, mask = videos(captioner, 2)
    options = DecodingOptions(num_captions=4, max_length=5, temperature=1.7, top_p=0.8, min_length=2)
    for row, found in enumerate(decode(captioner, features, mask, options)):
        next_word = by_teacher_forcing(captioner, features[row : row + 1], mask[row : row + 1])
        assert len(found) == 4
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        for hypothesis in found:
            assert 2 <= len(hypothesis.tokens) <= 5
            said = [*hypothesis.tokens, EOS]
            for place, word in enumerate(said):
                logprobs = next_word([said[:place]])[0].detach()
                assert hypothesis.logprobs[place] == pytest.approx(float(logprobs[word]), abs=1e-6)
                if place < 2:
                    logprobs[EOS] = -torch.inf
                assert place == 5 or drawn_from(logprobs, 1.7, 0.8)[word] > 0


@every_variant
def test_samples_do_not_depend_on_the_batch(variant: str) -> None:
    captioner = make(variant)
    features, mask = videos(captioner, 5)
    options = DecodingOptions(num_captions=3, max_length=6, temperature=1.2, top_p=0.95, no_repeat_ngram=2)
    together = decode(captioner, features, mask, options)
    assert together == decode(captioner, features, mask, options)
    backwards = decode(captioner, features.flip(0), mask.flip(0), options)[::-1]
    for row in range(5):
        (alone,) = decode(captioner, features[row : row + 1], mask[row : row + 1], options)
        said = [hypothesis.tokens for hypothesis in alone]
        assert [h.tokens for h in together[row]] == [h.tokens for h in backwards[row]] == said
    other = decode(captioner, features, mask, replace(options, seed=1))
    assert [h.tokens for found in other for h in found] != [h.tokens for found in together for h in found]


def test_more_samples_keep_the_first_ones() -> None:
    captioner = make("m3")
    features, mask = videos(captioner, 2)
    few = decode(captioner, features, mask, DecodingOptions(num_captions=2, temperature=1.0, max_length=6))
    many = decode(captioner, features, mask, DecodingOptions(num_captions=9, temperature=1.0, max_length=6))
    for some, all_of_them in zip(few, many, strict=True):
        assert {tuple(h.tokens) for h in some} <= {tuple(h.tokens) for h in all_of_them}


def test_uniform_numbers_belong_to_seed_sample_and_place() -> None:
    few = uniform_numbers(DecodingOptions(num_captions=3, temperature=1.0, max_length=4, seed=7))
    many = uniform_numbers(DecodingOptions(num_captions=900, temperature=1.0, max_length=30, seed=7))
    assert torch.equal(few, many[:3, :5])
    assert float(many.min()) >= 0 and float(many.max()) < 1
    assert float(many.mean()) == pytest.approx(0.5, abs=0.01)
    assert many.unique().numel() > 0.99 * many.numel()


def test_traces_of_samples() -> None:
    captioner = make("soft-attention")
    features, mask = videos(captioner, 2)
    options = DecodingOptions(num_captions=3, temperature=1.0, max_length=4, trace=True)
    for row, found in enumerate(decode(captioner, features, mask, options)):
        for hypothesis in found:
            state = captioner.encode(features[row : row + 1], mask[row : row + 1])
            for place, word in enumerate([BOS, *hypothesis.tokens]):
                _, state, trace = captioner.step(torch.tensor([word]), state)
                torch.testing.assert_close(hypothesis.trace["attention"][place], trace["attention"][0])
