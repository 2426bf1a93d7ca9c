from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from capvid.captioners import Captioner, State, build
from capvid.decoding import DecodingOptions, decode
from capvid.decoding.search import pad_frames
from capvid.errors import UsageError
from capvid.text.vocabulary import BOS, EOS, PAD, UNK

OPTIONS = {"vocabulary_size": 9, "feature_width": 5, "embedding": 4, "hidden": 6, "attention": 3, "output": 7}
NAMES = ["soft-attention", "m3"]


def captioner(name: str, seed: int = 0, spread: float = 1.2) -> Captioner:
    torch.manual_seed(seed)
    made = build(name, {**OPTIONS, **({"memory_rows": 4, "memory_width": 3} if name == "m3" else {})})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, spread)
    return made.eval()


def clips(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return pad_frames([torch.randn(2 + n % 3, 5) for n in range(count)])


def sentence_logprob(model: Captioner, features: Tensor, mask: Tensor, tokens: list[int]) -> float:
    """Log-probability of a whole sentence and its end, by teacher forcing."""
    logits = model(features, mask, torch.tensor([[BOS, *tokens]]))[0]
    return sum(row.log_softmax(-1)[word].item() for row, word in zip(logits, [*tokens, EOS], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_one_beam_is_greedy_search(name: str) -> None:
    model = captioner(name)
    features, mask = clips(6)
    found = decode(model, features, mask, DecodingOptions(beam_size=1, max_length=7))
    for row, hypotheses in enumerate(found):
        state, word, said = model.encode(features[row : row + 1], mask[row : row + 1]), BOS, []
        while len(said) < 7:
            logits, state, _ = model.step(torch.tensor([word]), state)
            logits[:, [PAD, BOS, UNK]] = -math.inf
            word = int(logits.argmax())
            if word == EOS:
                break
            said.append(word)
        assert hypotheses[0].tokens == said
    assert len({tuple(h[0].tokens) for h in found}) > 1  # the videos do matter


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0])
def test_wide_beam_finds_the_best_of_all_sentences(name: str, penalty: float) -> None:
    model = captioner(name, seed=1)
    features, mask = clips(2)
    options = DecodingOptions(beam_size=200, max_length=3, length_penalty=penalty, num_captions=3)
    for row, found in enumerate(decode(model, features, mask, options)):
        clip = features[row : row + 1], mask[row : row + 1]
        ranked = sorted(
            (
                (sentence_logprob(model, *clip, list(s)) / (len(s) + 1) ** penalty, list(s))
                for length in range(4)
                for s in itertools.product(range(4, 9), repeat=length)
            ),
            reverse=True,
        )
        for hypothesis, (score, tokens) in zip(found, ranked[:3], strict=True):
            assert hypothesis.tokens == tokens
            assert hypothesis.score == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_teacher_forcing(name: str) -> None:
    model = captioner(name, seed=2, spread=0.6)
    features, mask = clips(4)
    options = DecodingOptions(beam_size=4, max_length=6, num_captions=4)
    for row, found in enumerate(decode(model, features, mask, options)):
        for hypothesis in found:
            expected = sentence_logprob(
                model, features[row : row + 1], mask[row : row + 1], hypothesis.tokens
            )
            assert hypothesis.logprob == pytest.approx(expected, abs=1e-4)
            assert hypothesis.score == pytest.approx(expected / len(hypothesis.logprobs) ** 1.0, abs=1e-4)
            assert not {PAD, BOS, EOS, UNK} & set(hypothesis.tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beams", [1, 5])
def test_batches_do_not_change_captions(name: str, beams: int) -> None:
    model = captioner(name, seed=3)
    features, mask = clips(8)
    options = DecodingOptions(beam_size=beams, max_length=8)
    together = decode(model, features, mask, options)
    backwards = decode(model, features.flip(0), mask.flip(0), options)[::-1]
    for row in range(8):
        frames = features[row, mask[row]].unsqueeze(0)
        alone = decode(model, frames, torch.ones(1, frames.shape[1], dtype=torch.bool), options)[0][0]
        assert together[row][0].tokens == alone.tokens == backwards[row][0].tokens
        assert together[row][0].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_state_in_beams_follows_its_beam() -> None:
    """Reordering moves what changes with the words and leaves what belongs to the video."""
    state = State({"frames": torch.arange(4.0)}, {"h": torch.arange(4.0)})
    moved = state.reorder(torch.tensor([1, 0, 3, 3]))
    assert moved.memory["h"].tolist() == [1, 0, 3, 3]
    assert moved.video["frames"].tolist() == [0, 1, 2, 3]
    assert state.expand(2).video["frames"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_options_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="3 captions cannot come from 2 beams"):
        DecodingOptions(beam_size=2, num_captions=3)
    with pytest.raises(UsageError):
        DecodingOptions(beam_size=0)
