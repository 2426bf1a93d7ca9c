"""Properties of every captioner."""

from __future__ import annotations

import pytest
import torch
from variants import VARIANTS, all_real, clip, make, tokens

from capvid.captioners.base import CAPTIONERS

SENTENCES = ([1, 5, 6], [1, 8, 9], [1, 4, 4], [1, 10, 3])


def test_every_captioner_has_a_variant() -> None:
    assert {name for name, _ in VARIANTS.values()} == set(CAPTIONERS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_teacher_forcing_equals_stepping(variant: str) -> None:
    captioner = make(variant)
    features, mask = clip(captioner, 2, 3), all_real(2, 3)
    words = tokens(*SENTENCES)  # two captions per video
    forced = captioner(features, mask, words)
    state = captioner.encode(features, mask).expand(2)
    for position in range(3):
        logits, state, _ = captioner.step(words[:, position], state)
        torch.testing.assert_close(forced[:, position], logits)
    assert state.words == 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_frames_change_nothing(variant: str) -> None:
    captioner = make(variant)
    short = clip(captioner, 1, 3)
    long = torch.cat([short, clip(captioner, 1, 4, fill=1e3)], 1)
    words = tokens([1, 7, 4])
    unpadded = captioner(short, all_real(1, 3), words)
    padded = captioner(long, torch.tensor([[True] * 3 + [False] * 4]), words)
    torch.testing.assert_close(unpadded, padded)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_words_do_not_affect_earlier_words(variant: str) -> None:
    captioner = make(variant)
    features = clip(captioner, 1, 3)
    unpadded = captioner(features, all_real(1, 3), tokens([1, 7, 4]))
    padded = captioner(features, all_real(1, 3), tokens([1, 7, 4, 0, 0]))
    torch.testing.assert_close(unpadded, padded[:, :3])


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_batch_are_independent(variant: str) -> None:
    captioner = make(variant)
    features, words = clip(captioner, 3, 4), tokens(*SENTENCES[:3])
    batched = captioner(features, all_real(3, 4), words)
    for row in range(3):
        single = captioner(features[row : row + 1], all_real(1, 4), words[row : row + 1])
        torch.testing.assert_close(batched[row : row + 1], single)


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_follow_their_beams(variant: str) -> None:
    """After reordering the rows of a video, decoding continues as if they had always been there."""
    captioner = make(variant)
    features, mask = clip(captioner, 1, 3), all_real(1, 3)
    start = captioner.encode(features, mask).expand(2)
    _, state, _ = captioner.step(tokens([1, 1])[0], start)
    _, state, _ = captioner.step(tokens([5, 9])[0], state)
    logits, _, _ = captioner.step(tokens([7, 7])[0], state.reorder(torch.tensor([1, 1])))
    expected = captioner(features, mask, tokens([1, 9, 7]))[0, -1]
    torch.testing.assert_close(logits, expected.expand(2, -1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_a_gradient(variant: str) -> None:
    captioner = make(variant)
    shape, words = (2, 3), tokens([1, 5, 6, 7], [1, 8, 9, 4])
    if captioner.paragraphs:  # two segments, as the second trains the recurrence
        shape, words = (2, 2, 3), torch.stack([words, words.flip(0)], 1)
    logits = captioner(clip(captioner, *shape), all_real(*shape), words)
    logits[..., 4:].log_softmax(-1)[..., 2].sum().backward()
    untrained = [n for n, p in captioner.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert untrained == []
