"""Augmented views of a video: random crops, flips and colours of each frame.

Imports no deep learning library, since it runs in the decoding processes.
Array shapes: T frames, H and W their height and width, h and w height and width of the network's input.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from capvid.backbones.catalog import Preprocess
from capvid.backbones.preprocessing import Box, crop_boxes, resize, trim_borders

MIN_AREA = 0.5  # of a crop, relative to the frame's
STRETCH = (0.85, 1.18)  # range of a crop's aspect relative to the frame's
MAX_CHANGE = 0.2  # relative change of brightness, contrast and saturation
_GREY = np.array([0.299, 0.587, 0.114], np.float32)  # weights of red, green and blue


@dataclass(frozen=True, kw_only=True)
class FrameView:
    """Crop and colours of one frame; the crop is in fractions of the frame's width and height."""

    left: float
    top: float
    width: float
    height: float
    mirrored: bool  # whether left and right are exchanged
    brightness: float  # factor of all values
    contrast: float  # factor of the differences from the mean grey
    saturation: float  # factor of the differences from a pixel's grey

    @classmethod
    def of(cls, numbers: np.ndarray) -> FrameView:
        """Return the view for random numbers (8,), uniformly distributed from 0 to 1."""
        side = math.sqrt(MIN_AREA + (1 - MIN_AREA) * numbers[0])
        low, high = map(math.log, STRETCH)
        stretch = math.exp((low + (high - low) * numbers[1]) / 2)
        width, height = min(1.0, side * stretch), min(1.0, side / stretch)
        brightness, contrast, saturation = (1 + MAX_CHANGE * (2 * numbers[5:8] - 1)).tolist()
        return cls(
            left=float(numbers[2] * (1 - width)),
            top=float(numbers[3] * (1 - height)),
            width=width,
            height=height,
            mirrored=bool(numbers[4] < 0.5),
            brightness=brightness,
            contrast=contrast,
            saturation=saturation,
        )

    def box(self, box: Box, height: int, width: int) -> Box:
        """Map a box of a frame of this height and width, in pixels, to the same box of the crop."""
        left, top, right, bottom = box
        across, down = self.left * width, self.top * height
        return (
            across + self.width * left,
            down + self.height * top,
            min(width, across + self.width * right),
            min(height, down + self.height * bottom),
        )

    def recolor(self, frame: np.ndarray) -> np.ndarray:
        """Change brightness, contrast and saturation of a frame (h, w, 3) uint8."""
        values = frame.astype(np.float32)
        grey = (values @ _GREY)[:, :, None]  # (h, w, 1)
        saturated = grey + self.saturation * (values - grey)
        mean = grey.mean()
        recoloured = self.brightness * (mean + self.contrast * (saturated - mean))
        return recoloured.round().clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Augmentation:
    """One augmented view of a video, the same in every run."""

    number: int  # of the view, from 1
    key: str  # of the video

    def draw(self, num_frames: int) -> list[FrameView]:
        """Draw a crop and colours for each frame; the seed is the view's number and the video's key."""
        digest = zlib.crc32(self.key.encode("utf-8", "surrogatepass"))
        numbers = np.random.default_rng([self.number, digest]).random((num_frames, 8))
        return [FrameView.of(row) for row in numbers]

    def prepare(self, frames: np.ndarray, preprocess: Preprocess) -> np.ndarray:
        """Augment, crop and resize frames for a backbone.

        Black borders are cut off first. Then each frame's random crop, stretched to the frame's aspect, is
        preprocessed like a frame.

        Args:
            frames: (T, H, W, 3) uint8.
            preprocess: crop and size.

        Returns:
            (T, h, w, 3) uint8, like :func:`~capvid.backbones.preprocessing.prepare`.
        """
        frames = trim_borders(frames, preprocess)
        height, width = frames.shape[1:3]
        size, (top, left, _, _), box = crop_boxes(height, width, preprocess)
        box = left + box[0], top + box[1], left + box[2], top + box[3]  # in the frame, not in its centre
        prepared = np.empty((len(frames), *size, 3), np.uint8)
        for row, frame, view in zip(prepared, frames, self.draw(len(frames)), strict=True):
            crop = resize(frame, size, view.box(box, height, width), preprocess)
            row[:] = view.recolor(crop[:, ::-1] if view.mirrored else crop)
        return prepared
