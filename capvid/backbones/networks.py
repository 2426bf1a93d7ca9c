"""Networks of timm, torchvision and transformers, cut at one layer, and what all networks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.backbones.catalog import NETWORKS, BackboneEntry

GRID = 7  # rows and columns on which a flow field is averaged


def build_empty(make: Callable[[], Any]) -> Any:
    """Build a module whose parameters and buffers are allocated but not initialised."""
    with torch.device("meta"):
        module = make()
    return module.to_empty(device="cpu")


class Named(nn.Module):
    """A wrapper of ``network`` whose tensors are named as in the network's published file."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def published(self, name: str) -> str:
        """Return the name of a tensor of the network in the published file."""
        return name

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's tensors by their published names."""
        return {self.published(name): t for name, t in self.network.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the network's tensors by their published names."""
        tensors = {name: state_dict[self.published(name)] for name in self.network.state_dict()}
        return self.network.load_state_dict(tensors, *args, **kwargs)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the output of the network."""
        return self.network(images)


class OneLayer(Named):
    """A network of several named layers, reduced to one of them."""

    def __init__(self, network: Any, layer: str) -> None:
        super().__init__(network)
        self.layer = layer

    def forward(self, images: Tensor) -> Tensor:
        """Compute the layer."""
        return self.network(images, (self.layer,))[self.layer]


class Map(Named):
    """The last feature map of a timm network, with the locations row by row."""

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, L, D)."""
        features = self.network.forward_features(images)  # (N, D, rows, columns), or tokens (N, L, D)
        return features.flatten(2).transpose(1, 2) if features.ndim == 4 else features


@NETWORKS.register("timm")
def build_timm(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build a network of timm: its pooled output (VGG's is fc7), or its last map."""
    import timm

    name = entry.architecture or entry.name

    def make() -> Any:
        return timm.create_model(name, pretrained=False, num_classes=0)

    # the state dict of these has every tensor, so none needs to be initialised
    family = timm.models.model_entrypoint(name).__module__.rpartition(".")[2]
    plain = family in ("resnet", "vgg", "inception_v3", "efficientnet")
    network = build_empty(make) if plain else make()
    if entry.layers[layer].locations is None:
        return Named(network)
    if type(network).__name__ == "VGG":  # the papers take the map before the last pooling
        network.features = network.features[:-1]
        network.pre_logits = nn.Identity()
    return Map(network)


@NETWORKS.register("torchvision")
def build_torchvision(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build a network of clips of torchvision up to its global average pool."""
    from torchvision.models import get_model

    network = build_empty(lambda: get_model(entry.architecture or entry.name, weights=None))
    for classifier in ("fc", "classifier"):
        if hasattr(network, classifier):
            setattr(network, classifier, nn.Identity())
    if type(network).__name__ == "S3D":  # its final mean replaces the pool
        network.avgpool = nn.Identity()
    return Named(network)


class Flow(Named):
    """Optical flow from the first to the second frame of a clip, averaged on a grid.

    Three numbers per cell: mean motion to the right (u), down (v), and mean sqrt(u^2 + v^2), in input pixels.
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


@NETWORKS.register("raft")
def build_raft(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build torchvision's RAFT (Teed and Deng, ECCV 2020, arXiv:2003.12039)."""
    from torchvision.models import get_model

    network = build_empty(lambda: get_model(entry.architecture or entry.name, weights=None))
    return Flow(network, as_map=entry.layers[layer].locations is not None)


class ClipImage(Named):
    """CLIP's embedding of an image in the space shared with text, (N, D), not normalised."""

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, D)."""
        return self.network(pixel_values=images).image_embeds


@NETWORKS.register("clip")
def build_clip(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build the image side of CLIP in transformers (Radford et al., ICML 2021, arXiv:2103.00020)."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    network = build_empty(lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**entry.config)))
    embeddings = network.vision_model.embeddings
    embeddings.position_ids = torch.arange(embeddings.num_positions).expand((1, -1))
    return ClipImage(network)


class VideoMaeEncoder(Named):
    """The mean over VideoMAE's tokens of a clip."""

    def published(self, name: str) -> str:
        """Return the name in the pre-training file, where two of the biases are called otherwise."""
        for now, then in (("query.bias", "q_bias"), ("value.bias", "v_bias")):
            name = name.replace(f".attention.attention.{now}", f".attention.attention.{then}")
        return f"videomae.{name}"

    def forward(self, clips: Tensor) -> Tensor:
        """Turn clips (N, 3, C, h, w) into (N, D)."""
        return self.network(pixel_values=clips.transpose(1, 2)).last_hidden_state.mean(1)


@NETWORKS.register("videomae")
def build_videomae(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build transformers' encoder of VideoMAE (Tong et al., NeurIPS 2022, arXiv:2203.12602)."""
    from transformers import VideoMAEConfig, VideoMAEModel

    return VideoMaeEncoder(build_empty(lambda: VideoMAEModel(VideoMAEConfig(**entry.config))))


@NETWORKS.register("grid")
def build_grid(entry: BackboneEntry, layer: str) -> nn.Module:
    """Mean colours on a square grid, (N, 3, h, w) -> (N, D): cells row by row, for each colour in turn."""
    side = round((entry.layers[layer].width / 3) ** 0.5)
    return nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten())
