"""``capvid-small``: a compact network of depthwise convolutions for CPUs.

EfficientNet-Lite2 (Tan and Le, "EfficientNet", ICML 2019, arXiv:1905.11946, without squeeze-excitation and
with ReLU6 throughout), its batch normalisation folded into the convolutions, at 192 x 256 pixels.

Notation for tensor shapes: T frames, H and W height and width (multiples of 64), C channels, L = HW / 4096
locations of the pooled last map, D width of the embedding.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from capvid.backbones.catalog import NETWORKS, BackboneEntry

STEM = 32
# (expansion, channels, blocks, kernel, stride of the first block) of each stage
STAGES = (
    (1, 16, 1, 3, 1),
    (6, 24, 3, 3, 2),
    (6, 48, 3, 5, 2),
    (6, 88, 4, 3, 2),
    (6, 120, 4, 5, 1),
    (6, 208, 5, 5, 2),
    (6, 352, 1, 3, 1),
)
EMBEDDING = 1280


class SameConv2d(nn.Conv2d):
    """Convolution padded as TensorFlow's "SAME" pads maps of even size: with stride 2, more at the end."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1) -> None:
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, kernel, stride, padding, groups=groups)
        first = (kernel - 2) // 2
        self.pads = (first, kernel - 2 - first) * 2 if stride == 2 else None

    def forward(self, maps: Tensor) -> Tensor:
        """Convolve maps: (T, C, H, W) -> (T, C', H / stride, W / stride)."""
        return super().forward(maps if self.pads is None else F.pad(maps, self.pads))


class InvertedResidual(nn.Module):
    """Inverted residual block: expand, depthwise convolution, project (MobileNetV2, CVPR 2018)."""

    def __init__(self, inputs: int, outputs: int, *, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = nn.Conv2d(inputs, inner, 1) if expansion > 1 else None
        self.depth = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self.project = nn.Conv2d(inner, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, maps: Tensor) -> Tensor:
        """Compute the block: (T, C, H, W) -> (T, C', H / stride, W / stride)."""
        inner = maps if self.expand is None else F.relu6(self.expand(maps))
        projected = self.project(F.relu6(self.depth(inner)))
        return maps + projected if self.residual else projected


class CapvidSmall(nn.Module):
    """The network: images (T, 3, H, W) -> non-negative embeddings (T, D), or maps (T, L, C).

    Args:
        layer: ``embedding``, the mean over all locations, or ``maps``, the last map of 352 channels, averaged
            over 2 x 2 locations.
    """

    def __init__(self, layer: str = "embedding") -> None:
        super().__init__()
        self.stem = SameConv2d(3, STEM, 3, 2)
        width, blocks = STEM, []
        for expansion, outputs, count, kernel, stride in STAGES:
            for number in range(count):
                sizes = {"expansion": expansion, "kernel": kernel, "stride": 1 if number else stride}
                blocks.append(InvertedResidual(width, outputs, **sizes))
                width = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Conv2d(width, EMBEDDING, 1)
        self.layer = layer

    def forward(self, images: Tensor) -> Tensor:
        """Compute the layer for normalised images (T, 3, H, W): (T, D) or (T, L, C)."""
        maps = self.blocks(F.relu6(self.stem(images)))  # (T, C, H / 32, W / 32)
        if self.layer == "maps":
            return F.avg_pool2d(maps, 2).flatten(2).transpose(1, 2)  # (T, L, C)
        return F.relu6(self.head(maps)).mean((2, 3))


@NETWORKS.register("capvid-small")
def build_capvid_small(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build capvid-small with random weights."""
    return CapvidSmall(layer)
