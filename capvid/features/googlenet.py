"""BVLC GoogLeNet, the network of the papers' ``pool5/7x7_s1``, as Caffe computes it.

Szegedy et al., Going Deeper with Convolutions, CVPR 2015 (arXiv:1409.4842), in the version of the Caffe model
zoo: local response normalisation, no batch normalisation, pooling sizes rounded up.

Notation for tensor shapes: N images, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# (in, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection), all in channels
_INCEPTIONS: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}
_POOL_BEFORE = ("4a", "5a")
LAYERS = ("inception_5b/output", "pool5/7x7_s1", "loss3/classifier")


class GoogLeNet(nn.Module):
    """GoogLeNet with its parameters named by Caffe layer, slashes as underscores."""

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, kernel=7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64, kernel=1)
        self._add("conv2_3x3", 64, 192, kernel=3)
        for name, (width, one, reduce3, three, reduce5, five, pooled) in _INCEPTIONS.items():
            prefix = f"inception_{name}_"
            self._add(f"{prefix}1x1", width, one, kernel=1)
            self._add(f"{prefix}3x3_reduce", width, reduce3, kernel=1)
            self._add(f"{prefix}3x3", reduce3, three, kernel=3)
            self._add(f"{prefix}5x5_reduce", width, reduce5, kernel=1)
            self._add(f"{prefix}5x5", reduce5, five, kernel=5)
            self._add(f"{prefix}pool_proj", width, pooled, kernel=1)
        self.loss3_classifier = nn.Linear(1024, 1000)

    def _add(self, name: str, width_in: int, width_out: int, *, kernel: int, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(width_in, width_out, kernel, stride, padding=kernel // 2))

    def forward(self, images: Tensor, layers: Collection[str] = ("pool5/7x7_s1",)) -> dict[str, Tensor]:
        """Compute the layers asked for.

        Args:
            images: (N, 3, H, W), BGR 0..255 minus (104, 117, 123), H and W from 224 to 227.
            layers: names out of ``LAYERS``.

        Returns:
            By name: ``inception_5b/output`` (N, 49, 1024) with the places row by row, ``pool5/7x7_s1``
            (N, 1024), ``loss3/classifier`` (N, 1000), the logits.
        """
        x = self._conv("conv1_7x7_s2", images)  # (N, 64, 112, 112)
        x = local_response_norm(max_pool(x))  # (N, 64, 56, 56)
        x = self._conv("conv2_3x3", self._conv("conv2_3x3_reduce", x))  # (N, 192, 56, 56)
        x = max_pool(local_response_norm(x))  # (N, 192, 28, 28)
        for name in _INCEPTIONS:
            x = self._inception(name, max_pool(x) if name in _POOL_BEFORE else x)
        pooled = F.avg_pool2d(x, 7, stride=1).flatten(1)  # (N, 1024, 7, 7) to (N, 1024)
        found = {"inception_5b/output": x.flatten(2).transpose(1, 2), "pool5/7x7_s1": pooled}
        if "loss3/classifier" in layers:
            found["loss3/classifier"] = self.loss3_classifier(pooled)
        return {layer: found[layer] for layer in layers}

    def _conv(self, name: str, x: Tensor) -> Tensor:
        return F.relu_(self.get_submodule(name)(x))

    def _inception(self, name: str, x: Tensor) -> Tensor:
        prefix = f"inception_{name}_"
        branches = (
            self._conv(f"{prefix}1x1", x),
            self._conv(f"{prefix}3x3", self._conv(f"{prefix}3x3_reduce", x)),
            self._conv(f"{prefix}5x5", self._conv(f"{prefix}5x5_reduce", x)),
            self._conv(f"{prefix}pool_proj", F.max_pool2d(x, 3, stride=1, padding=1)),
        )
        return torch.cat(branches, dim=1)


def max_pool(x: Tensor) -> Tensor:
    """Take the maximum over 3 x 3 at stride 2; a window that hangs over the edge counts, as in Caffe."""
    return F.max_pool2d(x, 3, stride=2, ceil_mode=True)


def local_response_norm(x: Tensor, *, size: int = 5, alpha: float = 1e-4) -> Tensor:
    """Divide by (1 + alpha / size * sum of squares over ``size`` neighbouring channels) ** 0.75.

    Args:
        x: (N, C, H, W); channels beyond the first and the last count as zero.
        size: number of channels in the sum, odd.
        alpha: weight of the mean square.
    """
    squares = x * x
    total = squares.clone()
    for shift in range(1, size // 2 + 1):
        total[:, shift:] += squares[:, :-shift]
        total[:, :-shift] += squares[:, shift:]
    scale = total.mul_(alpha / size).add_(1.0)
    # s ** -0.75 by two square roots, which take a third of the time of a power
    return (scale * scale.sqrt()).rsqrt_().mul_(x)
