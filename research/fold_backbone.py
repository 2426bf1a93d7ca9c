"""Make ``capvid-small.safetensors`` of EfficientNet-Lite2's weights, batch normalisation folded in.

capvid convert efficientnet-lite2-9656183e.pth --as efficientnet-lite2 -o efficientnet-lite2.safetensors
python research/fold_backbone.py efficientnet-lite2.safetensors capvid-small.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from capvid.backbones.capvid_small import STAGES

EPSILON = 1e-3  # of TensorFlow's batch normalisation


def fold(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return capvid-small's weights in half precision from timm's ``tf_efficientnet_lite2``."""
    folded: dict[str, Tensor] = {}

    def add(name: str, convolution: str, normalisation: str) -> None:
        statistics = (
            tensors[f"{normalisation}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        weight, bias, mean, variance = statistics
        factor = weight / (variance + EPSILON).sqrt()
        folded[f"{name}.weight"] = (tensors[f"{convolution}.weight"] * factor.view(-1, 1, 1, 1)).half()
        folded[f"{name}.bias"] = (bias - mean * factor).half()

    add("stem", "conv_stem", "bn1")
    add("head", "conv_head", "bn2")
    names = [f"blocks.{stage}.{index}" for stage, options in enumerate(STAGES) for index in range(options[2])]
    for number, name in enumerate(names):
        parts = [("expand", "conv_pw", "bn1"), ("depth", "conv_dw", "bn2"), ("project", "conv_pwl", "bn3")]
        if number == 0:  # without expansion
            parts = [("depth", "conv_dw", "bn1"), ("project", "conv_pw", "bn2")]
        for part, convolution, normalisation in parts:
            add(f"blocks.{number}.{part}", f"{name}.{convolution}", f"{name}.{normalisation}")
    return folded


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    save_file(fold(load_file(source)), target)
