"""Videos whose frames say their own number: the brightness of frame n is ``level(n)``."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def level(number: int) -> int:
    """Brightness of frame ``number``, 0 to 255; neighbours differ by 20 and no two of ten are alike."""
    return 30 + 20 * (number % 10)


def frame_number(frame: np.ndarray) -> int:
    """Which frame of ten this is, from its brightness."""
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
    """Write numbered frames at ``rate`` a second or at ``times`` in seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if times is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        for number in range(frames):
            picture = np.full((size[1], size[0], 3), level(number), np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[number] * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    """Write a file with an audio stream and no picture."""
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
