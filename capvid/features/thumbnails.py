"""Small pictures of sampled frames, to be looked at. Imports no deep learning library."""

from __future__ import annotations

import io

import numpy as np

SIDE = 160  # pixels, of the longer side
_QUALITY = 60


def reduced(frames: np.ndarray) -> np.ndarray:
    """Scale frames (n, H, W, 3) uint8 down to (n, h, w, 3), the longer side at most :data:`SIDE` pixels."""
    from PIL import Image

    height, width = frames.shape[1:3]
    scale = min(1.0, SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, reducing_gap=2.0)) for frame in frames])


def as_jpeg(frames: np.ndarray) -> tuple[bytes, ...]:
    """Encode frames (n, h, w, 3) uint8 as JPEG files."""
    from PIL import Image

    files = []
    for frame in frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=_QUALITY, optimize=True)
        files.append(file.getvalue())
    return tuple(files)
