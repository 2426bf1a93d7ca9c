"""What holds for every captioner, whatever its paper."""

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
    said = tokens(*SENTENCES)  # two captions a video
    forced = captioner(features, mask, said)
    state = captioner.encode(features, mask).expand(2)
    for position in range(3):
        logits, state, _ = captioner.step(said[:, position], state)
        torch.testing.assert_close(forced[:, position], logits)
    assert state.words == 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_frames_change_nothing(variant: str) -> None:
    captioner = make(variant)
    short = clip(captioner, 1, 3)
    long = torch.cat([short, clip(captioner, 1, 4, fill=1e3)], 1)
    said = tokens([1, 7, 4])
    alone = captioner(short, all_real(1, 3), said)
    padded = captioner(long, torch.tensor([[True] * 3 + [False] * 4]), said)
    torch.testing.assert_close(alone, padded)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_words_change_nothing_before_them(variant: str) -> None:
    captioner = make(variant)
    features = clip(captioner, 1, 3)
    alone = captioner(features, all_real(1, 3), tokens([1, 7, 4]))
    padded = captioner(features, all_real(1, 3), tokens([1, 7, 4, 0, 0]))
    torch.testing.assert_close(alone, padded[:, :3])


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_batch_do_not_touch(variant: str) -> None:
    captioner = make(variant)
    features, said = clip(captioner, 3, 4), tokens(*SENTENCES[:3])
    together = captioner(features, all_real(3, 4), said)
    for row in range(3):
        alone = captioner(features[row : row + 1], all_real(1, 4), said[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_follow_their_beams(variant: str) -> None:
    """After two words, rows of one video change places; what follows is as if they had always stood there."""
    captioner = make(variant)
    features, mask = clip(captioner, 1, 3), all_real(1, 3)
    start = captioner.encode(features, mask).expand(2)
    _, state, _ = captioner.step(tokens([1, 1])[0], start)
    _, state, _ = captioner.step(tokens([5, 9])[0], state)
    logits, _, _ = captioner.step(tokens([7, 7])[0], state.reorder(torch.tensor([1, 1])))
    expected = captioner(features, mask, tokens([1, 9, 7]))[0, -1]
    torch.testing.assert_close(logits, expected.expand(2, -1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns(variant: str) -> None:
    captioner = make(variant)
    shape, said = (2, 3), tokens([1, 5, 6, 7], [1, 8, 9, 4])
    if captioner.paragraphs:  # two segments: what the first leaves is learned from the second
        shape, said = (2, 2, 3), torch.stack([said, said.flip(0)], 1)
    logits = captioner(clip(captioner, *shape), all_real(*shape), said)
    logits[..., 4:].log_softmax(-1)[..., 2].sum().backward()
    idle = [n for n, p in captioner.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []
