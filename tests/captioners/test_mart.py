"""MART against a plain Python implementation of the paper, and on a task that needs its memory."""

from __future__ import annotations

import pytest
import torch
from transformer_reference import authors_mart, mart
from variants import clip, make, weights

from capvid.captioners.base import build
from capvid.errors import UsageError

SENTENCES = [[1, 7, 4], [1, 5, 9, 10]]
FRAMES = [4, 2]
WORDS = torch.tensor([[[1, 7, 4, 0], [1, 5, 9, 10]]])


@pytest.mark.parametrize("options", [{}, {"standardise": True}])
@pytest.mark.parametrize(("variant", "slots"), [("mart", 2), ("mart-no-recurrence", 0)])
def test_two_segments_match_the_reference(variant: str, slots: int, options: dict) -> None:
    captioner = make(variant, **options)
    if options:
        captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    features, mask = clip(captioner, 1, 2, 4), torch.arange(4) < torch.tensor(FRAMES).unsqueeze(-1)
    segments = [(features[0, n, : FRAMES[n]].tolist(), words) for n, words in enumerate(SENTENCES)]
    expected = mart(weights(captioner), segments, heads=2, layers=2, slots=slots)
    logprobs = captioner(features, mask.unsqueeze(0), WORDS).log_softmax(-1)
    for segment, expected_logprobs in enumerate(expected):
        actual = logprobs[0, segment, : len(expected_logprobs)].tolist()
        torch.testing.assert_close(actual, expected_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"standardise": True}])
@pytest.mark.parametrize(("variant", "slots"), [("mart-authors", 2), ("mart-authors-no-recurrence", 0)])
def test_authors_layout_matches_the_reference(variant: str, slots: int, options: dict) -> None:
    """The second sentence leaves no room for its end, so that the memory sees one end of two."""
    captioner = make(variant, **options)
    if options:
        captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    features = clip(captioner, 1, 3, 4)
    frames, sentences = [4, 2, 3], [*SENTENCES, [1, 6]]
    mask = torch.arange(4) < torch.tensor(frames).unsqueeze(-1)
    segments = [(features[0, n, : frames[n]].tolist(), words) for n, words in enumerate(sentences)]
    sizes = {"heads": 2, "layers": 2, "slots": slots, "start": 9, "length": 4}
    expected = authors_mart(weights(captioner), segments, **sizes)
    words = torch.tensor([[sentence + [0] * (4 - len(sentence)) for sentence in sentences]])
    logprobs = captioner(features, mask.unsqueeze(0), words).log_softmax(-1)
    for segment, expected_logprobs in enumerate(expected):
        actual = logprobs[0, segment, : len(expected_logprobs)].tolist()
        torch.testing.assert_close(actual, expected_logprobs, atol=1e-9, rtol=0)


def test_first_weights_of_the_authors_layout() -> None:
    sizes = {"vocabulary_size": 300, "feature_width": 200, "hidden": 240}
    captioner = build("mart-authors", {**sizes, "feed_forward": 240})
    for name, parameter in captioner.named_parameters():
        if "norm" in name or name.endswith((".0.bias", ".1.bias", ".4.bias")):
            continue
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 2 and parameter.numel() > 1000:
            assert 0.018 < parameter.std() < 0.022, name
    assert captioner.layers[0].slots.shape == (1, 1)
    with pytest.raises(UsageError, match="feed_forward = 768: must be hidden = 240"):
        build("mart-authors", sizes)


def test_no_memory_parameters_without_recurrence() -> None:
    parameters = dict(make("mart-no-recurrence").named_parameters())
    assert parameters
    assert not [name for name in parameters if "memory" in name or "updater" in name or "slots" in name]


def test_memory_slots_are_distinct_and_traced() -> None:
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


def test_later_segments_do_not_affect_earlier_ones() -> None:
    captioner = make("mart")
    features, mask = clip(captioner, 1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)
    changed = features.clone()
    changed[:, 1] += 1
    before, after = captioner(features, mask, WORDS), captioner(changed, mask, WORDS)
    torch.testing.assert_close(before[:, 0], after[:, 0])
    assert not torch.allclose(before[:, 1], after[:, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("recurrence", "low", "high"), [(True, 0.95, 1.0), (False, 0.0, 0.4)])
def test_memory_carries_the_previous_segment(recurrence: bool, low: float, high: float) -> None:
    """The second sentence names one of six objects of the first segment; its own video is noise."""
    torch.manual_seed(0)
    sizes = {"hidden": 32, "heads": 2, "layers": 2, "feed_forward": 32, "word_width": 8, "dropout": 0.0}
    captioner = build("mart", {"vocabulary_size": 11, "feature_width": 8, "recurrence": recurrence, **sizes})
    optimizer = torch.optim.Adam(captioner.parameters(), lr=3e-3)

    def sample_logits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        objects = torch.randint(6, (count,))
        features = torch.randn(count, 2, 3, 8) * 0.3
        features[torch.arange(count), 0, :, objects] += 2
        words = torch.tensor([[1, 4], [1, 4]]).repeat(count, 1, 1)  # the first sentence does not mention it
        logits = captioner(features, torch.ones(count, 2, 3, dtype=torch.bool), words)
        return logits[:, 1, 0], objects + 5

    for _ in range(200):
        logits, targets = sample_logits(32)
        loss = torch.nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits, targets = sample_logits(300)
    assert low <= (logits.argmax(-1) == targets).float().mean().item() <= high


def test_change_of_the_memory() -> None:
    captioner = make("mart")
    state = captioner.encode(clip(captioner, 2, 3), torch.ones(2, 3, dtype=torch.bool))
    carried = captioner.remember(state, torch.tensor([[5, 8], [7, 0]]))
    change = captioner.memory_change(state, carried)
    for layer in range(2):
        before, after = state.video[f"memory.{layer}"], carried[f"memory.{layer}"]
        for row in range(2):
            expected = (after[row] - before[row]).pow(2).sum().sqrt() / before[row].pow(2).sum().sqrt()
            assert change[row, layer].item() == pytest.approx(expected.item())
