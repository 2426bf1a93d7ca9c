"""Draw a small data set to try capvid on: short clips of shapes that move, with captions.

    python examples/shapes.py FOLDER [--clips 240]

writes FOLDER/videos/*.mp4 (2 seconds, 96 x 64 pixels each), FOLDER/captions.jsonl and FOLDER/try-me.mp4, a
clip that is in no split. Needs PyAV and NumPy; everything is drawn here, with a fixed seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import av
import numpy as np

SIZE = (96, 64)
FRAMES, RATE = 20, 10
COLOURS = {
    "red": (220, 40, 40),
    "green": (50, 190, 70),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 50),
}
SHAPES = ("circle", "square", "triangle")
MOVES = {
    "from left to right": ((0.15, 0.5), (0.85, 0.5)),
    "from right to left": ((0.85, 0.5), (0.15, 0.5)),
    "up": ((0.5, 0.85), (0.5, 0.15)),
    "down": ((0.5, 0.15), (0.5, 0.85)),
}
SENTENCES = ("a {c} {s} moves {m}", "a {c} {s} is moving {m}", "there is a {c} {s} that moves {m}")


def inside(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    """Which pixels at (dx, dy) from the centre belong to the shape."""
    if shape == "circle":
        return dx**2 + dy**2 <= radius**2
    if shape == "square":
        return np.maximum(abs(dx), abs(dy)) <= radius * 0.9
    return (dy <= radius * 0.8) & (abs(dx) * 1.6 <= dy + radius)


def draw(path: Path, colour: str, shape: str, move: str, generator: np.random.Generator) -> None:
    """Write one clip; background, size and path differ a little from clip to clip."""
    width, height = SIZE
    y, x = np.mgrid[:height, :width]
    background = generator.uniform(20, 90) + generator.uniform(0, 40) * (y / height)
    radius = generator.uniform(10, 14)
    start, end = (np.array(point) + generator.uniform(-0.05, 0.05, 2) for point in MOVES[move])
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 400_000
        for number in range(FRAMES):
            centre = (start + (end - start) * number / (FRAMES - 1)) * SIZE
            picture = np.repeat(background[..., None], 3, axis=2) + generator.normal(0, 4, (height, width, 3))
            picture[inside(shape, x - centre[0], y - centre[1], radius)] = COLOURS[colour]
            pixels = picture.clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def main() -> None:
    """Draw the clips and write their captions."""
    parser = argparse.ArgumentParser(description="Draw clips of moving shapes, with captions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=240)
    options = parser.parse_args()
    videos = options.folder / "videos"
    videos.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    scenes = list(itertools.product(COLOURS, SHAPES, MOVES))
    rows = []
    for number in range(options.clips):
        colour, shape, move = scenes[number % len(scenes)]
        name = f"shapes{number:03d}"
        draw(videos / f"{name}.mp4", colour, shape, move, generator)
        captions = [sentence.format(c=colour, s=shape, m=move) for sentence in SENTENCES]
        split = "val" if number % 6 == 5 else "train"
        rows.append({"id": name, "split": split, "captions": captions})
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    (options.folder / "captions.jsonl").write_text(text, encoding="utf-8")
    draw(options.folder / "try-me.mp4", "blue", "circle", "from left to right", generator)


if __name__ == "__main__":
    main()
