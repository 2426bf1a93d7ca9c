"""Frames to a network's input: cutting, resizing, normalising.

Notation for tensor shapes: T frames, H and W their height and width, S side of the crop, h and w height and
width of the network's input.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capvid.features.registry import Preprocess
from capvid.video.clean import letterbox


def prepare(frames: np.ndarray | Tensor, how: Preprocess) -> Tensor:
    """Cut and resize the frames of one video as a backbone wants them.

    Args:
        frames: (T, H, W, 3) uint8.
        how: what is cut, and the sizes.

    Returns:
        (T, 3, h, w) uint8: h and w are ``how.size``, or both ``how.crop`` where there is none.
    """
    images = torch.as_tensor(frames)
    if how.trim:
        top, bottom, left, right = letterbox(images.numpy())
        images = images[:, top : images.shape[1] - bottom, left : images.shape[2] - right]
    if how.aspects is not None:
        images = _cut_to_aspect(images, how.aspects)
    if how.size is None:
        return resize_and_crop(images, how)
    return _resized(images.permute(0, 3, 1, 2), how.size).contiguous()


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
    rows, columns = (max(how.resize, int(how.resize * side / shorter)) for side in (height, width))
    images = _resized(images, (rows, columns))
    top, left = (rows - how.crop) // 2, (columns - how.crop) // 2
    return images[:, :, top : top + how.crop, left : left + how.crop].contiguous()


def normalise(crops: Tensor, how: Preprocess) -> Tensor:
    """Turn RGB (T, 3, h, w) uint8 into (value / scale - mean) / std float32 in the network's order."""
    values = crops.flip(1) if how.order == "BGR" else crops
    mean = torch.tensor(how.mean, device=crops.device).view(3, 1, 1)
    std = torch.tensor(how.std, device=crops.device).view(3, 1, 1)
    values = values.to(torch.float32).div_(how.scale).sub_(mean).div_(std)
    return values.contiguous(memory_format=torch.channels_last)


def _cut_to_aspect(images: Tensor, aspects: tuple[float, float]) -> Tensor:
    """Cut the centre of images (T, H, W, 3) whose width / height is outside ``aspects``."""
    height, width = images.shape[1:3]
    least, greatest = aspects
    rows = min(height, max(1, round(width / least)))
    columns = min(width, max(1, round(height * greatest)))
    top, left = (height - rows) // 2, (width - columns) // 2
    return images[:, top : top + rows, left : left + columns]


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images (T, 3, H, W) uint8 to (T, 3, *size), bilinear with antialiasing, in whole values."""
    if tuple(images.shape[2:]) == size:
        return images
    return F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
