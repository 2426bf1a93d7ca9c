"""Frames to a network's input: resizing, cropping, normalising.

Notation for tensor shapes: T frames, H and W their height and width, S side of the crop.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capvid.features.registry import Preprocess


def resize_and_crop(frames: np.ndarray | Tensor, how: Preprocess) -> Tensor:
    """Bring the short side to ``how.resize`` and cut the centre.

    The resizing is bilinear with antialiasing, as image libraries do it, and rounds to whole values.

    Args:
        frames: (T, H, W, 3) uint8.
        how: the sizes.

    Returns:
        (T, 3, S, S) uint8 with S = ``how.crop``.
    """
    images = torch.as_tensor(frames).permute(0, 3, 1, 2)  # (T, 3, H, W), its memory as (T, H, W, 3)
    height, width = images.shape[2:]
    shorter = min(height, width)
    size = [max(how.resize, int(how.resize * side / shorter)) for side in (height, width)]
    if size != [height, width]:
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
    top, left = ((side - how.crop) // 2 for side in size)
    return images[:, :, top : top + how.crop, left : left + how.crop].contiguous()


def normalise(crops: Tensor, how: Preprocess) -> Tensor:
    """Turn RGB (T, 3, S, S) uint8 into (value / scale - mean) / std float32 in the network's order."""
    values = crops.flip(1) if how.order == "BGR" else crops
    mean = torch.tensor(how.mean, device=crops.device).view(3, 1, 1)
    std = torch.tensor(how.std, device=crops.device).view(3, 1, 1)
    values = values.to(torch.float32).div_(how.scale).sub_(mean).div_(std)
    return values.contiguous(memory_format=torch.channels_last)
