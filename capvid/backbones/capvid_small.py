"""``capvid-small``: a compact network of depthwise convolutions for CPUs.

EfficientNet-Lite0 (Tan and Le, "EfficientNet", ICML 2019, arXiv:1905.11946, without squeeze-excitation and
with ReLU6 throughout), its batch normalisation folded into the convolutions, at 128 x 176 pixels.

Notation for tensor shapes: T frames, H and W height and width (multiples of 32), C channels, L = HW / 1024
locations of the last map, D width of the embedding.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from capvid.backbones.catalog import NETWORKS, BackboneEntry

STEM = 32
# (expansion, channels, blocks, kernel, stride of the first block) of each stage
STAGES = (
    (1, 16, 1, 3, 1),
    (6, 24, 2, 3, 2),
    (6, 40, 2, 5, 2),
    (6, 80, 3, 3, 2),
    (6, 112, 3, 5, 1),
    (6, 192, 4, 5, 2),
    (6, 320, 1, 3, 1),
)
EMBEDDING = 1280


class InvertedResidual(nn.Module):
    """Inverted residual block: expand, depthwise convolution, project (MobileNetV2, CVPR 2018)."""

    def __init__(self, inputs: int, outputs: int, *, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = nn.Conv2d(inputs, inner, 1) if expansion > 1 else None
        self.depth = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner)
        self.project = nn.Conv2d(inner, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, maps: Tensor) -> Tensor:
        """Compute the block: (T, C, H, W) -> (T, C', H / stride, W / stride)."""
        inner = maps if self.expand is None else F.relu6(self.expand(maps))
        projected = self.project(F.relu6(self.depth(inner)))
        return maps + projected if self.residual else projected


class Student(nn.Module):
    """The network: images (T, 3, H, W) -> non-negative embeddings (T, D), or maps (T, L, C).

    Args:
        layer: ``embedding``, the mean over all locations, or ``maps``, the last map of 320 channels.
    """

    def __init__(self, layer: str = "embedding") -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STEM, 3, 2, 1)
        width, blocks = STEM, []
        for expansion, outputs, count, kernel, stride in STAGES:
            for number in range(count):
                sizes = {"expansion": expansion, "kernel": kernel, "stride": 1 if number else stride}
                blocks.append(InvertedResidual(width, outputs, **sizes))
                width = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Conv2d(width, EMBEDDING, 1)
        self.layer = layer
        # initialisation of He et al. (2015); residual branches start small, as there is no normalisation
        gains = {block.project: 0.2 if block.residual else 1.0 for block in blocks}
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_in = module.weight[0].numel()
                nn.init.normal_(module.weight, std=(gains.get(module, 2.0) / fan_in) ** 0.5)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Compute the layer for normalised images (T, 3, H, W): (T, D) or (T, L, C)."""
        maps = self.blocks(F.relu6(self.stem(images)))  # (T, C, H / 32, W / 32)
        if self.layer == "maps":
            return maps.flatten(2).transpose(1, 2)  # (T, L, C)
        return F.relu6(self.head(maps)).mean((2, 3))


@NETWORKS.register("capvid-small")
def build_student(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build capvid-small with random weights."""
    return Student(layer)
