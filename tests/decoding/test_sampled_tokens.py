"""Sampling of captions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference_decoding import by_teacher_forcing, videos
from torch import Tensor
from variants import VARIANTS, make

from capvid.captioners.base import Captioner
from capvid.decoding.beam_search import decode
from capvid.decoding.decoding_options import DecodingOptions
from capvid.decoding.token_selection import FIRST_WORD, uniform_numbers
from capvid.text.vocabulary import BOS, EOS, PAD, UNK

every_variant = pytest.mark.parametrize("variant", VARIANTS)
NEVER = [PAD, BOS, UNK]


def sampling_distribution(logprobs: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Return the probabilities (V,) with which words are sampled."""
    weights = (logprobs / temperature).exp().index_fill(0, torch.tensor(NEVER), 0.0)
    weights = weights / weights.sum()
    nucleus, mass = [], 0.0
    for word in weights.argsort(descending=True).tolist():
        nucleus.append(word)
        mass += float(weights[word])
        if mass >= top_p:
            break
    truncated = torch.zeros_like(weights)
    truncated[nucleus] = weights[nucleus]
    return truncated / truncated.sum()


def first_word_counts(
    captioner: Captioner, features: Tensor, mask: Tensor, options: DecodingOptions
) -> Tensor:
    """Return how often each token comes first in the samples of video 0 (V,)."""
    samples = decode(captioner, features, mask, options)[0]
    tokens = torch.tensor([hypothesis.tokens[0] if hypothesis.tokens else EOS for hypothesis in samples])
    return tokens.bincount(minlength=11)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["soft-attention", "m3", "mart"])
@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (2.5, 1.0), (0.6, 1.0), (2.0, 0.7)])
def test_first_word_frequencies_match_probabilities(variant: str, temperature: float, top_p: float) -> None:
    captioner = make(variant)
    features, mask = videos(captioner, 1)
    options = DecodingOptions(num_captions=4000, max_length=1, temperature=temperature, top_p=top_p, seed=3)
    counts = first_word_counts(captioner, features, mask, options)
    logprobs = by_teacher_forcing(captioner, features, mask)([[]])[0].detach()
    expected = 4000 * sampling_distribution(logprobs, temperature, top_p)
    assert not counts[expected == 0].any()
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 27.9  # p < 0.001 for at most 8 tokens


def test_seeds_sample_the_same_distribution() -> None:
    captioner = make("soft-attention")
    features, mask = videos(captioner, 1)
    options = DecodingOptions(num_captions=1, max_length=1, temperature=1.5)
    counts = sum(
        first_word_counts(captioner, features, mask, replace(options, seed=seed)) for seed in range(200)
    )
    expected = 200 * sampling_distribution(
        by_teacher_forcing(captioner, features, mask)([[]])[0].detach(), 1.5
    )
    assert (counts - expected).abs().max() < 4 * expected.max().sqrt()


@every_variant
def test_samples_match_the_captioner(variant: str) -> None:
    """Samples have the captioner's log-probabilities, stay within the nucleus, and are sorted."""
    captioner = make(variant)
    features, mask = videos(captioner, 2)
    options = DecodingOptions(num_captions=4, max_length=5, temperature=1.7, top_p=0.8, min_length=2)
    for row, samples in enumerate(decode(captioner, features, mask, options)):
        next_word = by_teacher_forcing(captioner, features[row : row + 1], mask[row : row + 1])
        assert len(samples) == 4
        assert [h.score for h in samples] == sorted((h.score for h in samples), reverse=True)
        for hypothesis in samples:
            assert 2 <= len(hypothesis.tokens) <= 5
            tokens = [*hypothesis.tokens, EOS]
            for position, word in enumerate(tokens):
                logprobs = next_word([tokens[:position]])[0].detach()
                assert hypothesis.logprobs[position] == pytest.approx(float(logprobs[word]), abs=1e-6)
                if position < 2:
                    logprobs[EOS] = -torch.inf
                assert position == 5 or sampling_distribution(logprobs, 1.7, 0.8)[word] > 0


@every_variant
def test_samples_do_not_depend_on_the_batch(variant: str) -> None:
    captioner = make(variant)
    features, mask = videos(captioner, 5)
    options = DecodingOptions(num_captions=3, max_length=6, temperature=1.2, top_p=0.95, no_repeat_ngram=2)
    batched = decode(captioner, features, mask, options)
    assert batched == decode(captioner, features, mask, options)
    reversed_batch = decode(captioner, features.flip(0), mask.flip(0), options)[::-1]
    for row in range(5):
        (single,) = decode(captioner, features[row : row + 1], mask[row : row + 1], options)
        tokens = [hypothesis.tokens for hypothesis in single]
        assert [h.tokens for h in batched[row]] == [h.tokens for h in reversed_batch[row]] == tokens
    other_seed = decode(captioner, features, mask, replace(options, seed=1))
    assert [h.tokens for samples in other_seed for h in samples] != [
        h.tokens for samples in batched for h in samples
    ]


def test_more_samples_include_the_first_ones() -> None:
    captioner = make("m3")
    features, mask = videos(captioner, 2)
    few = decode(captioner, features, mask, DecodingOptions(num_captions=2, temperature=1.0, max_length=6))
    many = decode(captioner, features, mask, DecodingOptions(num_captions=9, temperature=1.0, max_length=6))
    for few_samples, many_samples in zip(few, many, strict=True):
        assert {tuple(h.tokens) for h in few_samples} <= {tuple(h.tokens) for h in many_samples}


def test_uniform_numbers_depend_on_seed_sample_and_position() -> None:
    few = uniform_numbers(DecodingOptions(num_captions=3, temperature=1.0, max_length=4, seed=7))
    many = uniform_numbers(DecodingOptions(num_captions=900, temperature=1.0, max_length=30, seed=7))
    assert torch.equal(few, many[:3, :5])
    assert float(many.min()) >= 0 and float(many.max()) < 1
    assert float(many.mean()) == pytest.approx(0.5, abs=0.01)
    assert many.unique().numel() > 0.99 * many.numel()


def test_samples_are_where_the_numbers_fall_among_the_words() -> None:
    """The end comes first, then the words in the order of the vocabulary."""
    captioner = make("m3")
    features, mask = videos(captioner, 1)
    options = DecodingOptions(num_captions=30, max_length=1, temperature=1.5, seed=5)
    probabilities = sampling_distribution(
        by_teacher_forcing(captioner, features, mask)([[]])[0].detach(), 1.5
    )
    order = [EOS, *range(FIRST_WORD, len(probabilities))]
    sums = probabilities[order].cumsum(0)
    expected = [order[int((sums <= number).sum())] for number in uniform_numbers(options)[:, 0]]
    samples = decode(captioner, features, mask, options)[0]
    words = [hypothesis.tokens[0] if hypothesis.tokens else EOS for hypothesis in samples]
    assert sorted(words) == sorted(expected) and len(set(words)) > 2
