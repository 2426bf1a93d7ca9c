"""MART against a plain re-computation of the paper's equations, and what its memory is for."""

from __future__ import annotations

import pytest
import torch
from transformer_reference import mart
from variants import clip, make, weights

from capvid.captioners.base import build

SENTENCES = [[1, 7, 4], [1, 5, 9, 10]]
FRAMES = [4, 2]
WORDS = torch.tensor([[[1, 7, 4, 0], [1, 5, 9, 10]]])


@pytest.mark.parametrize("options", [{}, {"standardise": True}])
@pytest.mark.parametrize(("variant", "slots"), [("mart", 2), ("mart-no-recurrence", 0)])
def test_mart_over_two_segments(variant: str, slots: int, options: dict) -> None:
    captioner = make(variant, **options)
    if options:
        captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    features, mask = clip(captioner, 1, 2, 4), torch.arange(4) < torch.tensor(FRAMES).unsqueeze(-1)
    segments = [(features[0, n, : FRAMES[n]].tolist(), words) for n, words in enumerate(SENTENCES)]
    expected = mart(weights(captioner), segments, heads=2, layers=2, slots=slots)
    logprobs = captioner(features, mask.unsqueeze(0), WORDS).log_softmax(-1)
    for segment, wanted in enumerate(expected):
        found = logprobs[0, segment, : len(wanted)].tolist()
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_without_recurrence_there_is_no_memory() -> None:
    named = dict(make("mart-no-recurrence").named_parameters())
    assert named
    assert not [name for name in named if "memory" in name or "updater" in name or "slots" in name]


def test_slots_are_distinct_and_weighed() -> None:
    captioner = make("mart")
    state = captioner.encode(clip(captioner, 1, 3), torch.ones(1, 3, dtype=torch.bool))
    first, second = state.video["memory.1"][0]
    assert (first - second).abs().max() > 0.1
    _, _, trace = captioner.step(torch.tensor([1]), state)
    assert trace["memory"].shape == (1, 2)
    assert 0 < trace["memory"].sum() < 1


@pytest.mark.parametrize("variant", ["mart", "mart-no-recurrence"])
def test_gradients_cross_segments(variant: str) -> None:
    captioner = make(variant)
    features = clip(captioner, 1, 2, 3).requires_grad_()
    captioner(features, torch.ones(1, 2, 3, dtype=torch.bool), WORDS)[:, 1, :, 5].sum().backward()
    assert bool(features.grad[:, 0].any()) == captioner.recurrent
    assert features.grad[:, 1].any()


def test_nothing_comes_back_from_later_segments() -> None:
    captioner = make("mart")
    features, mask = clip(captioner, 1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)
    moved = features.clone()
    moved[:, 1] += 1
    before, after = captioner(features, mask, WORDS), captioner(moved, mask, WORDS)
    torch.testing.assert_close(before[:, 0], after[:, 0])
    assert not torch.allclose(before[:, 1], after[:, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("recurrence", "least", "most"), [(True, 0.95, 1.0), (False, 0.0, 0.4)])
def test_memory_tells_of_the_segment_before(recurrence: bool, least: float, most: float) -> None:
    """The second sentence names what the first segment's video showed, one of six; its own shows noise."""
    torch.manual_seed(0)
    sizes = {"hidden": 32, "heads": 2, "layers": 2, "feed_forward": 32, "word_width": 8, "dropout": 0.0}
    captioner = build("mart", {"vocabulary_size": 11, "feature_width": 8, "recurrence": recurrence, **sizes})
    optimizer = torch.optim.Adam(captioner.parameters(), lr=3e-3)

    def correct(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shown = torch.randint(6, (count,))
        features = torch.randn(count, 2, 3, 8) * 0.3
        features[torch.arange(count), 0, :, shown] += 2
        words = torch.tensor([[1, 4], [1, 4]]).repeat(count, 1, 1)  # nothing of it is in the first sentence
        logits = captioner(features, torch.ones(count, 2, 3, dtype=torch.bool), words)
        return logits[:, 1, 0], shown + 5

    for _ in range(200):
        logits, wanted = correct(32)
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits, wanted = correct(300)
    assert least <= (logits.argmax(-1) == wanted).float().mean().item() <= most
