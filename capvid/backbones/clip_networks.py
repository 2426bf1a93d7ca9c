"""Clip networks: C3D and X3D-XS.

Notation for tensor shapes: N clips, C channels, E channels inside a block, T frames of a clip, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.backbones.catalog import NETWORKS, BackboneEntry
from capvid.backbones.networks import OneLayer, build_empty

# (channels in, channels out) of the convolutions, in order
_C3D_CONVOLUTIONS: dict[str, tuple[int, int]] = {
    "conv1a": (3, 64),
    "conv2a": (64, 128),
    "conv3a": (128, 256),
    "conv3b": (256, 256),
    "conv4a": (256, 512),
    "conv4b": (512, 512),
    "conv5a": (512, 512),
    "conv5b": (512, 512),
}
_C3D_POOL_BEFORE = {"conv2a": (1, 2, 2), "conv3a": (2, 2, 2), "conv4a": (2, 2, 2), "conv5a": (2, 2, 2)}
C3D_LAYERS = ("conv5b", "fc6", "fc7")


class C3D(nn.Module):
    """C3D, the 3D CNN of the papers' motion features ``fc6``, as the authors' Caffe computes it.

    Tran et al., Learning Spatiotemporal Features with 3D Convolutional Networks, ICCV 2015 (arXiv:1412.0767),
    Figure 3: eight convolutions 3 x 3 x 3, five max-poolings, two fully connected layers of 4096. Caffe
    rounds pooling sizes up, which affects ``pool5`` only (7 x 7 locations become 4 x 4).
    """

    def __init__(self) -> None:
        super().__init__()
        for name, (width_in, width_out) in _C3D_CONVOLUTIONS.items():
            self.add_module(name, nn.Conv3d(width_in, width_out, 3, padding=1))
        self.fc6 = nn.Linear(512 * 4 * 4, 4096)
        self.fc7 = nn.Linear(4096, 4096)

    def forward(self, clips: Tensor, layers: Collection[str] = ("fc6",)) -> dict[str, Tensor]:
        """Compute the requested layers, each after its ReLU.

        Args:
            clips: (N, 3, 16, 112, 112), BGR 0..255 minus the mean of Sports-1M.
            layers: names in ``C3D_LAYERS``.

        Returns:
            Layers by name: ``conv5b`` (N, 98, 512), 2 x 7 x 7 locations, frame by frame and row by row;
            ``fc6`` and ``fc7`` (N, 4096).
        """
        x = clips
        for name in _C3D_CONVOLUTIONS:
            if name in _C3D_POOL_BEFORE:
                x = F.max_pool3d(x, _C3D_POOL_BEFORE[name])
            x = F.relu_(self.get_submodule(name)(x))
        outputs = {"conv5b": x.flatten(2).transpose(1, 2)}  # x (N, 512, 2, 7, 7)
        if set(layers) - {"conv5b"}:
            # windows that extend beyond the edge count, as in Caffe: (N, 512, 1, 4, 4)
            pooled = F.max_pool3d(x, 2, ceil_mode=True)
            outputs["fc6"] = F.relu(self.fc6(pooled.flatten(1)))
            if "fc7" in layers:
                outputs["fc7"] = F.relu(self.fc7(outputs["fc6"]))
        return {layer: outputs[layer] for layer in layers}


@NETWORKS.register("c3d")
def build_c3d(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build C3D up to a layer."""
    network = build_empty(C3D)
    if layer == "conv5b":
        network.fc6 = network.fc7 = nn.Identity()
    elif layer == "fc6":
        network.fc7 = nn.Identity()
    return OneLayer(network, layer)


# (blocks, channels C, channels E inside a block, squeeze channels) of each stage
X3D_STAGES: tuple[tuple[int, int, int, int], ...] = (
    (3, 24, 54, 8),
    (5, 48, 108, 8),
    (11, 96, 216, 16),
    (7, 192, 432, 32),
)
_X3D_STEM = 24
X3D_LAYERS = ("conv5", "lin5", "fc", "lin5+log-probs")


