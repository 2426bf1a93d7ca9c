"""Videos whose frames encode their number, by the brightness ``level(n)`` or in binary."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def level(number: int) -> int:
    """Return the brightness of frame ``number``, unique among ten consecutive frames."""
    return 30 + 20 * (number % 10)


def frame_number(frame: np.ndarray) -> int:
    """Return the number of a frame modulo ten, from its brightness."""
    return round((float(frame.mean()) - 30) / 20)


def write_video(
    path: Path,
    *,
    frames: int = 40,
    rate: int = 10,
    codec: str = "libx264",
    times: Sequence[float] | None = None,
    size: tuple[int, int] = (64, 48),
) -> Path:
    """Write numbered frames at ``rate`` per second or at ``times`` in seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if times is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        for number in range(frames):
            image = np.full((size[1], size[0], 3), level(number), np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[number] * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


BITS = 8  # digits of a number; the most significant is on the right


def write_numbers(
    path: Path,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    *,
    frames: int = 120,
    bits: int = BITS,
    gop: int | None = 24,
    pixels: str = "yuv420p",
    container: dict[str, str] | None = None,
    size: tuple[int, int] | None = None,
    noise: int = 0,
) -> Path:
    """Write frames, 25 per second, whose upper half shows the frame's number in binary, bright for 1.

    ``noise`` is the number of noise levels in the lower half, which makes files larger.
    """
    width, height = size or (12 * bits, 64)
    generator = np.random.default_rng(0)
    with av.open(str(path), "w", options=container or {}) as output:
        stream = output.add_stream(codec, rate=25, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        if gop:
            stream.gop_size = gop
        for number in range(frames):
            image = np.full((height, width, 3), 90, np.uint8)
            for bit in range(bits):
                image[:32, 12 * bit : 12 * bit + 12] = 220 if number >> bit & 1 else 30
            if noise:
                image[40:] += generator.integers(0, noise, image[40:].shape, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def numbers(frames: np.ndarray, bits: int = BITS) -> list[int]:
    """Read the numbers of frames (T, H, W, 3)."""
    cells = frames[:, 4:28, : 12 * bits].reshape(len(frames), 24, bits, 12, 3)[:, :, :, 3:9]
    return ((cells.mean(axis=(1, 3, 4)) > 125) @ (1 << np.arange(bits))).tolist()


def turn(path: Path, degrees: int, *, mirror: bool = False) -> Path:
    """Set the clockwise rotation in an MP4's header, after turning frames upside down with ``mirror``."""
    cosine, sine = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    sign = -1 if mirror else 1
    x, y = (cosine << 16, sine << 16), (-sine * sign << 16, cosine * sign << 16)
    matrix = struct.pack(">9i", *x, 0, *y, 0, 0, 0, 1 << 30)
    content = bytearray(path.read_bytes())
    at = content.find(b"tkhd") + 44
    content[at : at + 36] = matrix
    path.write_bytes(content)
    return path


def write_sound(path: Path) -> Path:
    """Write a file with an audio stream only."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        for number in range(20):
            frame = av.AudioFrame.from_ndarray(
                np.zeros((2, 1024), np.float32), format="fltp", layout="stereo"
            )
            frame.rate, frame.pts = 44100, number * 1024
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
