from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from reference_decoding import (
    FUNCTION_WORDS,
    WORDS,
    Sentence,
    beam_search,
    by_teacher_forcing,
    repeats,
    videos,
)
from torch import Tensor
from variants import VARIANTS, make

from capvid.captioners.base import Captioner, State, Trace
from capvid.decoding.beam_search import decode
from capvid.decoding.decoding_options import DecodingOptions
from capvid.decoding.token_selection import FIRST_WORD, NextTokens, best_words, repeating_words
from capvid.errors import CapvidError, UsageError
from capvid.text.vocabulary import BOS, EOS, PAD, UNK

every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
def test_one_beam_is_greedy_search(variant: str) -> None:
    captioner = make(variant)
    features, mask = videos(captioner, 5)
    beams = decode(captioner, features, mask, DecodingOptions(beam_size=1, max_length=7))
    for row, hypotheses in enumerate(beams):
        state, word, tokens = captioner.encode(features[row : row + 1], mask[row : row + 1]), BOS, []
        while len(tokens) < 7:
            logits, state, _ = captioner.step(torch.tensor([word]), state)
            logits[:, [PAD, BOS, UNK]] = -math.inf
            word = int(logits.argmax())
            if word == EOS:
                break
            tokens.append(word)
        assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens]


@every_variant
@pytest.mark.parametrize(
    "constraints",
    [
        {},
        {"min_length": 4},
        {"no_repeat_ngram": 2, "min_length": 3},
        {"length_penalty": 0.0},
        {"no_repeat_words": True, "no_repeat_ngram": 3, "min_length": 5},
    ],
)
def test_beam_search_matches_the_reference(variant: str, constraints: dict[str, float]) -> None:
    captioner = make(variant, seed=4)
    captioner.function_words = FUNCTION_WORDS
    features, mask = videos(captioner, 3)
    options = DecodingOptions.from_dict({"beam_size": 3, "num_captions": 3, "max_length": 6, **constraints})
    for row, hypotheses in enumerate(decode(captioner, features, mask, options)):
        next_word = by_teacher_forcing(captioner, features[row : row + 1], mask[row : row + 1])
        for hypothesis, expected in zip(hypotheses, beam_search(next_word, options), strict=False):
            assert hypothesis.tokens == list(expected.tokens)
            assert hypothesis.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
            assert hypothesis.score == pytest.approx(expected.score(options.length_penalty), abs=1e-6)
        assert len(hypotheses) == 3


@lru_cache
def all_sentences(variant: str) -> list[Sentence]:
    """Return every sentence of up to three words, scored for the first video."""
    captioner = make(variant, seed=1)
    features, mask = videos(captioner, 1)
    sentences = [words for length in range(4) for words in itertools.product(WORDS, repeat=length)]
    tokens = torch.tensor([[BOS, *words, *[PAD] * (3 - len(words))] for words in sentences])
    logprobs = captioner(features, mask, tokens).log_softmax(-1)
    return [
        Sentence(words, tuple(row[n, word].item() for n, word in enumerate((*words, EOS))))
        for words, row in zip(sentences, logprobs.detach(), strict=True)
    ]


@every_variant
@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("min_length, ngram", [(0, 0), (2, 0), (0, 1), (3, 2)])
def test_wide_beam_finds_the_best_sentences(
    variant: str, penalty: float, min_length: int, ngram: int
) -> None:
    captioner = make(variant, seed=1)
    options = DecodingOptions(
        beam_size=400,
        num_captions=3,
        max_length=3,
        length_penalty=penalty,
        min_length=min_length,
        no_repeat_ngram=ngram,
    )
    (hypotheses,) = decode(captioner, *videos(captioner, 1), options)
    allowed = [
        sentence
        for sentence in all_sentences(variant)
        if len(sentence.tokens) >= min_length and not (ngram and repeats(sentence.tokens, ngram))
    ]
    best = sorted(allowed, key=lambda sentence: -sentence.score(penalty))[:3]
    assert [tuple(hypothesis.tokens) for hypothesis in hypotheses] == [sentence.tokens for sentence in best]
    assert [h.score for h in hypotheses] == pytest.approx(
        [sentence.score(penalty) for sentence in best], abs=1e-6
    )