class X3DXS(nn.Module):
    """X3D-XS with the 400 classes of Kinetics: a small 3D CNN for clips of four frames.

    Feichtenhofer, X3D: Expanding Architectures for Efficient Video Recognition, CVPR 2020 (arXiv:2004.04730),
    with batch normalisation folded into the convolutions. For speed, 1 x k x k and k x 1 x 1 convolutions run
    in 2D, and memory is channels-last throughout: less than half the time on CPUs for the same numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem_xy = nn.Conv3d(3, _X3D_STEM, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
        self.stem_t = nn.Conv3d(_X3D_STEM, _X3D_STEM, (5, 1, 1), padding=(2, 0, 0), groups=_X3D_STEM)
        blocks: list[nn.Module] = []
        width = _X3D_STEM
        for count, out, inner, squeeze_width in X3D_STAGES:
            for number in range(count):
                squeeze = squeeze_width if number % 2 == 0 else None
                blocks.append(Block(width, out, inner, squeeze=squeeze, stride=1 if number else 2))
                width = out
        self.blocks = nn.Sequential(*blocks)
        self.conv5 = nn.Conv3d(width, 432, 1)
        self.lin5 = nn.Conv3d(432, 2048, 1)
        self.fc = nn.Linear(2048, 400)

    def forward(self, clips: Tensor, layers: Collection[str] = ("conv5",)) -> dict[str, Tensor]:
        """Compute the requested layers.

        Args:
            clips: (N, 3, T, H, W), RGB 0..1 minus 0.45, over 0.225; trained with T = 4 and H = W = 160.
                Convolutions pad the clip with zeros in time as well as in space.
            layers: names in ``X3D_LAYERS``.

        Returns:
            Layers by name: ``conv5`` (N, 432), the mean over frames and locations; ``lin5`` (N, 2048);
            ``fc`` (N, 400), the logits; ``lin5+log-probs`` (N, 2448), both, the logits after log-softmax.
        """
        x = clips.contiguous(memory_format=torch.channels_last_3d)
        x = _over_time(_per_frame(x, self.stem_xy), self.stem_t)  # (N, 24, T, H/2, W/2)
        x = self.blocks(F.relu_(x))  # (N, 192, T, H/32, W/32)
        pooled = F.relu_(_per_frame(x, self.conv5)).mean((2, 3, 4), keepdim=True)  # (N, 432, 1, 1, 1)
        outputs = {"conv5": pooled.flatten(1)}
        if set(layers) - {"conv5"}:
            outputs["lin5"] = F.relu_(_per_frame(pooled, self.lin5)).flatten(1)
            outputs["fc"] = self.fc(outputs["lin5"])
            log_probs = outputs["fc"].float().log_softmax(1).to(outputs["fc"].dtype)
            outputs["lin5+log-probs"] = torch.cat([outputs["lin5"], log_probs], 1)
        return {layer: outputs[layer] for layer in layers}


class Block(nn.Module):
    """Residual block: y = ReLU(shortcut(x) + c(swish(SE(b(ReLU(a(x))))))), where b is depthwise.

    Args:
        width: C of the input.
        out: C of the output.
        inner: E.
        squeeze: channels of the squeeze-excitation; ``None`` for a block without.
        stride: stride in space; in time it is 1.
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
    """Scales each channel by a factor in 0..1 computed from the channel means over the clip."""

    def __init__(self, width: int, squeeze: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv3d(width, squeeze, 1)
        self.fc2 = nn.Conv3d(squeeze, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels of x (N, E, T, H, W)."""
        means = x.mean((2, 3, 4), keepdim=True)  # (N, E, 1, 1, 1)
        return x * _per_frame(F.relu_(_per_frame(means, self.fc1)), self.fc2).sigmoid_()


def _per_frame(x: Tensor, layer: nn.Conv3d) -> Tensor:
    """Apply a 1 x k x k convolution: (N, C, T, H, W) to (N, C', T, H', W')."""
    frames = x.transpose(1, 2).flatten(0, 1)  # (NT, C, H, W)
    padding = layer.kernel_size[1] // 2
    y = F.conv2d(frames, layer.weight[:, :, 0], layer.bias, layer.stride[1:], padding)  # (NT, C', H', W')
    return y.unflatten(0, (len(x), -1)).transpose(1, 2)


def _over_time(x: Tensor, layer: nn.Conv3d) -> Tensor:
    """Apply a depthwise k x 1 x 1 convolution to x (N, C, T, H, W), H x W flattened into one axis."""
    padding = layer.kernel_size[0] // 2, 0
    y = F.conv2d(x.flatten(3), layer.weight[..., 0], layer.bias, padding=padding, groups=layer.groups)
    return y.unflatten(3, x.shape[3:])


@NETWORKS.register("x3d")
def build_x3d(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build X3D-XS."""
    return OneLayer(build_empty(X3DXS), layer)
