"""Draw a short clip to try capvid on: a red car drives along a road between hills.

    python examples/draw_clip.py [FILE]

writes FILE (car.mp4 beside this script if none is given): 6 seconds, 320 x 240 pixels, 20 frames a second.
Needs PyAV and NumPy. Everything is computed here, the same each time: the car is traced once, as a solid, and
the camera moves along with it; ground, fence, trees and hills pass by in perspective.

Notation: x along the road, y upwards, z across it and away from the camera, in metres; pictures are arrays
(rows, columns, 3) of 0 to 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
from perspective import (
    BLUR,
    CAMERA,
    FOCAL,
    HAZE,
    HEIGHT,
    RATE,
    SECONDS,
    SPEED,
    WIDTH,
    Array,
    colour,
    lookup,
    mix,
    noise,
    project,
    rays,
    smooth,
    within,
)
from red_car import build_car, turn_wheels


def leaves(kind: str, generator: np.random.Generator) -> list[tuple[float, float, float, float]]:
    """Tufts of leaves, the dark ones first: how bright, column, row, size."""
    if kind == "fir":
        levels = np.linspace(8, 136, 14)
        hearts = np.c_[np.full(14, 64), levels, 3 + levels * 0.27]
    else:
        hearts = np.c_[generator.normal(64, 16, 9), generator.normal(56, 19, 9), generator.uniform(18, 29, 9)]
        hearts = hearts.clip((34, 30, 0), (94, 96, 99))
    found = []
    for column, row, size in hearts:
        for _ in range(120):
            bearing, out = generator.uniform(0, 2 * np.pi), generator.uniform(0, 1) ** 0.5
            across, down = out * np.cos(bearing), out * np.sin(bearing) * (0.35 if kind == "fir" else 0.9)
            lit = 0.60 - 0.28 * down - 0.2 * across - 0.0025 * (row - 60) + generator.normal(0, 0.09)
            found.append((lit, column + size * across, row + size * down, generator.uniform(1.0, 2.9)))
    return sorted(found)


def build_tree(seed: int, kind: str) -> list[Array]:
    """Return a tree as colours times opacity and opacity (160, 128, 4), and the same smaller and smaller."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:160, :128].astype(np.float32)
    image = np.zeros((160, 128, 4), np.float32)

    def lay(rgb: Array, share: Array, part: Array) -> None:
        part[:] = mix(part, np.r_[rgb, 1], share)

    lay(colour(20, 30, 12), 0.5 * (1 - smooth(0.3, 1, np.hypot((x - 64) / 56, (y - 155) / 5))), image)
    trunk = within(x - 64 + 3 * np.sin(y / 21 + seed), -4, 4, 1.5) * (y > 70) * (y < 156)
    lay(colour(74, 58, 42), trunk, image)
    green = colour(74, 110, 66) if kind == "fir" else colour(98, 132, 52)
    green = green * (generator.uniform(0.8, 1.1), 1, 1)
    for lit, column, row, size in leaves(kind, generator):
        box = np.s_[max(0, int(row - 5)) : int(row + 6), max(0, int(column - 5)) : int(column + 6)]
        share = np.clip(size + 0.5 - np.hypot(x[box] - column, y[box] - row), 0, 1)
        lay(np.clip(green * max(lit, 0.12) * 1.3, 0, 1), share, image[box])
    images = [image]
    while len(images) < 5:
        last = images[-1]
        images.append((last[::2, ::2] + last[1::2, ::2] + last[::2, 1::2] + last[1::2, 1::2]) / 4)
    return images


def paste(picture: Array, image: Array, left: float, top: float, scale: float, haze: float = 0.0) -> None:
    """Lay an image (rows, columns, 4) over the picture, ``scale`` pixels for each of its own."""
    height, width = image.shape[:2]
    r0, r1 = max(0, int(top)), min(HEIGHT, int(top + height * scale) + 1)
    c0, c1 = max(0, int(left)), min(WIDTH, int(left + width * scale) + 1)
    if r0 >= r1 or c0 >= c1:
        return
    rows, columns = (np.arange(r0, r1) + 0.5 - top) / scale, (np.arange(c0, c1) + 0.5 - left) / scale
    edge = np.outer(within(rows, 1, height - 1, 1), within(columns, 1, width - 1, 1))
    places = np.meshgrid(
        rows.clip(0.5, height - 0.6) - 0.5, columns.clip(0.5, width - 0.6) - 0.5, indexing="ij"
    )
    shown = lookup(image, *places) * edge[..., None]
    alpha = shown[..., 3:]
    part = picture[r0:r1, c0:c1]
    part[:] = part * (1 - alpha) + shown[..., :3] * (1 - haze) + HAZE * haze * alpha


