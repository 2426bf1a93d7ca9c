from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from slow_search import FUNCTION_WORDS, WORDS, Sentence, beam_search, by_teacher_forcing, repeats, videos
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
    found = decode(captioner, features, mask, DecodingOptions(beam_size=1, max_length=7))
    for row, hypotheses in enumerate(found):
        state, word, said = captioner.encode(features[row : row + 1], mask[row : row + 1]), BOS, []
        while len(said) < 7:
            logits, state, _ = captioner.step(torch.tensor([word]), state)
            logits[:, [PAD, BOS, UNK]] = -math.inf
            word = int(logits.argmax())
            if word == EOS:
                break
            said.append(word)
        assert [hypothesis.tokens for hypothesis in hypotheses] == [said]


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
def test_beams_are_those_of_the_definition(variant: str, constraints: dict[str, float]) -> None:
    captioner = make(variant, seed=4)
    captioner.function_words = FUNCTION_WORDS
    features, mask = videos(captioner, 3)
    options = DecodingOptions.from_dict({"beam_size": 3, "num_captions": 3, "max_length": 6, **constraints})
    for row, found in enumerate(decode(captioner, features, mask, options)):
        one = by_teacher_forcing(captioner, features[row : row + 1], mask[row : row + 1])
        for hypothesis, expected in zip(found, beam_search(one, options), strict=False):
            assert hypothesis.tokens == list(expected.tokens)
            assert hypothesis.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
            assert hypothesis.score == pytest.approx(expected.score(options.length_penalty), abs=1e-6)
        assert len(found) == 3


@lru_cache
def all_sentences(variant: str) -> list[Sentence]:
    """Every sentence of up to three words, for the first video."""
    captioner = make(variant, seed=1)
    features, mask = videos(captioner, 1)
    said = [s for length in range(4) for s in itertools.product(WORDS, repeat=length)]
    tokens = torch.tensor([[BOS, *s, *[PAD] * (3 - len(s))] for s in said])
    logprobs = captioner(features, mask, tokens).log_softmax(-1)
    return [
        Sentence(s, tuple(row[n, word].item() for n, word in enumerate((*s, EOS))))
        for s, row in zip(said, logprobs.detach(), strict=True)
    ]


