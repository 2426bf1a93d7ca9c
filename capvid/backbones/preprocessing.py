"""Image preprocessing of backbones: crop, resize and normalise. Worker processes use it without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from capvid.backbones.catalog import Preprocess
from capvid.video.frame_filter import letterbox

if TYPE_CHECKING:
    from torch import Tensor

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_SHRUNK_SIDE = 720  # minimum short side of shrunk frames, in pixels

Box = tuple[float, float, float, float]  # left, top, right and bottom, in pixels


def prepare(frames: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Crop and resize the frames of one video, as Pillow does, with antialiasing and rounding.

    Args:
        frames: (T, H, W, 3) uint8.
        preprocess: crop and size.

    Returns:
        (T, h, w, 3) uint8; (h, w) is ``preprocess.size`` or, without it, (crop, crop).
    """
    frames = trim_borders(frames, preprocess)
    height, width = frames.shape[1:3]
    size, (top, left, rows, columns), box = crop_boxes(height, width, preprocess)
    frames = frames[:, top : top + rows, left : left + columns]
    prepared = np.empty((len(frames), *size, 3), np.uint8)
    for row, frame in zip(prepared, frames, strict=True):
        row[:] = resize(frame, size, box, preprocess)
    return prepared


def trim_borders(frames: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Cut the black borders off the frames (T, H, W, 3) of one video, if ``preprocess.trim`` is set."""
    if not preprocess.trim:
        return frames
    top, bottom, left, right = letterbox(frames)
    return frames[:, top : frames.shape[1] - bottom, left : frames.shape[2] - right]


def crop_boxes(
    height: int, width: int, preprocess: Preprocess
) -> tuple[tuple[int, int], tuple[int, int, int, int], Box]:
    """Return which part of a frame, without borders, becomes the network's input.

    Returns:
        (h, w) of the input; top, left, rows and columns of the centre of the frame that lies within
        ``aspects``; and the box of this centre that is resized to (h, w). With ``resize`` and ``crop``, it is
        what the centre crop keeps once the short side is ``resize`` long.
    """
    rows, columns = height, width
    if preprocess.aspects is not None:
        minimum, maximum = preprocess.aspects
        rows, columns = (
            min(height, max(1, round(width / minimum))),
            min(width, max(1, round(height * maximum))),
        )
    centre = (height - rows) // 2, (width - columns) // 2, rows, columns
    size = preprocess.size
    if preprocess.max_pixels is not None:
        scale = min(1.0, (preprocess.max_pixels / (rows * columns)) ** 0.5)
        size = max(1, int(rows * scale)), max(1, int(columns * scale))
    if size is not None:
        return size, centre, (0.0, 0.0, float(columns), float(rows))
    short, crop = preprocess.resize, preprocess.crop
    height, width = [max(short, int(short * side / min(rows, columns))) for side in (rows, columns)]
    top, left = (height - crop) // 2, (width - crop) // 2
    down, across = rows / height, columns / width  # frame pixels per pixel of the resized frame
    right, bottom = min((left + crop) * across, columns), min((top + crop) * down, rows)
    return (crop, crop), centre, (left * across, top * down, right, bottom)


def resize(frame: np.ndarray, size: tuple[int, int], box: Box, preprocess: Preprocess) -> np.ndarray:
    """Resize the ``box`` of a frame (H, W, 3) uint8 to ``size``: (h, w, 3) uint8."""
    return np.asarray(Image.fromarray(frame).resize(size[::-1], _FILTERS[preprocess.interpolation], box=box))


def shrink(frames: np.ndarray) -> np.ndarray:
    """Shrink large frames by an integer factor, by averaging, to a short side of at least 720 pixels.

    Args:
        frames: (T, H, W, 3) uint8.

    Returns:
        (T, ceil(H / factor), ceil(W / factor), 3) uint8; ``frames`` itself if the factor is 1.
    """
    factor = min(frames.shape[1:3]) // _SHRUNK_SIDE
    if factor < 2:
        return frames
    return np.stack([np.asarray(Image.fromarray(frame).reduce(factor)) for frame in frames])


def normalise(crops: Tensor, preprocess: Preprocess) -> Tensor:
    """Return (value / scale - mean) / std of RGB crops (T, 3, h, w) uint8, in float32 and ``order``."""
    import torch

    values = (crops.flip(1) if preprocess.order == "BGR" else crops).to(torch.float32)
    if preprocess.scale != 1:
        values = values.div_(preprocess.scale)
    values = values.sub_(torch.tensor(preprocess.mean, device=crops.device).view(3, 1, 1))
    if set(preprocess.std) != {1.0}:
        values = values.div_(torch.tensor(preprocess.std, device=crops.device).view(3, 1, 1))
    return values.contiguous(memory_format=torch.channels_last)