@pytest.mark.slow
@every_variant
def test_logprobs_equal_teacher_forcing(variant: str) -> None:
    captioner = make(variant, seed=2)
    features, mask = videos(captioner, 4)
    options = DecodingOptions(beam_size=4, max_length=6, num_captions=4)
    for row, hypotheses in enumerate(decode(captioner, features, mask, options)):
        for hypothesis in hypotheses:
            tokens = [*hypothesis.tokens, EOS]
            forced = captioner(
                features[row : row + 1], mask[row : row + 1], torch.tensor([[BOS, *hypothesis.tokens]])
            )
            expected = forced[0].log_softmax(-1)[range(len(tokens)), tokens].tolist()
            assert hypothesis.logprobs == pytest.approx(expected, abs=1e-4)
            assert hypothesis.logprob == pytest.approx(sum(expected), abs=1e-4)
            assert hypothesis.score == pytest.approx(sum(expected) / len(tokens), abs=1e-4)
            assert not {PAD, BOS, EOS, UNK} & set(hypothesis.tokens)


@every_variant
def test_beams_share_one_copy_of_their_video(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captioner, step = make(variant, seed=3), type(make(variant)).step
    features, mask = videos(captioner, 3)
    beams = set()

    def counting_step(self: Captioner, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        sizes = {len(tensor) for tensor in (state.video | state.written).values()}
        assert len(sizes) == 1
        beams.add(len(tokens) / sizes.pop())
        return step(self, tokens, state)

    monkeypatch.setattr(type(captioner), "step", counting_step)
    decode(captioner, features, mask, DecodingOptions(beam_size=5, max_length=8))
    assert beams == {1, 5}


@pytest.mark.slow
@every_variant
@pytest.mark.parametrize("beams", [1, 5])
def test_batches_do_not_change_captions(variant: str, beams: int) -> None:
    captioner = make(variant, seed=3)
    features, mask = videos(captioner, 7)
    options = DecodingOptions(beam_size=beams, num_captions=beams, max_length=8)
    batched = decode(captioner, features, mask, options)
    reversed_batch = decode(captioner, features.flip(0), mask.flip(0), options)[::-1]
    for row in range(7):
        frames = features[row, mask[row]].unsqueeze(0)
        (single,) = decode(captioner, frames, torch.ones(1, frames.shape[1], dtype=torch.bool), options)
        for other in (batched[row], reversed_batch[row]):
            assert [h.tokens for h in other] == [h.tokens for h in single]
            for hypothesis, expected in zip(other, single, strict=True):
                assert hypothesis.logprobs == pytest.approx(expected.logprobs, abs=1e-8)


def test_best_words_of_large_vocabularies() -> None:
    """Compare with a plain top-k, for vocabularies of different sizes."""
    torch.manual_seed(2)
    for size, count in [(5, 3), (256, 300), (300, 5), (512, 1), (1000, 7), (1000, 400)]:
        logits, totals = torch.randn(2 * 3, FIRST_WORD + size), torch.randn(2, 3)
        sums = totals.unsqueeze(-1) + logits.log_softmax(-1).unflatten(0, (2, 3))
        expected, indices = sums[..., FIRST_WORD:].flatten(1).topk(count if size > 5 else 3)
        scores = NextTokens.of(logits, totals, banned=None, may_end=True, may_go_on=True)
        best, beams, words = best_words(scores, count)
        torch.testing.assert_close(best, expected)
        assert torch.equal(beams * size + words - FIRST_WORD, indices)


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_repeating_words_are_found(ngram: int) -> None:
    torch.manual_seed(ngram)
    for length in range(9):
        prefixes = torch.randint(4, 7, (20, length))
        banned = repeating_words(prefixes, ngram)
        for row in range(20):
            expected = {w for w in range(4, 7) if repeats([*prefixes[row].tolist(), w], ngram)}
            if repeats(prefixes[row].tolist(), ngram):
                continue  # the search never creates such sentences
            assert (set() if banned is None else set(banned[row].tolist()) - {PAD}) == expected


def test_sentence_ends_when_no_word_is_left() -> None:
    """Without repetition there are only seven words, so the minimum length cannot be reached."""
    captioner = make("soft-attention")
    for options in ({"beam_size": 4}, {"temperature": 1.0}):
        limits = {"min_length": 9, "max_length": 12, "no_repeat_ngram": 1}
        captions = decode(captioner, *videos(captioner, 3), DecodingOptions.from_dict({**limits, **options}))
        assert [sorted(hypotheses[0].tokens) for hypotheses in captions] == [list(WORDS)] * 3


@pytest.mark.parametrize("options", [{"beam_size": 1}, {"beam_size": 4}, {"temperature": 1.5}])
def test_only_function_words_may_repeat(options: dict[str, float]) -> None:
    captioner = make("soft-attention")
    captioner.function_words = FUNCTION_WORDS
    limits = {"min_length": 12, "max_length": 12, "no_repeat_words": True}
    for (hypothesis,) in decode(
        captioner, *videos(captioner, 5), DecodingOptions.from_dict({**limits, **options})
    ):
        content_words = [word for word in hypothesis.tokens if word not in FUNCTION_WORDS]
        assert len(hypothesis.tokens) == 12
        assert len(content_words) == len(set(content_words)) <= len(WORDS) - len(FUNCTION_WORDS)


def test_no_repeat_words_needs_whole_words() -> None:
    captioner = make("soft-attention")
    with pytest.raises(
        UsageError, match=r"no_repeat_words: the tokens .* are pieces .*; use no_repeat_ngram"
    ):
        decode(captioner, *videos(captioner, 1), DecodingOptions(no_repeat_words=True))


def test_empty_batch_has_no_captions() -> None:
    captioner = make("soft-attention")
    features, mask = videos(captioner, 1)
    assert decode(captioner, features[:0], mask[:0], DecodingOptions()) == []


def test_nan_probabilities_are_an_error() -> None:
    captioner = make("soft-attention")
    features, mask = videos(captioner, 2)
    features[1, 0] = math.nan
    with pytest.raises(CapvidError, match="no numbers"):
        decode(captioner, features, mask, DecodingOptions())


def test_reordering_moves_only_the_memory() -> None:
    """Reordering beams moves the memory and leaves the tensors of the video in place."""
    state = State({"frames": torch.arange(3)}, {"h": torch.arange(3)}, written={"keys": torch.arange(3)})
    expanded = state.expand(2)
    assert expanded.memory["h"].tolist() == [0, 0, 1, 1, 2, 2]
    moved = replace(expanded, memory={"h": torch.arange(6)}).reorder(torch.tensor([1, 0, 3, 3, 4, 5]))
    assert moved.memory["h"].tolist() == [1, 0, 3, 3, 4, 5]
    for unmoved in (expanded, moved):
        assert unmoved.video["frames"].tolist() == unmoved.written["keys"].tolist() == [0, 1, 2]
    selected = moved.select(torch.tensor([0, 2]), torch.tensor([1, 1, 5, 4]))
    assert selected.memory["h"].tolist() == [0, 0, 5, 4]
    assert selected.video["frames"].tolist() == selected.written["keys"].tolist() == [0, 2]
    repeated = state.repeat(2)
    for tensor in (repeated.video["frames"], repeated.memory["h"], repeated.written["keys"]):
        assert tensor.tolist() == [0, 0, 1, 1, 2, 2]
