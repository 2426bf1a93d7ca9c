"""Networks that other libraries have (timm, torchvision, transformers), cut off at one layer.

Each is built from its configuration alone, without weights and without a download; what lies beyond the layer
is left out, and with it its tensors.

Notation for tensor shapes: N frames or clips, C frames of a clip, L locations of a feature map, D width of
the layer, h and w height and width of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.features.registry import BackboneEntry

GRID = 7  # rows and columns on which a flow field is averaged


def without_numbers(make: Callable[[], Any]) -> Any:
    """Build a module whose parameters and buffers have memory but no values yet."""
    with torch.device("meta"):
        module = make()
    return module.to_empty(device="cpu")


class Named(nn.Module):
    """A module around ``network`` whose tensors have the names of the network's published file."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def published(self, name: str) -> str:
        """Give the name that the tensor ``name`` of the network has in the published file."""
        return name

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give the network's tensors by their published names."""
        return {self.published(name): t for name, t in self.network.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Fill in the network's tensors from their published names."""
        names = self.network.state_dict()
        return self.network.load_state_dict(
            {n: state_dict[self.published(n)] for n in names}, *args, **kwargs
        )


class Pooled(Named):
    """A network of images or clips whose own output, its classifier left out, is the layer."""

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, D)."""
        return self.network(images)


class Map(Named):
    """The last feature map of a timm network, (N, L, D) with the places row by row."""

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, L, D)."""
        features = self.network.forward_features(images)  # (N, D, rows, columns), or tokens (N, L, D)
        return features.flatten(2).transpose(1, 2) if features.ndim == 4 else features


def build_timm(entry: BackboneEntry, layer: str) -> nn.Module:
    """Let timm build ``entry.architecture``: its pooled output (VGG's is fc7), or its last map."""
    import timm

    name = entry.architecture or entry.name

    def make() -> Any:
        return timm.create_model(name, pretrained=False, num_classes=0)

    # of these all numbers are in the state dict, so that none need be computed now
    family = timm.models.model_entrypoint(name).__module__.rpartition(".")[2]
    plain = family in ("resnet", "vgg", "inception_v3", "efficientnet")
    network = without_numbers(make) if plain else make()
    if entry.layers[layer].locations is None:
        return Pooled(network)
    if type(network).__name__ == "VGG":  # the papers take the map before the last pooling
        network.features = network.features[:-1]
        network.pre_logits = nn.Identity()
    return Map(network)


def build_torchvision(entry: BackboneEntry, layer: str) -> nn.Module:
    """Let torchvision build a network of clips up to its global average pool."""
    from torchvision.models import get_model

    network = without_numbers(lambda: get_model(entry.architecture or entry.name, weights=None))
    for classifier in ("fc", "classifier"):
        if hasattr(network, classifier):
            setattr(network, classifier, nn.Identity())
    if type(network).__name__ == "S3D":  # the mean that it takes in the end does for all of the pool
        network.avgpool = nn.Identity()
    return Pooled(network)


class Flow(Named):
    """Optical flow from the first to the second frame of a clip, averaged on a grid.

    Three numbers for each field: how far it moves to the right (u), down (v), and sqrt(u^2 + v^2) on average,
    in pixels of the input.
    """

    def __init__(self, network: Any, *, as_map: bool) -> None:
        super().__init__(network)
        self.as_map = as_map

    def forward(self, clips: Tensor) -> Tensor:
        """Turn clips (N, 3, 2, h, w) into (N, 49, 3), or the same as one vector (N, 147)."""
        first, second = (clips[:, :, number].contiguous() for number in range(2))
        flow = self.network(first, second)[-1]  # (N, 2, h, w)
        fields = torch.cat([flow, flow.square().sum(1, keepdim=True).sqrt()], dim=1)
        grid = F.adaptive_avg_pool2d(fields, GRID).flatten(2).transpose(1, 2)  # (N, 49, 3)
        return grid if self.as_map else grid.flatten(1)


def build_raft(entry: BackboneEntry, layer: str) -> nn.Module:
    """Let torchvision build RAFT (Teed and Deng, ECCV 2020, arXiv:2003.12039)."""
    from torchvision.models import get_model

    network = without_numbers(lambda: get_model(entry.architecture or entry.name, weights=None))
    return Flow(network, as_map=entry.layers[layer].locations is not None)


class ClipImage(Named):
    """CLIP's embedding of an image, after the projection into the space that it shares with text."""

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, D), not normalised."""
        return self.network(pixel_values=images).image_embeds


def build_clip(entry: BackboneEntry, layer: str) -> nn.Module:
    """Let transformers build the image side of CLIP (Radford et al., ICML 2021, arXiv:2103.00020)."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    network = without_numbers(lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**entry.config)))
    embeddings = network.vision_model.embeddings
    embeddings.position_ids = torch.arange(embeddings.num_positions).expand((1, -1))
    return ClipImage(network)


class VideoMaeEncoder(Named):
    """The mean over VideoMAE's tokens of a clip."""

    def published(self, name: str) -> str:
        """Give the name in a file of pre-training; transformers has called two of the biases otherwise."""
        for now, then in (("query.bias", "q_bias"), ("value.bias", "v_bias")):
            name = name.replace(f".attention.attention.{now}", f".attention.attention.{then}")
        return f"videomae.{name}"

    def forward(self, clips: Tensor) -> Tensor:
        """Turn clips (N, 3, C, h, w) into (N, D)."""
        return self.network(pixel_values=clips.transpose(1, 2)).last_hidden_state.mean(1)


def build_videomae(entry: BackboneEntry, layer: str) -> nn.Module:
    """Let transformers build the encoder of VideoMAE (Tong et al., NeurIPS 2022, arXiv:2203.12602)."""
    from transformers import VideoMAEConfig, VideoMAEModel

    return VideoMaeEncoder(without_numbers(lambda: VideoMAEModel(VideoMAEConfig(**entry.config))))
