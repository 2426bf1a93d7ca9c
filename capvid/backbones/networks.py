"""Networks of timm, torchvision and transformers, cut at one layer, and helpers for all networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    """Wrapper of ``network`` whose tensors have the names in the network's published weights file."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def published_name(self, name: str) -> str:
        """Return the published name of a tensor of the network."""
        return name

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's tensors by published name."""
        return {self.published_name(name): t for name, t in self.network.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the network's tensors by published name."""
        tensors = {name: state_dict[self.published_name(name)] for name in self.network.state_dict()}
        return self.network.load_state_dict(tensors, *args, **kwargs)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the output of the network."""
        return self.network(images)


class OneLayer(Named):
    """A network with several named outputs, reduced to one of them."""

    def __init__(self, network: Any, layer: str) -> None:
        super().__init__(network)
        self.layer = layer

    def forward(self, images: Tensor) -> Tensor:
        """Compute the layer."""
        return self.network(images, (self.layer,))[self.layer]


class Map(Named):
    """The last feature map of a timm network, its locations flattened row by row, or their ``mean``."""

    def __init__(self, network: Any, *, mean: bool) -> None:
        super().__init__(network)
        self.mean = mean

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, L, D), or the mean (N, D); class and register tokens are left out."""
        features = self.network.forward_features(images)  # (N, D, rows, columns), or tokens (N, P + L, D)
        if features.ndim == 4:
            locations = features.flatten(2).transpose(1, 2)
        else:
            locations = features[:, getattr(self.network, "num_prefix_tokens", 0) :]
        return locations.mean(1) if self.mean else locations


@NETWORKS.register("timm")
def build_timm(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build a network of timm up to its pooled output (fc7 of VGG), or up to its last map or the map's mean.

    The mean over conv5_3 of VGG-16 is the frame feature of key-value memory (Jain et al. 2016, Section 5.1).
    """
    import timm

    options = {"num_classes": 0, **entry.config}
    network = build_empty(partial(timm.create_model, entry.architecture or entry.name, **options))
    for module in network.modules():  # buffers that no weights file contains, such as rotary positions
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    mean = layer.endswith("/mean")
    if entry.layers[layer].locations is None and not mean:
        return Named(network)
    if type(network).__name__ == "VGG":  # the papers use the map before the last pooling
        network.features = network.features[:-1]
        network.pre_logits = nn.Identity()
    return Map(network, mean=mean)


@NETWORKS.register("torchvision")
def build_torchvision(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build a clip network of torchvision up to its global average pool."""
    from torchvision.models import get_model

    network = build_empty(lambda: get_model(entry.architecture or entry.name, weights=None))
    for classifier in ("fc", "classifier"):
        if hasattr(network, classifier):
            setattr(network, classifier, nn.Identity())
    if type(network).__name__ == "S3D":  # its forward ends in a mean, which replaces the pool
        network.avgpool = nn.Identity()
    return Named(network)


class Flow(Named):
    """Optical flow from the first to the second frame of a clip, averaged over the cells of a grid.

    Three numbers per cell, in input pixels: mean motion to the right (u), down (v), and mean sqrt(u^2 + v^2).
    """

    def __init__(self, network: Any, *, as_map: bool) -> None:
        super().__init__(network)
        self.as_map = as_map

    def forward(self, clips: Tensor) -> Tensor:
        """Compute the flow of clips (N, 3, 2, h, w): (N, 49, 3), or the same as one vector (N, 147)."""
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
    """CLIP's image embedding in the space shared with text, (N, D), not normalised."""

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

    def published_name(self, name: str) -> str:
        """Return the name in the pre-training file, where two of the biases have other names."""
        for ours, theirs in (("query.bias", "q_bias"), ("value.bias", "v_bias")):
            name = name.replace(f".attention.attention.{ours}", f".attention.attention.{theirs}")
        return f"videomae.{name}"

    def forward(self, clips: Tensor) -> Tensor:
        """Compute the mean token of clips (N, 3, C, h, w): (N, D)."""
        return self.network(pixel_values=clips.transpose(1, 2)).last_hidden_state.mean(1)


@NETWORKS.register("videomae")
def build_videomae(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build VideoMAE's encoder in transformers (Tong et al., NeurIPS 2022, arXiv:2203.12602)."""
    from transformers import VideoMAEConfig, VideoMAEModel

    return VideoMaeEncoder(build_empty(lambda: VideoMAEModel(VideoMAEConfig(**entry.config))))


class VJepa2Encoder(Named):
    """The mean over V-JEPA 2's tokens of a clip."""

    def published_name(self, name: str) -> str:
        """Return the name in the published file, where the predictor stands beside the encoder."""
        return f"encoder.{name}"

    def forward(self, clips: Tensor) -> Tensor:
        """Compute the mean token of clips (N, 3, C, h, w): (N, D)."""
        return self.network(pixel_values_videos=clips.transpose(1, 2)).last_hidden_state.mean(1)


@NETWORKS.register("vjepa2")
def build_vjepa2(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build V-JEPA 2's encoder in transformers (Assran et al., 2025, arXiv:2506.09985)."""
    from transformers import VJEPA2Config, VJEPA2Model

    return VJepa2Encoder(build_empty(lambda: VJEPA2Model(VJEPA2Config(**entry.config)).encoder))


@NETWORKS.register("grid")
def build_grid(entry: BackboneEntry, layer: str) -> nn.Module:
    """Mean colours on a square grid, (N, 3, h, w) -> (N, D): per colour channel, the cells row by row."""
    side = round((entry.layers[layer].width / 3) ** 0.5)
    return nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten())
