from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from capvid.backbones import clip_networks
from capvid.backbones.catalog import backbone_entry
from capvid.backbones.clip_networks import C3D, C3D_LAYERS

# Tran et al. 2015, Figure 3: convolutions with a pooling after every group
GROUPS = (("conv1a",), ("conv2a",), ("conv3a", "conv3b"), ("conv4a", "conv4b"), ("conv5a", "conv5b"))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> C3D:
    """C3D with an eighth of the channels between the first and the last convolution."""
    widths = {
        name: (before if before == 3 else before // 8, after if name == "conv5b" else after // 8)
        for name, (before, after) in clip_networks._C3D_CONVOLUTIONS.items()
    }
    monkeypatch.setattr(clip_networks, "_C3D_CONVOLUTIONS", widths)
    torch.manual_seed(0)
    network = C3D()
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.kaiming_normal_(parameter)
        else:
            torch.nn.init.uniform_(parameter, -0.2, 0.2)
    return network.eval().requires_grad_(False)


def maxima(x: np.ndarray, *, deep: int) -> np.ndarray:
    """The maximum over deep x 2 x 2 at a stride of the same, window after window; one that hangs over the
    edge counts with what it has."""
    channels, frames, height, width = x.shape
    found = np.empty((channels, -(-frames // deep), -(-height // 2), -(-width // 2)))
    for t, y, z in np.ndindex(*found.shape[1:]):
        window = x[:, t * deep : (t + 1) * deep, y * 2 : y * 2 + 2, z * 2 : z * 2 + 2]
        found[:, t, y, z] = window.max((1, 2, 3))
    return found


@pytest.mark.slow
def test_the_network_is_that_of_the_papers_figure(narrow: C3D) -> None:
    clip = torch.randn(1, 3, 16, 112, 112)
    x = clip.double()
    for number, group in enumerate(GROUPS):
        for name in group:
            layer = narrow.get_submodule(name)
            assert layer.kernel_size == (3, 3, 3)
            padded = F.pad(x, (1, 1, 1, 1, 1, 1))
            x = F.conv3d(padded, layer.weight.double(), layer.bias.double()).clamp(min=0)
        if number == 4:
            conv5b = x[0]  # (512, 2, 7, 7)
        x = torch.from_numpy(maxima(x[0].numpy(), deep=1 if number == 0 else 2))[None]
    assert x.shape == (1, 512, 1, 4, 4)
    fc6 = (narrow.fc6.weight.double() @ x.flatten() + narrow.fc6.bias).clamp(min=0)
    fc7 = (narrow.fc7.weight.double() @ fc6 + narrow.fc7.bias).clamp(min=0)
    found = narrow(clip, C3D_LAYERS)
    for name, expected in (("fc6", fc6), ("fc7", fc7)):
        scale = float(expected.max())
        torch.testing.assert_close(found[name][0].double(), expected, rtol=1e-4, atol=1e-5 * scale)
        assert scale > 0 and (found[name] >= 0).all()
    for place in ((0, 0, 0), (0, 6, 3), (1, 2, 5)):  # frame by frame, row by row
        at = place[0] * 49 + place[1] * 7 + place[2]
        torch.testing.assert_close(
            found["conv5b"][0, at].double(), conv5b[(slice(None), *place)], rtol=1e-4, atol=1e-4
        )


def test_the_fifth_pooling_hangs_over_the_right_and_lower_edge() -> None:
    x = torch.zeros(1, 512, 2, 7, 7)
    x[:, :, 1, 6, 6], x[:, :, 0, 0, 1], x[:, :, 0, 1, 2] = 3, 1, 2
    pooled = F.max_pool3d(x, 2, ceil_mode=True)
    assert pooled.shape == (1, 512, 1, 4, 4)
    assert pooled[0, 0, 0].tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 3]]
    assert torch.equal(pooled, F.max_pool3d(F.pad(x, (0, 1, 0, 1)), 2))


def test_parameters_and_input() -> None:
    with torch.device("meta"):
        network = C3D()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert len(shapes) == 20
    assert shapes["conv1a.weight"] == (64, 3, 3, 3, 3)
    assert shapes["conv5b.weight"] == (512, 512, 3, 3, 3)
    assert shapes["fc6.weight"] == (4096, 8192) and shapes["fc7.weight"] == (4096, 4096)
    entry = backbone_entry("c3d")
    assert entry.clip is not None and (entry.clip.frames, entry.clip.stride) == (16, 1)
    assert "BGR minus (90, 98, 102)" in entry.describe_input()
