"""Ranking by specificity, against a plain implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_decoding import beam_search, by_teacher_forcing, videos
from torch import Tensor
from variants import VARIANTS, all_real, make

from capvid.captioners.base import CAPTIONERS, Captioner
from capvid.decoding.beam_search import decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.decoding.rescoring import average_logprobs
from capvid.errors import UsageError
from capvid.text.vocabulary import BOS, EOS

SINGLE = [variant for variant, (name, _) in VARIANTS.items() if not CAPTIONERS[name].paragraphs]
REPRESENTATIVE = ["m3", "ham", "dense-lstm", "kv-memory-values"]
OPTIONS = DecodingOptions(beam_size=4, num_captions=4, max_length=6, specificity=0.9)


def make_fitted(variant: str, *, seed: int = 4, **options: Any) -> Captioner:
    """Return a captioner whose standardisation has a mean far from zero."""
    captioner = make(variant, seed=seed, standardise=True, **options)
    torch.manual_seed(seed)
    captioner.standardise.fit(2 * torch.randn(50, captioner.config.feature_width).double() + 1)
    return captioner


def average_video(captioner: Captioner) -> Tensor:
    frame = captioner.standardise.mean.view(1, 1, -1)
    if captioner.config.locations:
        frame = torch.stack([frame] * captioner.config.locations, 2)
    return frame


def stepwise_logprob(captioner: Captioner, features: Tensor, tokens: list[int]) -> float:
    total, prefix = 0.0, [BOS]
    for word in [*tokens, EOS]:
        logits = captioner(features, all_real(1, features.shape[1]), torch.tensor([prefix]))[0, -1]
        total += (logits - logits.exp().sum().log())[word].item()
        prefix.append(word)
    return total


@pytest.mark.parametrize("variant", SINGLE)
@torch.no_grad()
def test_average_video_is_one_frame_of_the_mean(variant: str) -> None:
    captioner = make_fitted(variant)
    sentences = [[5, 7, 9], [4], [], [5, 7], [5, 7, 9], [9, 4, 4, 10, 5, 6], [4, 7, 9]]
    expected = [stepwise_logprob(captioner, average_video(captioner), sentence) for sentence in sentences]
    actual = average_logprobs(captioner, captioner.standardise.mean, sentences)
    assert actual == pytest.approx(expected, abs=1e-9)
    assert average_logprobs(captioner, captioner.standardise.mean, []) == []


def test_few_words_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = make_fitted("m3")
    sentences = [[5, 7, 9], [4], [9, 4, 4, 10, 5, 6], [4, 7, 9], []]
    expected = average_logprobs(captioner, captioner.standardise.mean, sentences)
    read = captioner.teacher_forced
    sizes = []

    def counting_read(features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        sizes.append(tokens.numel())
        return read(features, mask, tokens)

    monkeypatch.setattr(captioner, "teacher_forced", counting_read)
    monkeypatch.setattr("capvid.decoding.rescoring.AVERAGE_WORDS", 14)
    assert average_logprobs(captioner, captioner.standardise.mean, sentences) == pytest.approx(expected)
    assert len(sizes) == 3 and max(sizes) <= 14


@pytest.mark.slow
@pytest.mark.parametrize("variant", REPRESENTATIVE)
@pytest.mark.parametrize("penalty", [1.0, 0.3])
@torch.no_grad()
def test_all_finished_sentences_are_ranked(variant: str, penalty: float) -> None:
    captioner = make_fitted(variant, seed=3)
    features, mask = videos(captioner, 5)
    options = replace(OPTIONS, length_penalty=penalty)
    changed_ranks = 0
    for row, hypotheses in enumerate(decode(captioner, features, mask, options)):
        frames, frame_mask = features[row : row + 1, mask[row]], all_real(1, int(mask[row].sum()))
        finished = beam_search(by_teacher_forcing(captioner, frames, frame_mask), options)
        assert len(finished) >= options.beam_size
        scores = {}
        for sentence in finished:
            tokens = list(sentence.tokens)
            own = stepwise_logprob(captioner, frames, tokens)
            average = stepwise_logprob(captioner, average_video(captioner), tokens)
            scores[sentence.tokens] = (own - 0.9 * average) / (len(tokens) + 1) ** penalty
        ranked = sorted(scores, key=lambda tokens: -scores[tokens])
        assert [tuple(hypothesis.tokens) for hypothesis in hypotheses] == ranked[:4]
        for hypothesis in hypotheses:
            assert hypothesis.score == pytest.approx(scores[tuple(hypothesis.tokens)], abs=1e-6)
            own = stepwise_logprob(captioner, frames, hypothesis.tokens)
            assert hypothesis.logprob == pytest.approx(own, abs=1e-6)
            assert len(hypothesis.logprobs) == len(hypothesis.tokens) + 1
        changed_ranks += ranked[0] != finished[0].tokens
        (best,) = decode(captioner, frames, frame_mask, replace(options, num_captions=1))
        assert best[0].tokens == hypotheses[0].tokens
    assert changed_ranks


@pytest.mark.parametrize("variant", REPRESENTATIVE)
def test_batches_do_not_change_captions(variant: str) -> None:
    captioner = make_fitted(variant, seed=3)
    features, mask = videos(captioner, 7)
    batched = decode(captioner, features, mask, OPTIONS)
    reversed_batch = decode(captioner, features.flip(0), mask.flip(0), OPTIONS)[::-1]
    for row in range(7):
        frames = features[row, mask[row]].unsqueeze(0)
        (single,) = decode(captioner, frames, all_real(1, frames.shape[1]), OPTIONS)
        for other in (batched[row], reversed_batch[row]):
            assert [h.tokens for h in other] == [h.tokens for h in single]
            assert [h.score for h in other] == pytest.approx([h.score for h in single], abs=1e-8)


@pytest.mark.parametrize("options", [{"beam_size": 1, "num_captions": 1}, {"temperature": 0.9}])
def test_specificity_is_ignored_in_greedy_search_and_sampling(options: dict[str, Any]) -> None:
    captioner = make_fitted("m3")
    features, mask = videos(captioner, 4)
    ranked = replace(OPTIONS, **options)
    assert decode(captioner, features, mask, ranked) == decode(
        captioner, features, mask, replace(ranked, specificity=0.0)
    )


@pytest.mark.parametrize("beam_size", [1, 4])
def test_captioners_without_a_feature_mean_are_refused(beam_size: int) -> None:
    options = DecodingOptions(beam_size=beam_size, specificity=0.5)
    captioner = make("m3")
    with pytest.raises(UsageError) as error:
        decode(captioner, *videos(captioner, 2), options)
    assert str(error.value) == (
        "specificity = 0.5: expected a captioner of single captions, trained with standardise = true, which "
        "holds the mean of the training features; leave specificity at 0 for this m3"
    )
    assert decode(captioner, *videos(captioner, 2), replace(options, temperature=1.0))
    for variant in ("mart", "vanilla-transformer"):
        captioner = make(variant, standardise=True)
        features, mask = videos(captioner, 2)
        with pytest.raises(UsageError, match=f"single captions.* for this {variant}"):
            decode_paragraphs(captioner, features[None], mask[None], torch.tensor([2]), options)
