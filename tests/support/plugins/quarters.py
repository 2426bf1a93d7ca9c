"""Toy backbone: the mean colour of each quarter of a frame."""

from capvid.backbones.catalog import declare_backbone


@declare_backbone(
    "quarters",
    layers={"colours": 12},
    preprocess={"size": (8, 8), "order": "RGB", "scale": 255.0, "mean": (0, 0, 0), "std": (1, 1, 1)},
)
def build_quarters(entry, layer):
    """Mean colour of each quarter of a frame."""
    from torch import nn

    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
