"""Image preprocessing of backbones: crop, resize and normalize. Worker processes use it without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from capvid.backbones.catalog import Preprocess
from capvid.video.frame_filter import letterbox

if TYPE_CHECKING:
    from torch import Tensor

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_LARGE = 720  # pixels of a short side

Box = tuple[float, float, float, float]  # left, top, right and bottom, in pixels


def prepare(frames: np.ndarray, how: Preprocess) -> np.ndarray:
    """Crop and resize the frames of one video, as Pillow does, with antialiasing and rounding.

    Args:
        frames: (T, H, W, 3) uint8.
        how: crop and size.

    Returns:
        (T, h, w, 3) uint8: h and w are ``how.size``, or both ``how.crop`` where there is none.
    """
    frames = trim_borders(frames, how)
    height, width = frames.shape[1:3]
    top, left, rows, columns = _crop_to_aspects(height, width, how)
    frames = frames[:, top : top + rows, left : left + columns]
    target, box = _crop_box(rows, columns, how)
    prepared = np.empty((len(frames), *target, 3), np.uint8)
    for row, frame in zip(prepared, frames, strict=True):
        row[:] = resize(frame, target, box, how)
    return prepared


def trim_borders(frames: np.ndarray, how: Preprocess) -> np.ndarray:
    """Cut the black borders off frames (T, H, W, 3) of one video, if ``how`` asks for it."""
    if not how.trim:
        return frames
    top, bottom, left, right = letterbox(frames)
    return frames[:, top : frames.shape[1] - bottom, left : frames.shape[2] - right]


def crop_box(height: int, width: int, how: Preprocess) -> tuple[tuple[int, int], Box]:
    """Return the (h, w) of a backbone's input, and the box of a frame without borders that it shows."""
    top, left, rows, columns = _crop_to_aspects(height, width, how)
    target, box = _crop_box(rows, columns, how)
    return target, (left + box[0], top + box[1], left + box[2], top + box[3])


def resize(frame: np.ndarray, target: tuple[int, int], box: Box, how: Preprocess) -> np.ndarray:
    """Resize the ``box`` of a frame (H, W, 3) uint8 to ``target``, (h, w, 3) uint8."""
    return np.asarray(Image.fromarray(frame).resize(target[::-1], _FILTERS[how.interpolation], box=box))


def shrink(frames: np.ndarray) -> np.ndarray:
    """Shrink large frames by an integer factor, averaging, to a short side of at least 720 pixels.

    Args:
        frames: (T, H, W, 3) uint8.

    Returns:
        (T, ceil(H / factor), ceil(W / factor), 3) uint8; the frames themselves where the factor is 1.
    """
    factor = min(frames.shape[1:3]) // _LARGE
    if factor < 2:
        return frames
    return np.stack([np.asarray(Image.fromarray(frame).reduce(factor)) for frame in frames])


def _crop_box(height: int, width: int, how: Preprocess) -> tuple[tuple[int, int], Box]:
    """Return the same as :func:`crop_box`, of frames within the aspects.

    The box is the part that the centre crop keeps once the short side is ``how.resize`` long; only this part
    is resized.
    """
    if how.size is not None:
        return how.size, (0.0, 0.0, float(width), float(height))
    rows, columns = (max(how.resize, int(how.resize * side / min(height, width))) for side in (height, width))
    top, left = (rows - how.crop) // 2, (columns - how.crop) // 2
    down, across = height / rows, width / columns
    right, bottom = (left + how.crop) * across, (top + how.crop) * down
    return (how.crop, how.crop), (left * across, top * down, min(right, width), min(bottom, height))


def _crop_to_aspects(height: int, width: int, how: Preprocess) -> tuple[int, int, int, int]:
    """Return top, left, rows and columns of the centre of a frame that lies within ``how.aspects``."""
    if how.aspects is None:
        return 0, 0, height, width
    least, greatest = how.aspects
    rows = min(height, max(1, round(width / least)))
    columns = min(width, max(1, round(height * greatest)))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def normalise(crops: Tensor, how: Preprocess) -> Tensor:
    """Turn RGB (T, 3, h, w) uint8 into (value / scale - mean) / std float32 in the network's order."""
    import torch

    values = (crops.flip(1) if how.order == "BGR" else crops).to(torch.float32)
    if how.scale != 1:
        values = values.div_(how.scale)
    values = values.sub_(torch.tensor(how.mean, device=crops.device).view(3, 1, 1))
    if set(how.std) != {1.0}:
        values = values.div_(torch.tensor(how.std, device=crops.device).view(3, 1, 1))
    return values.contiguous(memory_format=torch.channels_last)
