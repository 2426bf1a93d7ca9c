"""Layers that several captioners share, and parts that only some variants use."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from variants import all_real, clip, make

from capvid.captioners.dense_lstm import PlainFusion, SelfAttention
from capvid.captioners.layers import init_gates, mean_frame, normal


def test_mean_frame_counts_real_frames_only() -> None:
    """A video of one frame is its own mean, and one without frames is zero."""
    frames = torch.tensor([[[2.0, 4.0], [0, 0]], [[1.0, 3.0], [3.0, 5.0]], [[0, 0], [0, 0]]])
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    assert mean_frame(frames, mask).tolist() == [[2.0, 4.0], [2.0, 4.0], [0.0, 0.0]]


def test_forget_gates_are_open_at_first() -> None:
    inputs, recurrent = nn.Linear(3, 8), nn.Linear(2, 8, bias=False)
    init_gates(inputs, recurrent)
    assert inputs.bias.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    for gate in recurrent.weight.chunk(4):
        torch.testing.assert_close(gate @ gate.T, torch.eye(2))


def test_dropout_falls_between_the_layers_of_hams_decoder() -> None:
    captioner = make("ham", dropout=0.5).train()
    captioner.upper.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        state = captioner.encode(clip(captioner, 1, 3), all_real(1, 3))
        _, after, _ = captioner.step(torch.tensor([1]), state)
    below = after.memory["h"][:, 0]
    dropped = seen[0] == 0
    assert dropped.any() and not dropped.all()
    torch.testing.assert_close(seen[0][~dropped], 2 * below[~dropped])


@pytest.mark.parametrize(("how", "expected"), [("none", 5.0), ("add", 9.0), ("mean", 3.0)])
def test_fusion_without_attention(how: str, expected: float) -> None:
    fusion = PlainFusion(how)
    past = fusion.first(torch.tensor([[1.0]]))
    for count, state in enumerate((3.0, 5.0), 1):
        past = fusion.add(past, torch.tensor([[state]]), count)
    assert fusion(past, 3)[0].item() == expected


def test_self_attention_scales_its_products() -> None:
    """softmax(q k / sqrt(width)) with a width of 4."""
    fusion = SelfAttention(hidden=2, width=4, version=1)
    rows = torch.zeros(1, 2, 10)
    rows[0, :, :4] = 1.0  # queries
    rows[0, 1, 4:8] = 1.0  # the second key
    _, weights = fusion.fuse(rows)
    torch.testing.assert_close(weights[0], torch.tensor([0.0, 4 / 2]).softmax(0))


def test_spread_of_random_numbers() -> None:
    torch.manual_seed(0)
    assert normal(100, 100, std=0.02).std().item() == pytest.approx(0.02, rel=0.05)