class Scene:
    """Everything around the car, as it is seen from the moving camera."""

    def __init__(self) -> None:
        self.column, self.row = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
        self.directions = rays(self.column, self.row)
        self.tiles = {cell: noise(256, 256, 0.6, seed) for seed, cell in enumerate((0.07, 0.45, 3.0))}
        self.woods = noise(256, 512, 0.9, 7)
        self.ridge = noise(1, 4096, 1.35, 11)[0] + 0.04 * noise(1, 4096, 0.3, 12)[0]
        self.sky = self.build_sky()
        kinds = [build_tree(seed, "fir" if seed % 3 == 2 else "round") for seed in range(7)]
        draw = np.random.default_rng(3)
        self.trees = []  # where along the road and how far from it, how high, and the images
        for number in range(74):
            away = draw.uniform(*((10.5, 13), (15, 26), (28, 50))[number % 3])
            height = draw.uniform(3.6, 6.6) + number % 3
            self.trees.append((draw.uniform(0, 170), away, height, kinds[draw.integers(len(kinds))]))

    def build_sky(self) -> Array:
        """Clouds, the sun, and mountains so far away that they stand still."""
        x, y, z = np.moveaxis(self.directions, 2, 0)
        height = y / np.linalg.norm(self.directions, axis=2)
        sky = mix(colour(214, 228, 238), colour(78, 142, 214), smooth(-0.02, 0.36, height))
        above = np.maximum(height, 0.03) / 9
        cover = smooth(0.1, 1.5, lookup(noise(256, 256, 1.5, 21), z / above, x / above))
        sky = mix(sky, colour(250, 250, 250), 0.85 * cover * smooth(0.02, 0.12, height))
        away = np.hypot(self.column - 70, self.row - 24)
        glow = 0.75 * np.exp(-away / 14) + 0.35 * np.exp(-away / 60) + 1 - smooth(7, 11, away)
        sky = mix(sky, colour(255, 254, 240), np.clip(glow, 0, 1))
        top = 0.10 + 0.03 * np.interp(np.arctan2(x, z) * 500 + 2000, np.arange(4096), self.ridge)
        blue = mix(colour(176, 196, 212), colour(120, 148, 182), smooth(0.0, 0.12, height))
        return mix(sky, blue, smooth(-0.0015, 0.0015, top - height))

    def ground(self, moved: float) -> Array:
        """Road and meadows; what is above the horizon is of no use."""
        reach = -CAMERA[1] / np.minimum(self.directions[..., 1], -1e-3)
        x, z = (CAMERA[axis] + reach * self.directions[..., axis] for axis in (0, 2))
        dx, dz = (sum(np.abs(slope) for slope in np.gradient(place)) for place in (x, z))
        x = x + moved
        rough = np.zeros_like(x)
        for cell, tile in self.tiles.items():
            rough += 0.6 * lookup(tile, z / cell, x / cell) * np.clip(1.2 * cell / (dx + dz), 0, 1)
        dry = smooth(-1.8, 1.8, lookup(self.tiles[3.0], z / 5, x / 9))
        grass = mix(colour(88, 124, 48), colour(146, 154, 76), dry) * (1 + 0.13 * rough)[..., None]
        grass = mix(grass, HAZE, 0.5 * smooth(20, 220, reach))
        gravel = colour(150, 142, 122) * (1 + 0.10 * rough)[..., None]
        worn = 0.05 * np.cos(z * 3.6)  # where wheels go
        tar = colour(112, 112, 114) * (1 + 0.045 * rough - worn)[..., None]
        picture = mix(grass, gravel, within(z + 0.12 * rough, -2.9, 6.4, dz))
        picture = mix(picture, tar, within(z + 0.03 * rough, -2.3, 5.8, dz))
        lines = within(z, -2.01, -1.89, dz) + within(z, 5.34, 5.46, dz)
        lines += within(x % 9.0, 2, 5, dx + BLUR) * within(z, 1.69, 1.81, dz)
        return mix(picture, colour(230, 230, 222), 0.92 * lines)

    def wall(self, away: float) -> tuple[Array, Array, Array]:
        """How far each pixel reaches to an upright plane along the road, and where on it, x and y."""
        reach = (away - CAMERA[2]) / self.directions[..., 2]
        return reach, *(CAMERA[axis] + reach * self.directions[..., axis] for axis in (0, 1))

    def hills(self, below: Array, moved: float, away: float, low: float, high: float, green: Array) -> Array:
        """Wooded hills along the road, so far away."""
        reach, x, y = self.wall(away)
        x = (x + moved) / away
        top = low + (high - low) * (0.5 + 0.25 * np.interp(x * 160 % 4096, np.arange(4096), self.ridge))
        wood = lookup(self.woods, y / away * 150, x * 110)
        shade = (
            mix(green, green * 0.6, smooth(-1.5, 1.5, wood)) * (0.8 + 0.3 * smooth(0, 1, y / top))[..., None]
        )
        shade = mix(shade, HAZE, np.clip(reach / 900, 0, 0.7))
        return mix(below, shade, within(y, -99, top, reach / FOCAL * 1.5))

    def fence(self, below: Array, moved: float) -> Array:
        """Return the posts and two rails beyond the road."""
        reach, x, y = self.wall(7.8)
        size = reach / FOCAL
        post = within((x + moved) % 2.6, 1.2, 1.36, size * 1.6 + 0.6 * BLUR) * within(y, 0, 1.12, size)
        rail = within(y, 0.40, 0.54, size) + within(y, 0.84, 0.98, size)
        wood = mix(colour(206, 196, 178), HAZE, np.clip(reach / 200, 0, 0.6))
        return mix(below, wood, np.maximum(post, 0.9 * rail))

    def draw(self, time: float) -> Array:
        """Return the scenery at a time in seconds."""
        moved = SPEED * time
        picture = self.hills(self.sky, moved, 420, 40, 105, colour(74, 112, 84))
        picture = self.hills(picture, moved, 150, 4, 34, colour(80, 120, 58))
        picture = np.where((self.directions[..., 1] < -0.004)[..., None], self.ground(moved), picture)
        standing = []
        for place, away, height, images in self.trees:
            column, row, depth = project(np.array([(place - moved + 160) % 170 - 160, 0.0, away]))
            standing.append((depth, column, row, FOCAL * height / depth, images))
        for depth, column, row, pixels, images in sorted(standing, key=lambda tree: -tree[0]):
            image = images[int(np.clip(np.log2(160 / pixels), 0, 4))]
            left, top = column - 64 * pixels / 160, row - 155 * pixels / 160
            paste(picture, image, left, top, pixels / len(image), min(depth / 300, 0.5))
        return self.fence(picture, moved)