@every_variant
@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("min_length, ngram", [(0, 0), (2, 0), (0, 1), (3, 2)])
def test_wide_beam_finds_the_best_of_all_sentences(
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
    (found,) = decode(captioner, *videos(captioner, 1), options)
    allowed = [
        s
        for s in all_sentences(variant)
        if len(s.tokens) >= min_length and not (ngram and repeats(s.tokens, ngram))
    ]
    best = sorted(allowed, key=lambda s: -s.score(penalty))[:3]
    assert [tuple(hypothesis.tokens) for hypothesis in found] == [s.tokens for s in best]
    assert [h.score for h in found] == pytest.approx([s.score(penalty) for s in best], abs=1e-6)


@pytest.mark.slow
@every_variant
def test_logprobs_are_those_of_teacher_forcing(variant: str) -> None:
    captioner = make(variant, seed=2)
    features, mask = videos(captioner, 4)
    options = DecodingOptions(beam_size=4, max_length=6, num_captions=4)
    for row, found in enumerate(decode(captioner, features, mask, options)):
        for hypothesis in found:
            said = [*hypothesis.tokens, EOS]
            forced = captioner(
                features[row : row + 1], mask[row : row + 1], torch.tensor([[BOS, *hypothesis.tokens]])
            )
            expected = forced[0].log_softmax(-1)[range(len(said)), said].tolist()
            assert hypothesis.logprobs == pytest.approx(expected, abs=1e-4)
            assert hypothesis.logprob == pytest.approx(sum(expected), abs=1e-4)
            assert hypothesis.score == pytest.approx(sum(expected) / len(said), abs=1e-4)
            assert not {PAD, BOS, EOS, UNK} & set(hypothesis.tokens)


@every_variant
def test_beams_look_at_one_copy_of_their_video(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captioner, step = make(variant, seed=3), type(make(variant)).step
    features, mask = videos(captioner, 3)
    beams = set()

    def counted(self: Captioner, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        sizes = {len(tensor) for tensor in (state.video | state.written).values()}
        assert len(sizes) == 1
        beams.add(len(tokens) / sizes.pop())
        return step(self, tokens, state)

    monkeypatch.setattr(type(captioner), "step", counted)
    decode(captioner, features, mask, DecodingOptions(beam_size=5, max_length=8))
    assert beams == {1, 5}


@pytest.mark.slow
@every_variant
@pytest.mark.parametrize("beams", [1, 5])
def test_batches_do_not_change_captions(variant: str, beams: int) -> None:
    captioner = make(variant, seed=3)
    features, mask = videos(captioner, 7)
    options = DecodingOptions(beam_size=beams, num_captions=beams, max_length=8)
    together = decode(captioner, features, mask, options)
    backwards = decode(captioner, features.flip(0), mask.flip(0), options)[::-1]
    for row in range(7):
        frames = features[row, mask[row]].unsqueeze(0)
        (alone,) = decode(captioner, frames, torch.ones(1, frames.shape[1], dtype=torch.bool), options)
        for other in (together[row], backwards[row]):
            assert [h.tokens for h in other] == [h.tokens for h in alone]
            for one, two in zip(other, alone, strict=True):
                assert one.logprobs == pytest.approx(two.logprobs, abs=1e-8)


@pytest.mark.slow
@every_variant
def test_traces_are_those_of_stepping_along_the_sentence(variant: str) -> None:
    captioner = make(variant)
    features, mask = videos(captioner, 3)
    options = DecodingOptions(beam_size=3, num_captions=2, max_length=5, trace=True)
    for row, found in enumerate(decode(captioner, features, mask, options)):
        for hypothesis in found:
            state = captioner.encode(features[row : row + 1], mask[row : row + 1])
            assert hypothesis.trace is not None
            for place, word in enumerate([BOS, *hypothesis.tokens]):
                _, state, trace = captioner.step(torch.tensor([word]), state)
                assert set(trace) == set(hypothesis.trace)
                for name, expected in trace.items():
                    given = hypothesis.trace[name]
                    assert len(given) == len(hypothesis.logprobs)
                    inside = tuple(slice(size) for size in expected[0].shape)
                    torch.testing.assert_close(given[place][inside], expected[0])
                    torch.testing.assert_close(given[place].sum(), expected[0].sum())  # zeros beyond


def test_traces_are_not_kept_unless_asked_for() -> None:
    captioner = make("m3")
    ((found,),) = decode(captioner, *videos(captioner, 1), DecodingOptions())
    assert found.trace is None


def test_traces_that_grow_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = make("soft-attention")
    step = captioner.step

    def growing(tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        logits, after, _ = step(tokens, state)
        return logits, after, {"said": torch.full((len(tokens), after.words), float(after.words))}

    monkeypatch.setattr(captioner, "step", growing)
    options = DecodingOptions(beam_size=2, min_length=2, max_length=3, trace=True)
    for (found,) in decode(captioner, *videos(captioner, 3), options):
        places = range(1, len(found.logprobs) + 1)
        expected = [[float(n)] * n + [0.0] * (len(found.trace["said"][0]) - n) for n in places]
        assert found.trace["said"].tolist() == expected


def test_a_large_vocabulary_is_searched_like_a_small_one() -> None:
    """Words in columns, with and without a rest, against the best of all sums."""
    torch.manual_seed(2)
    for size, count in [(5, 3), (256, 300), (300, 5), (512, 1), (1000, 7), (1000, 400)]:
        logits, totals = torch.randn(2 * 3, FIRST_WORD + size), torch.randn(2, 3)
        sums = totals.unsqueeze(-1) + logits.log_softmax(-1).unflatten(0, (2, 3))
        expected, place = sums[..., FIRST_WORD:].flatten(1).topk(count if size > 5 else 3)
        scores = NextTokens.of(logits, totals, banned=None, may_end=True, may_go_on=True)
        best, beams, words = best_words(scores, count)
        torch.testing.assert_close(best, expected)
        assert torch.equal(beams * size + words - FIRST_WORD, place)


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_words_that_would_repeat(ngram: int) -> None:
    torch.manual_seed(ngram)
    for length in range(9):
        said = torch.randint(4, 7, (20, length))
        banned = repeating_words(said, ngram)
        for row in range(20):
            expected = {w for w in range(4, 7) if repeats([*said[row].tolist(), w], ngram)}
            if repeats(said[row].tolist(), ngram):
                continue  # a search never comes here
            assert (set() if banned is None else set(banned[row].tolist()) - {PAD}) == expected


def test_a_sentence_with_no_word_left_ends() -> None:
    """Seven words, none twice: there is no eighth, whatever the minimum."""
    captioner = make("soft-attention")
    for options in ({"beam_size": 4}, {"temperature": 1.0}):
        limits = {"min_length": 9, "max_length": 12, "no_repeat_ngram": 1}
        found = decode(captioner, *videos(captioner, 3), DecodingOptions.from_dict({**limits, **options}))
        assert [sorted(hypotheses[0].tokens) for hypotheses in found] == [list(WORDS)] * 3


@pytest.mark.parametrize("how", [{"beam_size": 1}, {"beam_size": 4}, {"temperature": 1.5}])
def test_only_function_words_are_said_twice(how: dict[str, float]) -> None:
    captioner = make("soft-attention")
    captioner.function_words = FUNCTION_WORDS
    limits = {"min_length": 12, "max_length": 12, "no_repeat_words": True}
    for (hypothesis,) in decode(
        captioner, *videos(captioner, 5), DecodingOptions.from_dict({**limits, **how})
    ):
        said = [word for word in hypothesis.tokens if word not in FUNCTION_WORDS]
        assert len(hypothesis.tokens) == 12
        assert len(said) == len(set(said)) <= len(WORDS) - len(FUNCTION_WORDS)


def test_content_words_of_tokens_that_are_no_words() -> None:
    captioner = make("soft-attention")
    with pytest.raises(
        UsageError, match=r"no_repeat_words: the tokens .* are pieces .*; use no_repeat_ngram"
    ):
        decode(captioner, *videos(captioner, 1), DecodingOptions(no_repeat_words=True))


def test_no_videos_have_no_captions() -> None:
    captioner = make("soft-attention")
    features, mask = videos(captioner, 1)
    assert decode(captioner, features[:0], mask[:0], DecodingOptions()) == []


def test_probabilities_that_are_no_numbers() -> None:
    captioner = make("soft-attention")
    features, mask = videos(captioner, 2)
    features[1, 0] = math.nan
    with pytest.raises(CapvidError, match="no numbers"):
        decode(captioner, features, mask, DecodingOptions())


def test_a_state_in_beams_follows_its_beam() -> None:
    """Beams move what changes with the words and leave what belongs to the video."""
    first = State({"frames": torch.arange(3)}, {"h": torch.arange(3)}, written={"keys": torch.arange(3)})
    state = first.expand(2)
    assert state.memory["h"].tolist() == [0, 0, 1, 1, 2, 2]
    moved = replace(state, memory={"h": torch.arange(6)}).reorder(torch.tensor([1, 0, 3, 3, 4, 5]))
    assert moved.memory["h"].tolist() == [1, 0, 3, 3, 4, 5]
    for same in (state, moved):
        assert same.video["frames"].tolist() == same.written["keys"].tolist() == [0, 1, 2]
    kept = moved.select(torch.tensor([0, 2]), torch.tensor([1, 1, 5, 4]))
    assert kept.memory["h"].tolist() == [0, 0, 5, 4]
    assert kept.video["frames"].tolist() == kept.written["keys"].tolist() == [0, 2]
    repeated = first.repeat(2)
    for part in (repeated.video["frames"], repeated.memory["h"], repeated.written["keys"]):
        assert part.tolist() == [0, 0, 1, 1, 2, 2]
