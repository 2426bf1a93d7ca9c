"""Augmented views of a video: each frame randomly cropped, mirrored and recolor.

Imports no deep learning library, since it runs in the processes that decode.
Array shapes: T frames, H and W their height and width, h and w height and width of the network's input.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from capvid.backbones.catalog import Preprocess
from capvid.backbones.preprocessing import Box, crop_box, resize, trim_borders

LEAST_AREA = 0.5  # of the frame
STRETCH = (0.85, 1.18)  # range of the crop's aspect relative to the frame's
CHANGE = 0.2  # largest relative change of light, contrast and saturation
_GREY = np.array([0.299, 0.587, 0.114], np.float32)
_DRAWN = 8  # random numbers for each frame


@dataclass(frozen=True, kw_only=True)
class FrameView:
    """Crop and colours of one frame.

    Attributes:
        left: left edge of the crop, as a fraction of the frame's width.
        top: top edge, as a fraction of the height.
        width: width of the crop, as a fraction of the frame's.
        height: likewise.
        mirrored: whether left and right are exchanged.
        light: factor of all values.
        contrast: factor of distances from the mean grey.
        saturation: factor of distances from a pixel's grey.
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
        """Return the view that numbers (8,) drawn uniformly from 0 to 1 stand for."""
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

    def box(self, box: Box, height: int, width: int) -> Box:
        """Map a box of a frame, in pixels, to the same box of the crop."""
        left, top, right, bottom = box
        across, down = self.left * width, self.top * height
        return (
            across + self.width * left,
            down + self.height * top,
            min(width, across + self.width * right),
            min(height, down + self.height * bottom),
        )

    def recolor(self, frame: np.ndarray) -> np.ndarray:
        """Change light, contrast and saturation of a frame (h, w, 3) uint8."""
        values = frame.astype(np.float32)
        grey = (values @ _GREY)[:, :, None]  # (h, w, 1)
        coloured = grey + self.saturation * (values - grey)
        mean = grey.mean()
        return (self.light * (mean + self.contrast * (coloured - mean))).round().clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Augmentation:
    """One augmented view of a video, always drawn the same.

    Attributes:
        number: number of the view, from 1.
        key: key of the video.
    """

    number: int
    key: str

    def draw(self, frames: int) -> list[FrameView]:
        """Draw the views of so many frames; the seed is the number and the key."""
        digest = zlib.crc32(self.key.encode("utf-8", "surrogatepass"))
        drawn = np.random.default_rng([self.number, digest]).random((frames, _DRAWN))
        return [FrameView.of(row) for row in drawn]

    def prepare(self, frames: np.ndarray, how: Preprocess) -> np.ndarray:
        """Crop and resize frames for a backbone, each as this view shows it.

        Black borders are cut first. Then each frame's random crop, stretched to the frame's aspect, is
        treated as the frame.

        Args:
            frames: (T, H, W, 3) uint8.
            how: crop and size.

        Returns:
            (T, h, w, 3) uint8, like :func:`~capvid.backbones.preprocessing.prepare`.
        """
        frames = trim_borders(frames, how)
        height, width = frames.shape[1:3]
        target, box = crop_box(height, width, how)
        prepared = np.empty((len(frames), *target, 3), np.uint8)
        for row, frame, view in zip(prepared, frames, self.draw(len(frames)), strict=True):
            crop = resize(frame, target, view.box(box, height, width), how)
            row[:] = view.recolor(crop[:, ::-1] if view.mirrored else crop)
        return prepared