def frames() -> Iterator[Array]:
    """Draw the clip: pictures (HEIGHT, WIDTH, 3) uint8."""
    scene, car = Scene(), build_car()
    corner = 1 - 0.18 * ((scene.column / WIDTH - 0.5) ** 2 + (scene.row / HEIGHT - 0.5) ** 2)[..., None]
    column, row, depth = project(np.zeros(3))  # for which the car was traced
    for number in range(RATE * SECONDS):
        time = number / RATE
        picture = scene.draw(time)
        ahead = -1.5 + 2.2 * float(smooth(-1, SECONDS + 1, np.array(time)))  # it overtakes the camera slowly
        now_column, now_row, now_depth = project(np.array([ahead, 0.0, 0.0]))
        scale = depth / now_depth
        bounce = 0.35 * np.sin(7 * time) * np.sin(2.3 * time)
        left, top = now_column + (car.left - column) * scale, now_row + (car.top - row) * scale + bounce
        paste(picture, turn_wheels(car, SPEED * time + ahead), left, top, scale / 2)
        yield (np.clip(picture * corner, 0, 1) * 255 + 0.5).astype(np.uint8)


def draw(path: Path) -> None:
    """Draw the clip and write it as H.264 in an MP4 file whose index comes first."""
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "24", "preset": "slow"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for picture in frames():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def main() -> None:
    """Draw the clip where the command line says."""
    parser = argparse.ArgumentParser(description="Draw a clip of a car on a road.")
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).with_name("car.mp4"))
    draw(parser.parse_args().file)


if __name__ == "__main__":
    main()
