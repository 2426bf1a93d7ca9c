"""``capvid-small``: a compact residual network made to be trained, and run, on a laptop's processor.

He et al., "Deep Residual Learning for Image Recognition" (2016), with squeeze-excitation (Hu et al., 2018)
in the later stages. The picture is folded 4 x 4 into channels first, so that no layer works at full
resolution: on a processor the time goes into moving activations, not into multiplying.

Notation for tensor shapes: T frames, H and W height and width (multiples of 4), C channels, D the embedding.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

FOLD = 4
WIDTHS = (40, 80, 160, 224)
BLOCKS = (1, 2, 2, 2)
EMBEDDING = 512


class SqueezeExcitation(nn.Module):
    """Channels weighted by a function of their means."""

    def __init__(self, width: int, reduction: int = 8) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(width, width // reduction, 1)
        self.excite = nn.Conv2d(width // reduction, width, 1)

    def forward(self, maps: Tensor) -> Tensor:
        """(T, C, H, W) -> the same shape."""
        means = maps.mean((2, 3), keepdim=True)  # (T, C, 1, 1)
        return maps * self.excite(F.relu(self.squeeze(means))).sigmoid()


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is averaged and projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, excited: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.norm2.weight)  # a block begins as its shortcut
        self.excitation = SqueezeExcitation(outputs) if excited else nn.Identity()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            pool = nn.AvgPool2d(stride, stride, ceil_mode=True) if stride > 1 else nn.Identity()
            self.shortcut = nn.Sequential(
                pool, nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, maps: Tensor) -> Tensor:
        """(T, C, H, W) -> (T, C', H / stride, W / stride)."""
        inner = F.relu(self.norm1(self.conv1(maps)), inplace=True)
        inner = self.excitation(self.norm2(self.conv2(inner)))
        return F.relu(inner + self.shortcut(maps), inplace=True)


class Student(nn.Module):
    """The network: pictures (T, 3, H, W) -> embeddings (T, D), not negative."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTHS[0]
        self.stem = nn.Conv2d(3 * FOLD**2, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks = []
        for stage, (outputs, count) in enumerate(zip(WIDTHS, BLOCKS, strict=True)):
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(Block(width, outputs, stride=stride, excited=stage >= 2))
                width = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Conv2d(width, EMBEDDING, 1, bias=False)
        self.head_norm = nn.BatchNorm2d(EMBEDDING)

    def forward(self, pictures: Tensor) -> Tensor:
        """Normalised pictures (T, 3, H, W) -> embeddings (T, D)."""
        folded = F.pixel_unshuffle(pictures, FOLD)  # (T, 48, H / 4, W / 4)
        maps = F.relu(self.norm(self.stem(folded)), inplace=True)
        maps = self.blocks(maps)  # (T, C, H / 32, W / 32)
        return F.relu(self.head_norm(self.head(maps)), inplace=True).mean((2, 3))
