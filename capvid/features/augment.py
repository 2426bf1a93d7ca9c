"""Augmented views of a video: every frame as a random part of it shows it, in other light and colours.

Imports no deep learning library, since it runs in the processes that decode.
Notation for array shapes: T frames, H and W their height and width, h and w height and width of the
network's input.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from capvid.features.preprocess import Box, resized, shown, trimmed
from capvid.features.registry import Preprocess

LEAST_AREA = 0.5  # of the frame
STRETCH = (0.85, 1.18)  # aspect of the part against that of the frame, at its least and its greatest
CHANGE = 0.2  # most by which light, contrast and saturation are raised or lowered
_GREY = np.array([0.299, 0.587, 0.114], np.float32)
_DRAWN = 8  # random numbers for each frame


@dataclass(frozen=True, kw_only=True)
class FrameView:
    """How one frame is seen.

    Attributes:
        left: where the part of the frame begins that is seen, as a share of the frame's width.
        top: the same, of its height.
        width: of that part, as a share of the frame's.
        height: the same.
        mirrored: whether left and right are exchanged.
        light: by which all values are multiplied.
        contrast: by which distances from the mean grey are multiplied.
        saturation: by which distances from a pixel's grey are multiplied.
    """

    left: float
    top: float
    width: float
    height: float
    mirrored: bool
    light: float
    contrast: float
    saturation: float

    @classmethod
    def of(cls, drawn: np.ndarray) -> FrameView:
        """Make it of numbers (8,) drawn uniformly from 0 to 1."""
        area = math.sqrt(LEAST_AREA + (1 - LEAST_AREA) * drawn[0])
        least, greatest = map(math.log, STRETCH)
        stretch = math.exp((least + (greatest - least) * drawn[1]) / 2)
        width, height = min(1.0, area * stretch), min(1.0, area / stretch)
        light, contrast, saturation = (1 + CHANGE * (2 * drawn[5:8] - 1)).tolist()
        return cls(
            left=float(drawn[2] * (1 - width)),
            top=float(drawn[3] * (1 - height)),
            width=width,
            height=height,
            mirrored=bool(drawn[4] < 0.5),
            light=light,
            contrast=contrast,
            saturation=saturation,
        )

    def box(self, whole: Box, height: int, width: int) -> Box:
        """Say where in a frame that lies which would be ``whole`` if the part were all of it, in pixels."""
        left, top, right, bottom = whole
        across, down = self.left * width, self.top * height
        return (
            across + self.width * left,
            down + self.height * top,
            min(width, across + self.width * right),
            min(height, down + self.height * bottom),
        )

    def recoloured(self, picture: np.ndarray) -> np.ndarray:
        """Change light, contrast and saturation of a picture (h, w, 3) uint8."""
        values = picture.astype(np.float32)
        grey = (values @ _GREY)[:, :, None]  # (h, w, 1)
        coloured = grey + self.saturation * (values - grey)
        mean = grey.mean()
        return (self.light * (mean + self.contrast * (coloured - mean))).round().clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Augmentation:
    """One of a video's augmented views, always drawn the same.

    Attributes:
        number: of the view, from 1 on.
        key: of the video.
    """

    number: int
    key: str

    def draw(self, frames: int) -> list[FrameView]:
        """Draw how each of so many frames is seen; it depends on nothing but the number and the key."""
        digest = zlib.crc32(self.key.encode("utf-8", "surrogatepass"))
        drawn = np.random.default_rng([self.number, digest]).random((frames, _DRAWN))
        return [FrameView.of(row) for row in drawn]

    def prepare(self, frames: np.ndarray, how: Preprocess) -> np.ndarray:
        """Cut and resize frames as a backbone wants them, each as it is seen in this view.

        Black borders that ``how`` cuts are cut first. What is then drawn of a frame takes the place of the
        whole: it is stretched to the frame's aspect, and cut as the whole would be.

        Args:
            frames: (T, H, W, 3) uint8.
            how: what is cut, and the sizes.

        Returns:
            (T, h, w, 3) uint8, as :func:`~capvid.features.preprocess.prepare` gives them.
        """
        frames = trimmed(frames, how)
        height, width = frames.shape[1:3]
        target, whole = shown(height, width, how)
        prepared = np.empty((len(frames), *target, 3), np.uint8)
        for row, frame, view in zip(prepared, frames, self.draw(len(frames)), strict=True):
            seen = resized(frame, target, view.box(whole, height, width), how)
            row[:] = view.recoloured(seen[:, ::-1] if view.mirrored else seen)
        return prepared
