"""BVLC GoogLeNet, the network of the papers' ``pool5/7x7_s1``, as Caffe computes it.

Szegedy et al., Going Deeper with Convolutions, CVPR 2015 (arXiv:1409.4842), in the version of the Caffe model
zoo: local response normalisation, no batch normalisation, pooling sizes rounded up.

It runs without gradients, in float32, float16 or bfloat16. For speed on CPUs, memory is channels-last, the
large maps at the start are computed image by image, max-pooling compares shifted slices, and 1 x 1
convolutions of the same input are one matrix product.

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
_NORM_SIZE, _NORM_ALPHA = 5, 1e-4  # channels in a sum of squares, weight of their mean
# elements that are pooled at once, and normalised at once by a thread: they fit into a core's cache
_POOL_BLOCK, _NORM_BLOCK = 300_000, 1 << 16
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
        norm = LocalResponseNorm(images.device)
        x = torch.cat([self._stem(chunk, norm) for chunk in images.split(chunk_size)])  # (N, 192, 28, 28)
        for name in _INCEPTIONS:
            x = self._inception(name, max_pool(x) if name in _POOL_BEFORE else x)
        pooled = F.avg_pool2d(x, 7, stride=1).flatten(1)  # (N, 1024, 7, 7) to (N, 1024)
        outputs = {"inception_5b/output": x.flatten(2).transpose(1, 2), "pool5/7x7_s1": pooled}
        if "loss3/classifier" in layers:
            outputs["loss3/classifier"] = self.loss3_classifier(pooled)
        return {layer: outputs[layer] for layer in layers}

    def _stem(self, images: Tensor, norm: LocalResponseNorm) -> Tensor:
        """Compute the layers before the inception modules: (n, 3, H, W) to (n, 192, 28, 28)."""
        # ReLU and max-pooling commute, and the pooled map is smaller
        x = F.relu_(max_pool(self.get_submodule("conv1_7x7_s2")(images)))  # (n, 64, 56, 56)
        x = F.relu_(self._linear(norm(x), "conv2_3x3_reduce"))
        x = F.relu_(self.get_submodule("conv2_3x3")(x))  # (n, 192, 56, 56)
        return max_pool(norm(x))

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
        x: (N, C, H, W), H and W at least 3; in half precision maxima must be neither negative nor NaN.
        stride: 2, where windows may extend beyond the edge, or 1, where each pixel is the centre of a window.

    Returns:
        (N, C, H // 2, W // 2), or (N, C, H, W) with stride 1.
    """
    half = x.element_size() == 2
    if x.device.type != "cpu" or (stride == 2 and not half):
        return F.max_pool2d(x, 3, stride, padding=2 - stride, ceil_mode=stride == 2)
    rows, columns = (side if stride == 1 else side // 2 for side in x.shape[2:])
    shape = (*x.shape[:2], rows, columns)
    pooled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    # non-negative floats are ordered like the integers with the same bits, which are faster to compare
    source, target = (y.view(torch.int16) if half else y for y in (x, pooled))
    maxima = _maxima if stride == 2 else _centred_maxima
    chunk_size = _POOL_BLOCK * len(x) // max(1, x.numel()) or 1
    for images, out in zip(source.split(chunk_size), target.split(chunk_size), strict=True):
        by_column = torch.empty_like(images[:, :, :rows])
        maxima(images.transpose(0, 2), by_column.transpose(0, 2))
        maxima(by_column.transpose(0, 3), out.transpose(0, 3))
    return pooled


def _maxima(x: Tensor, out: Tensor) -> None:
    """Take the maxima of windows of 3 at stride 2 along the first dimension; the last may have only 2."""
    torch.maximum(x[: 2 * len(out) : 2], x[1::2], out=out)
    third = x[2::2]
    complete = out[: len(third)]
    torch.maximum(complete, third, out=complete)


def _centred_maxima(x: Tensor, out: Tensor) -> None:
    """Take the maximum of each element and its neighbours along the first dimension."""
    pairs = torch.maximum(x[:-1], x[1:])
    torch.maximum(pairs[:-1], pairs[1:], out=out[1:-1])
    out[0] = pairs[0]
    out[-1] = pairs[-1]


class LocalResponseNorm:
    """Division by (1 + alpha / 5 * sum of squares over 5 neighbouring channels) ** 0.75, in float32.

    It is computed in blocks of locations that fit into a CPU's cache.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: dict[tuple[int, int], _NormBlock] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x (N, C, H, W), in place if its memory is channels-last."""
        x = x.contiguous(memory_format=torch.channels_last)
        channels, locations, num_blocks = x.shape[1], x.numel() // x.shape[1], 1
        if self.device.type == "cpu":
            num_blocks += x.numel() // (_NORM_BLOCK * torch.get_num_threads())
        for rows in x.permute(0, 2, 3, 1).view(-1, channels).split(max(1, -(-locations // num_blocks))):
            shape = (len(rows), channels)
            if shape not in self.blocks:
                self.blocks[shape] = _NormBlock(*shape, self.device)
            self.blocks[shape].normalise_(rows)
        return x


class _NormBlock:
    """Buffers for normalising p locations of C channels, and the slices of them that are summed.

    A row has C + 4 numbers, so that sums along all rows at once do not mix the channels of two locations.
    """

    def __init__(self, locations: int, channels: int, device: torch.device) -> None:
        width, side = channels + _NORM_SIZE - 1, _NORM_SIZE // 2
        # each square includes a fifth of the 1 that is added to their sum; the padding consists of it alone
        self.share = torch.full((), 1 / _NORM_SIZE, device=device)
        self.converted = torch.empty(locations, channels, device=device)
        squares = torch.full((locations * width,), 1 / _NORM_SIZE, device=device)
        self.root, self.total = pairs, total = torch.ones((2, locations * width), device=device)
        self.squares = squares.view(-1, width)[:, side:-side]
        self.two = squares[:-1], squares[1:], pairs[:-1]
        self.four = pairs[:-3], pairs[2:-1], total[:-3]
        self.five = total[:-4], squares[4:]
        self.by_location = total.view(-1, width)[:, :channels]

    def normalise_(self, x: Tensor) -> None:
        """Normalise x (p, C) in place."""
        values = x if x.dtype == torch.float32 else self.converted.copy_(x)
        torch.addcmul(self.share, values, values, value=_NORM_ALPHA / _NORM_SIZE, out=self.squares)
        torch.add(*self.two[:2], out=self.two[2])
        torch.add(*self.four[:2], out=self.four[2])
        self.five[0].add_(self.five[1])
        # sum ** 0.75 by two square roots, which are much faster than a power
        torch.sqrt(self.total, out=self.root)
        self.total.mul_(self.root).sqrt_()
        values.div_(self.by_location)
        if values is not x:
            x.copy_(values)


@NETWORKS.register("googlenet")
def build_googlenet(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build GoogLeNet."""
    return OneLayer(build_empty(GoogLeNet), layer)
