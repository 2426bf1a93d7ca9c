"""The networks of backbones: built without weights, cut off at the layer that is taken.

What a builder gives is a module: (N, 3, h, w), or clips (N, 3, C, h, w), to (N, D) or (N, L, D). Its tensors
have the names that they have in the published file.

Notation for tensor shapes: N frames or clips, C frames of a clip, L locations of a feature map, D width of
the layer, h and w height and width of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from capvid.features import libraries
from capvid.features.registry import BackboneEntry


def build(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build the network of ``entry`` up to ``layer``; its weights are still to be filled in."""
    return _BUILDERS[entry.kind](entry, layer)


class _OneLayer(libraries.Named):
    """A network of several named layers, reduced to one of them."""

    def __init__(self, network: Any, layer: str) -> None:
        super().__init__(network)
        self.layer = layer

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images, (self.layer,))[self.layer]


def _build_googlenet(entry: BackboneEntry, layer: str) -> nn.Module:
    from capvid.features.googlenet import GoogLeNet

    return _OneLayer(libraries.without_numbers(GoogLeNet), layer)


def _build_x3d(entry: BackboneEntry, layer: str) -> nn.Module:
    from capvid.features.x3d import X3DXS

    return _OneLayer(libraries.without_numbers(X3DXS), layer)


def _build_c3d(entry: BackboneEntry, layer: str) -> nn.Module:
    from capvid.features.c3d import C3D

    network = libraries.without_numbers(C3D)
    if layer == "conv5b":
        network.fc6 = network.fc7 = nn.Identity()
    elif layer == "fc6":
        network.fc7 = nn.Identity()
    return _OneLayer(network, layer)


def _build_grid(entry: BackboneEntry, layer: str) -> nn.Module:
    """Mean colours on a square grid, (N, 3, h, w) -> (N, D): fields row by row, for each colour in turn."""
    side = round((entry.layers[layer].width / 3) ** 0.5)
    return nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten())


def _build_student(entry: BackboneEntry, layer: str) -> nn.Module:
    from capvid.features.student import Student

    return Student(layer)


_BUILDERS: dict[str, Callable[[BackboneEntry, str], nn.Module]] = {
    "c3d": _build_c3d,
    "clip": libraries.build_clip,
    "googlenet": _build_googlenet,
    "grid": _build_grid,
    "raft": libraries.build_raft,
    "student": _build_student,
    "timm": libraries.build_timm,
    "torchvision": libraries.build_torchvision,
    "videomae": libraries.build_videomae,
    "x3d": _build_x3d,
}
