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

Box = tuple[float, float, float, float]  # left, top, right and bottom, in pixels


def prepare(frames: np.ndarray, how: Preprocess) -> np.ndarray:
    """Cut and resize the frames of one video as a backbone wants them.

    The resizing is that of Pillow, with antialiasing, and rounds to whole values.

    Args:
        frames: (T, H, W, 3) uint8.
        how: what is cut, and the sizes.

    Returns:
        (T, h, w, 3) uint8: h and w are ``how.size``, or both ``how.crop`` where there is none.
    """
    frames = trimmed(frames, how)
    height, width = frames.shape[1:3]
    top, left, rows, columns = _within_aspects(height, width, how)
    frames = frames[:, top : top + rows, left : left + columns]
    target, box = _shown(rows, columns, how)
    prepared = np.empty((len(frames), *target, 3), np.uint8)
    for row, frame in zip(prepared, frames, strict=True):
        row[:] = resized(frame, target, box, how)
    return prepared


def trimmed(frames: np.ndarray, how: Preprocess) -> np.ndarray:
    """Cut the black borders of frames (T, H, W, 3) of one video, if ``how`` wants that."""
    if not how.trim:
        return frames
    top, bottom, left, right = letterbox(frames)
    return frames[:, top : frames.shape[1] - bottom, left : frames.shape[2] - right]


def shown(height: int, width: int, how: Preprocess) -> tuple[tuple[int, int], Box]:
    """Say what a backbone is shown of frames without black borders: its (h, w), and where it lies in them."""
    top, left, rows, columns = _within_aspects(height, width, how)
    target, box = _shown(rows, columns, how)
    return target, (left + box[0], top + box[1], left + box[2], top + box[3])


def resized(frame: np.ndarray, target: tuple[int, int], box: Box, how: Preprocess) -> np.ndarray:
    """Resize the part of a frame (H, W, 3) uint8 that lies in ``box`` to ``target``, (h, w, 3) uint8."""
    picture = Image.fromarray(frame).resize(target[::-1], _FILTERS[how.interpolation], box=box)
    return np.asarray(picture)


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


def _shown(height: int, width: int, how: Preprocess) -> tuple[tuple[int, int], Box]:
    """The same as :func:`shown`, of frames whose aspect is as it should be."""
    if how.size is not None:
        return how.size, (0.0, 0.0, float(width), float(height))
    return (how.crop, how.crop), _centre(height, width, how)


def _centre(height: int, width: int, how: Preprocess) -> Box:
    """Say where in a picture the centre lies that is cut once its short side is ``how.resize`` long.

    Only this part is resized. Left, top, right and bottom, in pixels of the picture as it is.
    """
    shorter = min(height, width)
    rows, columns = (max(how.resize, int(how.resize * side / shorter)) for side in (height, width))
    top, left = (rows - how.crop) // 2, (columns - how.crop) // 2
    down, across = height / rows, width / columns
    right, bottom = (left + how.crop) * across, (top + how.crop) * down
    return left * across, top * down, min(right, width), min(bottom, height)


def _within_aspects(height: int, width: int, how: Preprocess) -> tuple[int, int, int, int]:
    """Top, left, rows and columns of the centre of a picture whose width / height is outside ``how.aspects``.

    All of it where it is not.
    """
    if how.aspects is None:
        return 0, 0, height, width
    least, greatest = how.aspects
    rows = min(height, max(1, round(width / least)))
    columns = min(width, max(1, round(height * greatest)))
    return (height - rows) // 2, (width - columns) // 2, rows, columns
