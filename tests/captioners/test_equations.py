"""Every captioner against a plain re-computation of its paper's equations."""

from __future__ import annotations

import pytest
import torch
from reference import m3, soft_attention

from capvid.captioners import CAPTIONERS, Captioner, build

SIZES = {
    "vocabulary_size": 11,
    "feature_width": 5,
    "embedding": 4,
    "hidden": 6,
    "attention": 3,
    "output": 7,
    "dropout": 0.5,
}
MEMORY = {"memory_rows": 4, "memory_width": 3}
TOKENS = [1, 7, 4]


def make(name: str, **options: object) -> Captioner:
    torch.manual_seed(3)
    captioner = build(name, {**SIZES, **(MEMORY if name == "m3" else {}), **options})
    with torch.no_grad():
        for parameter in captioner.parameters():
            parameter.normal_(0, 0.7)  # far from symmetric or linear
    return captioner.double().eval()


def weights(captioner: Captioner) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in captioner.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"projection": 4, "standardise": True}])
def test_soft_attention_steps(options: dict) -> None:
    captioner = make("soft-attention", **options)
    features = torch.randn(1, 4, 5, dtype=torch.double)
    if options:
        captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    expected = soft_attention(weights(captioner), features[0].tolist(), TOKENS)
    state = captioner.encode(features, torch.ones(1, 4, dtype=torch.bool))
    for token, said in zip(TOKENS, expected, strict=True):
        logits, state, _ = captioner.step(torch.tensor([token]), state)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), said, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"projection": 4, "standardise": True}])
def test_m3_steps_and_every_head(options: dict) -> None:
    captioner = make("m3", **options)
    features = torch.randn(1, 4, 5, dtype=torch.double)
    if options:
        captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    expected, traces = m3(weights(captioner), features[0].tolist(), TOKENS)
    state = captioner.encode(features, torch.ones(1, 4, dtype=torch.bool))
    for token, said, heads in zip(TOKENS, expected, traces, strict=True):
        logits, state, trace = captioner.step(torch.tensor([token]), state)
        for name, wanted in heads.items():
            torch.testing.assert_close(trace[name][0].tolist(), wanted, atol=1e-5, rtol=0, msg=name)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), said, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CAPTIONERS)
def test_teacher_forcing_equals_stepping(name: str) -> None:
    captioner = make(name)
    features, mask = torch.randn(2, 3, 5).double(), torch.ones(2, 3, dtype=torch.bool)
    tokens = torch.tensor([[1, 5, 6], [1, 8, 9], [1, 4, 4], [1, 10, 3]])  # two captions a video
    forced = captioner(features, mask, tokens)
    state = captioner.encode(features, mask).expand(2)
    for position in range(3):
        logits, state, _ = captioner.step(tokens[:, position], state)
        torch.testing.assert_close(forced[:, position], logits)


@pytest.mark.parametrize("name", CAPTIONERS)
def test_padding_frames_change_nothing(name: str) -> None:
    captioner = make(name, projection=4)
    short = torch.randn(1, 3, 5).double()
    long = torch.cat([short, torch.full((1, 4, 5), 1e3).double()], 1)
    tokens = torch.tensor([TOKENS])
    alone = captioner(short, torch.ones(1, 3, dtype=torch.bool), tokens)
    padded = captioner(long, torch.tensor([[True] * 3 + [False] * 4]), tokens)
    torch.testing.assert_close(alone, padded)


def test_m3_blank_feature_takes_weight_from_the_frames() -> None:
    captioner = make("m3")
    state = captioner.encode(torch.randn(1, 4, 5).double(), torch.ones(1, 4, dtype=torch.bool))
    _, _, trace = captioner.step(torch.tensor([1]), state)
    assert 0 < trace["blank"].item() < 1
    assert trace["attention"].sum().item() == pytest.approx(1 - trace["blank"].item())


def test_m3_memory_rows_stay_distinct() -> None:
    torch.manual_seed(0)
    captioner = build("m3", {**SIZES, **MEMORY}).eval()
    state = captioner.encode(torch.randn(1, 4, 5), torch.ones(1, 4, dtype=torch.bool))
    for token in (1, 5, 6, 7, 8, 9):
        _, state, trace = captioner.step(torch.tensor([token]), state)
    rows = state.memory["memory"][0]
    assert torch.cdist(rows, rows).fill_diagonal_(1).min() > 1e-3
    assert trace["read_decoder"].std() > 1e-4


@pytest.mark.parametrize("name", CAPTIONERS)
def test_every_parameter_learns(name: str) -> None:
    captioner = make(name, projection=4)
    tokens = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 4]])
    captioner(torch.randn(2, 3, 5).double(), torch.ones(2, 3, dtype=torch.bool), tokens)[..., 4:].log_softmax(
        -1
    )[..., 2].sum().backward()
    idle = [n for n, p in captioner.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []
