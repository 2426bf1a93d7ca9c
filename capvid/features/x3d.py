"""X3D-XS: a small 3D CNN that sees the motion within four frames.

Feichtenhofer, X3D: Expanding Architectures for Efficient Video Recognition, CVPR 2020 (arXiv:2004.04730),
with batch normalisation folded into the convolutions. Convolutions that look along one axis only are done in
2D and everything has its channels last in memory: less than half the time on CPUs for the same numbers.

Notation for tensor shapes: N clips, C channels, E channels inside a block, T frames of a clip, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# (blocks, channels C, channels E inside a block, channels of the squeeze) of each stage
_STAGES: tuple[tuple[int, int, int, int], ...] = (
    (3, 24, 54, 8),
    (5, 48, 108, 8),
    (11, 96, 216, 16),
    (7, 192, 432, 32),
)
_STEM = 24
LAYERS = ("conv5", "lin5", "fc")


class X3DXS(nn.Module):
    """X3D-XS with the 400 classes of Kinetics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem_xy = nn.Conv3d(3, _STEM, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
        self.stem_t = nn.Conv3d(_STEM, _STEM, (5, 1, 1), padding=(2, 0, 0), groups=_STEM)
        blocks: list[nn.Module] = []
        width = _STEM
        for count, out, inner, squeezed in _STAGES:
            for number in range(count):
                squeeze = squeezed if number % 2 == 0 else None
                blocks.append(Block(width, out, inner, squeeze=squeeze, stride=1 if number else 2))
                width = out
        self.blocks = nn.Sequential(*blocks)
        self.conv5 = nn.Conv3d(width, 432, 1)
        self.lin5 = nn.Conv3d(432, 2048, 1)
        self.fc = nn.Linear(2048, 400)

    def forward(self, clips: Tensor, layers: Collection[str] = ("conv5",)) -> dict[str, Tensor]:
        """Compute the layers asked for.

        Args:
            clips: (N, 3, T, H, W), RGB 0..1 minus 0.45, over 0.225; trained with T = 4 and H = W = 160, other
                sizes will do. Beyond the first and the last frame, as beyond the edges, all is zero.
            layers: names out of ``LAYERS``.

        Returns:
            By name: ``conv5`` (N, 432), the mean over frames and places, ``lin5`` (N, 2048), ``fc`` (N, 400),
            the logits.
        """
        x = clips.contiguous(memory_format=torch.channels_last_3d)
        x = _over_time(_per_frame(x, self.stem_xy), self.stem_t)  # (N, 24, T, H/2, W/2)
        x = self.blocks(F.relu_(x))  # (N, 192, T, H/32, W/32)
        pooled = F.relu_(_per_frame(x, self.conv5)).mean((2, 3, 4), keepdim=True)  # (N, 432, 1, 1, 1)
        found = {"conv5": pooled.flatten(1)}
        if set(layers) - {"conv5"}:
            found["lin5"] = F.relu_(_per_frame(pooled, self.lin5)).flatten(1)
            found["fc"] = self.fc(found["lin5"])
        return {layer: found[layer] for layer in layers}


class Block(nn.Module):
    """y = ReLU(shortcut(x) + c(swish(SE(b(ReLU(a(x))))))): wide and depthwise inside, narrow outside.

    Args:
        width: C of what comes in.
        out: C of what goes out.
        inner: E.
        squeeze: channels of the squeeze-excitation; ``None`` leaves it out.
        stride: in space; time is never thinned out.
    """

    def __init__(self, width: int, out: int, inner: int, *, squeeze: int | None, stride: int) -> None:
        super().__init__()
        strides = (1, stride, stride)
        self.a = nn.Conv3d(width, inner, 1)
        self.b = nn.Conv3d(inner, inner, 3, stride=strides, padding=1, groups=inner)
        self.se = SqueezeExcitation(inner, squeeze) if squeeze else None
        self.c = nn.Conv3d(inner, out, 1)
        self.proj = nn.Conv3d(width, out, 1, stride=strides) if stride > 1 or width != out else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block: (N, C, T, H, W) to (N, C', T, H', W')."""
        shortcut = x if self.proj is None else _per_frame(x, self.proj)  # (N, C', T, H', W')
        y = self.b(F.relu_(_per_frame(x, self.a)))  # (N, E, T, H', W')
        if self.se is not None:
            y = self.se(y)
        return F.relu_(_per_frame(F.silu(y, inplace=True), self.c).add_(shortcut))


class SqueezeExcitation(nn.Module):
    """Each channel times a factor in 0..1 that depends on the means of all channels over the clip."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv3d(width, squeezed, 1)
        self.fc2 = nn.Conv3d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Weigh the channels of (N, E, T, H, W)."""
        means = x.mean((2, 3, 4), keepdim=True)  # (N, E, 1, 1, 1)
        return x * _per_frame(F.relu_(_per_frame(means, self.fc1)), self.fc2).sigmoid_()


def _per_frame(x: Tensor, layer: nn.Conv3d) -> Tensor:
    """Apply a convolution with a kernel 1 x k x k: (N, C, T, H, W) to (N, C', T, H', W')."""
    frames = x.transpose(1, 2).flatten(0, 1)  # (NT, C, H, W)
    half = layer.kernel_size[1] // 2
    y = F.conv2d(frames, layer.weight[:, :, 0], layer.bias, layer.stride[1:], half)  # (NT, C', H', W')
    return y.unflatten(0, (len(x), -1)).transpose(1, 2)


def _over_time(x: Tensor, layer: nn.Conv3d) -> Tensor:
    """Apply a depthwise convolution with a kernel k x 1 x 1 to (N, C, T, H, W), H x W as one row."""
    half = layer.kernel_size[0] // 2
    y = F.conv2d(x.flatten(3), layer.weight[..., 0], layer.bias, padding=(half, 0), groups=layer.groups)
    return y.unflatten(3, x.shape[3:])
