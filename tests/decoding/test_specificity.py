"""Ranking by what a sentence says of its own video, against plain loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from slow_search import beam_search, by_teacher_forcing, videos
from torch import Tensor
from variants import VARIANTS, all_real, make

from capvid.captioners.base import CAPTIONERS, Captioner
from capvid.decoding.beam_search import decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.decoding.rescoring import average_logprobs
from capvid.errors import UsageError
from capvid.text.vocabulary import BOS, EOS

SINGLE = [variant for variant, (name, _) in VARIANTS.items() if not CAPTIONERS[name].paragraphs]
SOME = ["m3", "ham", "dense-lstm", "kv-memory-values"]
OPTIONS = DecodingOptions(beam_size=4, num_captions=4, max_length=6, specificity=0.9)


def fitted(variant: str, *, seed: int = 4, **options: Any) -> Captioner:
    """A captioner that standardises by features far from zero."""
    captioner = make(variant, seed=seed, standardise=True, **options)
    torch.manual_seed(seed)
    captioner.standardise.fit(2 * torch.randn(50, captioner.config.feature_width).double() + 1)
    return captioner


def average_video(captioner: Captioner) -> Tensor:
    frame = captioner.standardise.mean.view(1, 1, -1)
    if captioner.config.locations:
        frame = torch.stack([frame] * captioner.config.locations, 2)
    return frame


def word_by_word(captioner: Captioner, features: Tensor, tokens: list[int]) -> float:
    total, said = 0.0, [BOS]
    for word in [*tokens, EOS]:
        logits = captioner(features, all_real(1, features.shape[1]), torch.tensor([said]))[0, -1]
        total += (logits - logits.exp().sum().log())[word].item()
        said.append(word)
    return total


@pytest.mark.parametrize("variant", SINGLE)
@torch.no_grad()
def test_the_average_video_is_one_frame_of_the_mean(variant: str) -> None:
    captioner = fitted(variant)
    sentences = [[5, 7, 9], [4], [], [5, 7], [5, 7, 9], [9, 4, 4, 10, 5, 6], [4, 7, 9]]
    expected = [word_by_word(captioner, average_video(captioner), said) for said in sentences]
    found = average_logprobs(captioner, captioner.standardise.mean, sentences)
    assert found == pytest.approx(expected, abs=1e-9)
    assert average_logprobs(captioner, captioner.standardise.mean, []) == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("penalty", [1.0, 0.3])
@torch.no_grad()
def test_all_that_the_search_finishes_is_ranked(variant: str, penalty: float) -> None:
    captioner = fitted(variant, seed=3)
    features, mask = videos(captioner, 5)
    options = replace(OPTIONS, length_penalty=penalty)
    moved = 0
    for row, found in enumerate(decode(captioner, features, mask, options)):
        one, its_mask = features[row : row + 1, mask[row]], all_real(1, int(mask[row].sum()))
        finished = beam_search(by_teacher_forcing(captioner, one, its_mask), options)
        assert len(finished) >= options.beam_size
        scores = {}
        for sentence in finished:
            tokens = list(sentence.tokens)
            own = word_by_word(captioner, one, tokens)
            average = word_by_word(captioner, average_video(captioner), tokens)
            scores[sentence.tokens] = (own - 0.9 * average) / (len(tokens) + 1) ** penalty
        ranked = sorted(scores, key=lambda tokens: -scores[tokens])
        assert [tuple(hypothesis.tokens) for hypothesis in found] == ranked[:4]
        for hypothesis in found:
            assert hypothesis.score == pytest.approx(scores[tuple(hypothesis.tokens)], abs=1e-6)
            own = word_by_word(captioner, one, hypothesis.tokens)
            assert hypothesis.logprob == pytest.approx(own, abs=1e-6)
            assert len(hypothesis.logprobs) == len(hypothesis.tokens) + 1
        moved += ranked[0] != finished[0].tokens
        (best,) = decode(captioner, one, its_mask, replace(options, num_captions=1))
        assert best[0].tokens == found[0].tokens
    assert moved


def test_traces_go_with_their_sentences() -> None:
    captioner = fitted("m3")
    features, mask = videos(captioner, 3)
    for row, found in enumerate(decode(captioner, features, mask, replace(OPTIONS, trace=True))):
        for hypothesis in found:
            state = captioner.encode(features[row : row + 1], mask[row : row + 1])
            assert hypothesis.trace is not None
            for place, word in enumerate([BOS, *hypothesis.tokens]):
                _, state, trace = captioner.step(torch.tensor([word]), state)
                torch.testing.assert_close(hypothesis.trace["attention"][place], trace["attention"][0])


@pytest.mark.parametrize("variant", SOME)
def test_batches_do_not_change_captions(variant: str) -> None:
    captioner = fitted(variant, seed=3)
    features, mask = videos(captioner, 7)
    together = decode(captioner, features, mask, OPTIONS)
    backwards = decode(captioner, features.flip(0), mask.flip(0), OPTIONS)[::-1]
    for row in range(7):
        frames = features[row, mask[row]].unsqueeze(0)
        (alone,) = decode(captioner, frames, all_real(1, frames.shape[1]), OPTIONS)
        for other in (together[row], backwards[row]):
            assert [h.tokens for h in other] == [h.tokens for h in alone]
            assert [h.score for h in other] == pytest.approx([h.score for h in alone], abs=1e-8)


@pytest.mark.parametrize("options", [{"beam_size": 1, "num_captions": 1}, {"temperature": 0.9}])
def test_there_is_nothing_to_rank_by_greedy_search_or_when_sampling(options: dict[str, Any]) -> None:
    captioner = fitted("m3")
    features, mask = videos(captioner, 4)
    ranked = replace(OPTIONS, **options)
    assert decode(captioner, features, mask, ranked) == decode(
        captioner, features, mask, replace(ranked, specificity=0.0)
    )


@pytest.mark.parametrize("beam_size", [1, 4])
def test_captioners_without_the_mean_are_refused(beam_size: int) -> None:
    options = DecodingOptions(beam_size=beam_size, specificity=0.5)
    captioner = make("m3")
    with pytest.raises(UsageError) as caught:
        decode(captioner, *videos(captioner, 2), options)
    assert str(caught.value) == (
        "specificity = 0.5: expected a captioner of single captions, trained with standardise = true, which "
        "holds the mean of the training features; leave specificity at 0 for this m3"
    )
    assert decode(captioner, *videos(captioner, 2), replace(options, temperature=1.0))
    for variant in ("mart", "vanilla-transformer"):
        captioner = make(variant, standardise=True)
        features, mask = videos(captioner, 2)
        with pytest.raises(UsageError, match=f"single captions.* for this {variant}"):
            decode_paragraphs(captioner, features[None], mask[None], torch.tensor([2]), options)
