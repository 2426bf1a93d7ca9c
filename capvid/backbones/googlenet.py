"""BVLC GoogLeNet, the network of the papers' ``pool5/7x7_s1``, as Caffe computes it.

Szegedy et al., Going Deeper with Convolutions, CVPR 2015 (arXiv:1409.4842), in the version of the Caffe model
zoo: local response normalisation, no batch normalisation, pooling sizes rounded up.

It runs without gradients, in float32, float16 or bfloat16. For speed on CPUs, memory is channels-last, the
large maps at the start are computed image by image, and 1 x 1 convolutions of the same input are one matrix
product.

Notation for tensor shapes: N images, C channels, H x W pixels, p locations of maps.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.backbones.catalog import NETWORKS, BackboneEntry
from capvid.backbones.networks import OneLayer, build_empty

# channels of (input, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection)
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
    """GoogLeNet with parameters named like the Caffe layers, with underscores for slashes."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = {"conv1_7x7_s2": (3, 64, 7), "conv2_3x3_reduce": (64, 64, 1)}
        convolutions["conv2_3x3"] = 64, 192, 3
        for name, (width, out1, reduce3, out3, reduce5, out5, pooled) in _INCEPTIONS.items():
            prefix = f"inception_{name}_"
            convolutions[f"{prefix}1x1"] = width, out1, 1
            convolutions[f"{prefix}3x3_reduce"] = width, reduce3, 1
            convolutions[f"{prefix}3x3"] = reduce3, out3, 3
            convolutions[f"{prefix}5x5_reduce"] = width, reduce5, 1
            convolutions[f"{prefix}5x5"] = reduce5, out5, 5
            convolutions[f"{prefix}pool_proj"] = width, pooled, 1
        for name, (width, out, kernel) in convolutions.items():
            stride = 2 if name.endswith("_s2") else 1
            self.add_module(name, nn.Conv2d(width, out, kernel, stride, padding=kernel // 2))
        self.loss3_classifier = nn.Linear(1024, 1000)

    @torch.no_grad()
    def forward(self, images: Tensor, layers: Collection[str] = ("pool5/7x7_s1",)) -> dict[str, Tensor]:
        """Compute the requested layers.

        Args:
            images: (N, 3, H, W), BGR 0..255 minus (104, 117, 123), H and W from 224 to 227, in the dtype of
                the weights: float32, float16 or bfloat16.
            layers: names in ``LAYERS``.

        Returns:
            Layers by name: ``inception_5b/output`` (N, 49, 1024) with the locations row by row;
            ``pool5/7x7_s1`` (N, 1024); ``loss3/classifier`` (N, 1000), the logits.
        """
        images = images.contiguous(memory_format=torch.channels_last)
        chunk_size = 1 if images.device.type == "cpu" else max(1, len(images))
        x = torch.cat([self._stem(chunk) for chunk in images.split(chunk_size)])  # (N, 192, 28, 28)
        for name in _INCEPTIONS:
            x = self._inception(name, max_pool(x) if name in _POOL_BEFORE else x)
        pooled = F.avg_pool2d(x, 7, stride=1).flatten(1)  # (N, 1024, 7, 7) to (N, 1024)
        outputs = {"inception_5b/output": x.flatten(2).transpose(1, 2), "pool5/7x7_s1": pooled}
        if "loss3/classifier" in layers:
            outputs["loss3/classifier"] = self.loss3_classifier(pooled)
        return {layer: outputs[layer] for layer in layers}

    def _stem(self, images: Tensor) -> Tensor:
        """Compute the layers before the inception modules: (n, 3, H, W) to (n, 192, 28, 28)."""
        # ReLU and max-pooling commute, and the pooled map is smaller
        x = F.relu_(max_pool(self.get_submodule("conv1_7x7_s2")(images)))  # (n, 64, 56, 56)
        x = F.relu_(self._linear(local_response_norm(x), "conv2_3x3_reduce"))
        x = F.relu_(self.get_submodule("conv2_3x3")(x))  # (n, 192, 56, 56)
        return max_pool(local_response_norm(x))

    def _inception(self, name: str, x: Tensor) -> Tensor:
        """Compute an inception module; the ReLU of each branch writes into a slice of the output."""
        prefix = f"inception_{name}_"
        _, out1, reduce3, out3, reduce5, out5, pooled = _INCEPTIONS[name]
        shape = (len(x), out1 + out3 + out5 + pooled, *x.shape[2:])
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        branches = out.split((out1, out3, out5, pooled), dim=1)
        projected = self._linear(max_pool(x, stride=1), f"{prefix}pool_proj")
        torch.clamp_min(projected, 0, out=branches[3])
        reduced = self._linear(x, f"{prefix}1x1", f"{prefix}3x3_reduce", f"{prefix}5x5_reduce")
        for_1x1, for_3x3, for_5x5 = reduced.split((out1, reduce3, reduce5), dim=1)
        torch.clamp_min(for_1x1, 0, out=branches[0])
        torch.clamp_min(self.get_submodule(f"{prefix}3x3")(F.relu(for_3x3)), 0, out=branches[1])
        torch.clamp_min(self.get_submodule(f"{prefix}5x5")(F.relu(for_5x5)), 0, out=branches[2])
        return out

    def _linear(self, x: Tensor, *names: str) -> Tensor:
        """Apply several 1 x 1 convolutions to x (N, C, H, W) as one; their channels are concatenated."""
        convolutions = [self.get_submodule(name) for name in names]
        weights, biases = ([getattr(conv, kind) for conv in convolutions] for kind in ("weight", "bias"))
        weight, bias = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (weights, biases))
        return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)


def max_pool(x: Tensor, *, stride: int = 2) -> Tensor:
    """Take the maximum over 3 x 3 windows, as Caffe does.

    Args:
        x: (N, C, H, W), H and W at least 3.
        stride: 2, where windows may extend beyond the edge, or 1, where each pixel is the centre of a window.

    Returns:
        (N, C, H // 2, W // 2), or (N, C, H, W) with stride 1.
    """
    return F.max_pool2d(x, 3, stride, padding=2 - stride, ceil_mode=stride == 2)


def local_response_norm(x: Tensor) -> Tensor:
    """Divide x (N, C, H, W) by (1 + 1e-4 / 5 * sum of 5 neighbouring squares) ** 0.75, in float32."""
    squares = F.pad(x.float().square(), (0, 0, 0, 0, 2, 2))  # (N, C + 4, H, W)
    channels = x.shape[1]
    total = torch.ones((), device=x.device)
    for shift in range(5):
        total = total + 1e-4 / 5 * squares[:, shift : shift + channels]
    root = total.sqrt()
    # sum ** 0.75 by two square roots, which are much faster than a power
    return (x / (root * root.sqrt())).to(x.dtype)


@NETWORKS.register("googlenet")
def build_googlenet(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build GoogLeNet."""
    return OneLayer(build_empty(GoogLeNet), layer)
