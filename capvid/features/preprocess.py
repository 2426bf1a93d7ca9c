"""Frames to what a network looks at: cutting and resizing. Imports no deep learning library.

Notation for array shapes: T frames, H and W their height and width, h and w height and width of the
network's input.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from capvid.features.registry import Preprocess
from capvid.video.clean import letterbox

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_LARGE = 720  # pixels of a short side


def prepare(frames: np.ndarray, how: Preprocess) -> np.ndarray:
    """Cut and resize the frames of one video as a backbone wants them.

    The resizing is that of Pillow, with antialiasing, and rounds to whole values.

    Args:
        frames: (T, H, W, 3) uint8.
        how: what is cut, and the sizes.

    Returns:
        (T, h, w, 3) uint8: h and w are ``how.size``, or both ``how.crop`` where there is none.
    """
    if how.trim:
        top, bottom, left, right = letterbox(frames)
        frames = frames[:, top : frames.shape[1] - bottom, left : frames.shape[2] - right]
    if how.aspects is not None:
        frames = _cut_to_aspect(frames, how.aspects)
    height, width = frames.shape[1:3]
    if how.size is not None:
        target, box = how.size, (0.0, 0.0, float(width), float(height))
    else:
        target, box = (how.crop, how.crop), _centre(height, width, how)
    prepared = np.empty((len(frames), *target, 3), np.uint8)
    for row, frame in zip(prepared, frames, strict=True):
        picture = Image.fromarray(frame)
        row[:] = np.asarray(picture.resize(target[::-1], _FILTERS[how.interpolation], box=box))
    return prepared


def shrink(frames: np.ndarray) -> np.ndarray:
    """Shrink large frames by a whole factor, averaging, to a short side of no less than 720 pixels.

    Args:
        frames: (T, H, W, 3) uint8.

    Returns:
        (T, ceil(H / factor), ceil(W / factor), 3) uint8; the frames themselves where the factor is 1.
    """
    factor = min(frames.shape[1:3]) // _LARGE
    if factor < 2:
        return frames
    return np.stack([np.asarray(Image.fromarray(frame).reduce(factor)) for frame in frames])


def _centre(height: int, width: int, how: Preprocess) -> tuple[float, float, float, float]:
    """Say where in a picture the centre lies that is cut once its short side is ``how.resize`` long.

    Only this part is resized. Left, top, right and bottom, in pixels of the picture as it is.
    """
    shorter = min(height, width)
    rows, columns = (max(how.resize, int(how.resize * side / shorter)) for side in (height, width))
    top, left = (rows - how.crop) // 2, (columns - how.crop) // 2
    down, across = height / rows, width / columns
    right, bottom = (left + how.crop) * across, (top + how.crop) * down
    return left * across, top * down, min(right, width), min(bottom, height)


def _cut_to_aspect(frames: np.ndarray, aspects: tuple[float, float]) -> np.ndarray:
    """Cut the centre of frames (T, H, W, 3) whose width / height is outside ``aspects``."""
    height, width = frames.shape[1:3]
    least, greatest = aspects
    rows = min(height, max(1, round(width / least)))
    columns = min(width, max(1, round(height * greatest)))
    top, left = (height - rows) // 2, (width - columns) // 2
    return frames[:, top : top + rows, left : left + columns]
