"""Pixels to the numbers that a network computes with."""

from __future__ import annotations

import torch
from torch import Tensor

from capvid.features.registry import Preprocess


def normalise(crops: Tensor, how: Preprocess) -> Tensor:
    """Turn RGB (T, 3, h, w) uint8 into (value / scale - mean) / std float32 in the network's order."""
    values = (crops.flip(1) if how.order == "BGR" else crops).to(torch.float32)
    if how.scale != 1:
        values = values.div_(how.scale)
    values = values.sub_(torch.tensor(how.mean, device=crops.device).view(3, 1, 1))
    if set(how.std) != {1.0}:
        values = values.div_(torch.tensor(how.std, device=crops.device).view(3, 1, 1))
    return values.contiguous(memory_format=torch.channels_last)
