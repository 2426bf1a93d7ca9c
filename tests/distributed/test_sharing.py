from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("ray.cloudpickle")

from capvid.distributed.ray_engine import put_together, take_apart


class Odd(nn.Module):
    """Parameters of many kinds, some of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 8, 3, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.embedding = nn.Embedding(11, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("number", torch.tensor(0.25))
        self.register_buffer("places", torch.arange(6).reshape(2, 3).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("wide", torch.randn(1, 8).expand(5, 8))
        self.same = self.number

    def forward(self, pictures: Tensor) -> Tensor:
        found = self.norm(self.second(self.first(pictures).relu())).mean((2, 3))
        return self.out(found + self.wide[:1]) * self.number


def together(module: nn.Module) -> tuple[nn.Module, list[np.ndarray]]:
    rest, arrays = take_apart(module)
    for array in arrays:
        array.setflags(write=False)  # as an object store has them
    return put_together(rest, arrays), arrays


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_are_the_same_to_the_bit(dtype: torch.dtype, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    module = Odd().eval().to(dtype).to(memory_format=layout)
    again, _ = together(module)
    pictures = torch.randn(2, 3, 9, 9).to(dtype).to(memory_format=layout)
    with torch.no_grad():
        assert torch.equal(module(pictures), again(pictures))
    assert not again.training
    before, after = module.state_dict(), again.state_dict()
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype, name
        if layout is torch.channels_last and tensor.dim() == 4:
            assert after[name].is_contiguous(memory_format=layout)


def test_memory_is_shared_with_the_arrays() -> None:
    module = Odd().to(torch.bfloat16).to(memory_format=torch.channels_last)
    module.same = module.number
    again, arrays = together(module)
    places = {array.__array_interface__["data"][0] for array in arrays if array.size}
    tensors = [tensor for tensor in (*again.parameters(), *again.buffers()) if tensor.numel()]
    assert len(tensors) > 12
    assert {tensor.data_ptr() for tensor in tensors} == places
    assert again.out.weight is again.embedding.weight and again.same is again.number
    assert all(not parameter.requires_grad for parameter in again.parameters())


def test_what_is_left_is_small() -> None:
    rest, arrays = take_apart({"network": nn.Linear(1000, 1000), "more": ["x"]})
    assert len(rest) < 3000 and sum(array.nbytes for array in arrays) == 4 * 1_001_000
    found = put_together(rest, arrays)
    assert found["more"] == ["x"] and list(found) == ["network", "more"]
    assert put_together(*take_apart("no tensors")) == "no tensors"
