"""Draw a short clip to try capvid on: a red car drives along a road between hills.

    python examples/draw_clip.py [FILE]

writes FILE (car.mp4 beside this script if none is given): 6 seconds, 320 x 240 pixels, 20 frames a second, H.264.
Needs PyAV and NumPy. Everything is computed here, the same each time: the car is traced once, as a solid, and
the camera moves along with it; ground, fence, trees and hills pass by in perspective.

Notation: x along the road, y upwards, z across it and away from the camera, in metres; pictures are arrays
(rows, columns, 3) of 0 to 1.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

WIDTH, HEIGHT, RATE, SECONDS = 320, 240, 20, 6
FOCAL = 340.0  # pixels
CAMERA, TARGET = np.array([5.4, 2.0, -6.6]), np.array([0.2, 0.95, 0.0])
SPEED = 9.6  # metres a second
SHUTTER = 0.5 / RATE  # seconds
LIGHT = np.array([0.25, 0.8, -0.55]) / np.linalg.norm([0.25, 0.8, -0.55])
HAZE = np.array([0.80, 0.86, 0.90])

Array = np.ndarray

forward = (TARGET - CAMERA) / np.linalg.norm(TARGET - CAMERA)
right = np.array([forward[2], 0.0, -forward[0]]) / np.hypot(forward[0], forward[2])
upward = np.array([0.0, 1.0, 0.0]) - forward * forward[1]
upward /= np.linalg.norm(upward)


def project(point: Array) -> tuple[float, float, float]:
    """Column, row and depth at which a point (3,) is seen."""
    offset = point - CAMERA
    depth = float(offset @ forward)
    return (
        WIDTH / 2 + FOCAL * float(offset @ right) / depth,
        HEIGHT / 2 - FOCAL * float(offset @ upward) / depth,
        depth,
    )


def rays(columns: Array, rows: Array) -> Array:
    """Directions (..., 3) in which pixels are seen, one unit deep."""
    across, down = (columns - WIDTH / 2) / FOCAL, (rows - HEIGHT / 2) / FOCAL
    return forward + across[..., None] * right - down[..., None] * upward


def noise(rows: int, columns: int, slope: float, seed: int) -> Array:
    """A texture (rows, columns) that can be tiled, rougher for a smaller slope; mean 0, deviation 1."""
    white = np.random.default_rng(seed).normal(size=(rows, columns))
    frequency = np.hypot(np.fft.fftfreq(rows)[:, None] * rows, np.fft.fftfreq(columns) * columns)
    frequency[0, 0] = np.inf
    texture = np.fft.ifft2(np.fft.fft2(white) * frequency**-slope).real
    return (texture / texture.std()).astype(np.float32)


def lookup(texture: Array, rows: Array, columns: Array) -> Array:
    """Read a tiled texture (R, C) or (R, C, n) between its points."""
    row, column = np.floor(rows).astype(np.int32), np.floor(columns).astype(np.int32)
    down, across = (rows - row).astype(np.float32), (columns - column).astype(np.float32)
    if texture.ndim == 3:
        down, across = down[..., None], across[..., None]
    height, width = texture.shape[:2]
    r0, r1, c0, c1 = row % height, (row + 1) % height, column % width, (column + 1) % width
    above = texture[r0, c0] * (1 - across) + texture[r0, c1] * across
    below = texture[r1, c0] * (1 - across) + texture[r1, c1] * across
    return above * (1 - down) + below * down


def smooth(low: float, high: float, values: Array) -> Array:
    """0 at ``low``, 1 at ``high``, and an S between them."""
    t = np.clip((values - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def within(values: Array, low: float | Array, high: float | Array, blur: float | Array) -> Array:
    """How much of a stretch of length ``blur`` about each value lies from ``low`` to ``high``."""
    half = np.maximum(blur, 1e-6) / 2
    return np.clip((np.minimum(values + half, high) - np.maximum(values - half, low)) / (2 * half), 0, 1)


def mix(one: Array, other: Array, share: Array) -> Array:
    """Colours between two, (..., 3), by a share (...)."""
    return one + (other - one) * share[..., None]


def colour(red: int, green: int, blue: int) -> Array:
    """A colour from the usual numbers up to 255."""
    return np.array([red, green, blue], np.float32) / 255


# --- the car


def polygon_distance(points: list[tuple[float, float]], x: Array, y: Array) -> Array:
    """Distance from a polygon's outline, negative inside."""
    nearest, inside = np.full(x.shape, np.inf), np.zeros(x.shape, bool)
    for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1], strict=True):
        along = np.clip(
            ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / ((bx - ax) ** 2 + (by - ay) ** 2), 0, 1
        )
        nearest = np.minimum(nearest, np.hypot(x - ax - along * (bx - ax), y - ay - along * (by - ay)))
        if ay != by:
            inside ^= ((ay > y) != (by > y)) & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
    return np.where(inside, -nearest, nearest)


def profile(points: list[tuple[float, float]]) -> Array:
    """Distances from a side view with rounded corners, for x from -3 to 3 and y from -1 to 3 by 0.01 m."""
    x, y = np.meshgrid(np.arange(-3, 3, 0.01), np.arange(-1, 3, 0.01))
    table = polygon_distance(points, x, y)
    for axis in (0, 1, 0, 1):
        table = np.mean([np.roll(table, shift, axis) for shift in range(-5, 6)], axis=0)
    return table.astype(np.float32)


BODY = profile(
    [(2.02, 0.2), (2.16, 0.38), (2.14, 0.6), (1.98, 0.76), (0.95, 0.97), (-1.6, 1.0), (-2.08, 0.97)]
    + [(-2.16, 0.7), (-2.14, 0.4), (-2.0, 0.22)]
)
CABIN = profile(
    [(1.22, 0.8), (1.22, 0.9), (0.4, 1.42), (-0.3, 1.49), (-1.1, 1.42), (-1.8, 0.95), (-1.8, 0.8)]
)
AXLES, WHEEL = (1.3, -1.3), 0.335


def soft_greater(one: Array, other: Array, by: float) -> Array:
    """The greater of two, with the crease between them rounded."""
    return (one + other + np.sqrt((one - other) ** 2 + by * by)) / 2


def read_profile(table: Array, x: Array, y: Array) -> Array:
    """Distance from a side view at points (x, y)."""
    return lookup(table, np.clip((y + 1) * 100, 0, 398), np.clip((x + 3) * 100, 0, 598))


def wheel_radius(x: Array, y: Array) -> Array:
    """Distance from the nearer axle, in the side view."""
    return np.hypot(np.abs(x) - AXLES[0], y - WHEEL)


def solid(points: Array) -> tuple[Array, Array]:
    """Distances from the car and from its wheels at points (n, 3), negative inside."""
    x, y, z = points[:, 0], points[:, 1], np.abs(points[:, 2])
    belt = 0.9 - 0.13 * np.abs(x / 2.15) ** 3 - 0.12 * (y - 0.62) ** 2 * np.sign(y - 0.62)
    body = soft_greater(read_profile(BODY, x, y), z - belt, 0.10)
    cabin = soft_greater(read_profile(CABIN, x, y), z - (0.82 - 0.40 * (y - 0.9)), 0.06)
    car = -soft_greater(-body, -cabin, 0.05)
    radius = wheel_radius(x, y)
    car = np.maximum(car, -np.maximum(radius - 0.40, 0.55 - z))
    mirror = np.sqrt(((x - 0.78) / 0.7) ** 2 + (y - 1.03) ** 2 + ((z - 0.98) / 1.4) ** 2) - 0.075
    wheel = np.maximum(radius - WHEEL, np.abs(z - 0.76) - 0.11)
    return np.minimum(car, mirror), wheel


def trace(directions: Array) -> tuple[Array, Array]:
    """Where rays (n, 3) from the camera meet the car: which do, and the points (m, 3)."""
    depth = np.full(len(directions), 5.0, np.float32)
    active = np.arange(len(directions))
    hit = np.zeros(len(directions), bool)
    length = np.linalg.norm(directions, axis=1)
    for _ in range(70):
        distance = np.minimum(*solid(CAMERA + directions[active] * depth[active, None]))
        hit[active[distance < 0.003]] = True
        depth[active] += 0.8 * distance / length[active]
        active = active[(distance >= 0.003) & (depth[active] < 14)]
    return hit, CAMERA + directions[hit] * depth[hit, None]


def surroundings(directions: Array) -> Array:
    """What is mirrored in the car from directions (n, 3): road, trees, sky."""
    height = directions[:, 1]
    sky = mix(colour(232, 238, 242), colour(120, 170, 222), smooth(0.1, 0.8, height))
    trees = mix(colour(96, 96, 94), colour(66, 84, 50), smooth(-0.12, -0.02, height))
    return mix(trees, sky, smooth(0.06, 0.16, height))


def paint(points: Array, normals: Array) -> tuple[Array, Array]:
    """Colours (n, 3) of the car's surface, and how much it mirrors (n,)."""
    x, y, z = points.T
    side, front = np.abs(normals[:, 2]) > 0.55, normals[:, 0] > 0.3
    cabin = read_profile(CABIN, x, y)
    shade = np.tile(colour(206, 18, 26), (len(points), 1))
    mirrors = np.full(len(points), 0.10, np.float32)

    def put(where: Array, *rgb: int, mirror: float = 0.03) -> None:
        shade[where], mirrors[where] = colour(*rgb), mirror

    for seam in (0.98, -0.3, -1.12):
        put(side & (np.abs(x - seam) < 0.011) & (y > 0.36) & (y < 0.97), 70, 6, 10)
    put(side & (np.abs(y - 0.34) < 0.035) & (np.abs(x) < 0.85), 52, 8, 10)
    for handle in (-0.12, -0.92):
        put(side & (np.abs(y - 0.85) < 0.018) & (np.abs(x - handle) < 0.09), 238, 120, 120, mirror=0.3)
    put(y < 0.27, 34, 34, 36)
    glass = (y > 1.0) & (cabin > -0.30)
    pane = side & (cabin < -0.065) & (y > 1.01)
    screen = front & ~side & (y > 1.0) & (y < 1.385) & (np.abs(z) < 0.74 - 0.40 * (y - 0.9)) & glass
    put(side & (cabin < -0.04) & (y > 0.985), 30, 30, 34)
    put(pane & (np.abs(x + 0.30) > 0.035) & (x < 0.80), 30, 38, 44, mirror=0.32)
    put(screen, 34, 44, 50, mirror=0.30)
    nose = (normals[:, 0] > 0.25) & (x > 1.6) & (y < 0.8)
    put(nose & (np.abs(y - 0.36) < 0.07) & (np.abs(z) < 0.55), 26, 26, 28)
    put(nose & (np.abs(y - 0.615) < 0.05) & (np.abs(z) < 0.42), 30, 30, 33)
    put(nose & (np.abs(y - 0.615) < 0.014) & (np.abs(z) < 0.42), 190, 194, 198, mirror=0.3)
    put(nose & (np.abs(y - 0.49) < 0.05) & (np.abs(z) < 0.24), 236, 236, 226)
    lamp = (x > 1.55) & (((np.abs(z) - 0.66) / 0.17) ** 2 + ((y - 0.655) / 0.075) ** 2 < 1)
    put(lamp, 226, 236, 244, mirror=0.35)
    return shade, mirrors


@dataclass
class Car:
    """The car as it is seen, twice as large as in the picture, with what is needed to turn its wheels.

    Attributes:
        image: colours times opacity, and opacity (rows, columns, 4), shadow on the road included.
        origin: column and row, in the picture, of the image's corner.
        at: indices of the wheels' pixels in the image, its first two axes flattened.
        radius: of those pixels from the axle.
        angle: about the axle.
        lit: how bright they are.
    """

    image: Array
    origin: tuple[float, float]
    at: Array
    radius: Array
    angle: Array
    lit: Array


def build_car() -> Car:
    """Trace the car and its shadow."""
    corners = [project(np.array([x, y, z])) for x in (-2.3, 2.3) for y in (0, 1.55) for z in (-1.3, 1.5)]
    left, top = min(c[0] for c in corners) // 1, min(c[1] for c in corners) // 1
    columns, rows = (int(2 * (max(c[i] for c in corners) - corner)) for i, corner in ((0, left), (1, top)))
    column, row = np.meshgrid(left + (np.arange(columns) + 0.5) / 2, top + (np.arange(rows) + 0.5) / 2)
    directions = rays(column, row).reshape(-1, 3)

    image = np.zeros((rows * columns, 4), np.float32)
    ground = CAMERA + directions * (-CAMERA[1] / np.minimum(directions[:, 1], -1e-3))[:, None]
    out = np.hypot(
        np.maximum(np.abs(ground[:, 0] + 0.12) - 1.75, 0), np.maximum(np.abs(ground[:, 2] - 0.25) - 0.7, 0)
    )
    image[:, 3] = np.where(directions[:, 1] < -1e-3, 0.78 * (1 - smooth(-0.1, 0.62, out)), 0)

    hit, points = trace(directions)
    gradient = np.empty_like(points)
    for axis in range(3):
        step = np.zeros(3)
        step[axis] = 0.006
        gradient[:, axis] = np.minimum(*solid(points + step)) - np.minimum(*solid(points - step))
    normals = gradient / np.linalg.norm(gradient, axis=1, keepdims=True)
    car, wheel = solid(points)
    shade, mirrors = paint(points, normals)
    view = (points - CAMERA) / np.linalg.norm(points - CAMERA, axis=1, keepdims=True)
    facing = -(view * normals).sum(axis=1)
    mirrored = view + 2 * facing[:, None] * normals
    fresnel = mirrors + (1 - mirrors) * np.clip(1 - facing, 0, 1) ** 5
    low = 0.45 + 0.55 * smooth(0.1, 0.75, points[:, 1])  # less of the sky is seen from below
    light = 0.42 * low * (0.75 + 0.25 * normals[:, 1]) + 0.72 * np.clip(normals @ LIGHT, 0, 1)
    shine = np.clip(mirrored @ LIGHT, 0, 1) ** 60
    colours = (
        shade * light[:, None] * (1 - 0.5 * fresnel[:, None]) + surroundings(mirrored) * fresnel[:, None]
    )
    colours += (0.7 * shine * (mirrors > 0.05))[:, None]
    inside = (
        (points[:, 1] < 0.75)
        & (wheel_radius(points[:, 0], points[:, 1]) < 0.41)
        & (np.abs(points[:, 2]) < 0.8)
    )
    colours[inside] = colour(16, 16, 18)
    image[hit] = np.c_[np.clip(colours, 0, 1), np.ones(len(points))]

    turning = (wheel < car) & (np.abs(normals[:, 2]) > 0.5)
    tread = (wheel < car) & ~turning
    image[np.flatnonzero(hit)[tread], :3] = colour(24, 24, 26)
    x, y = points[turning, 0], points[turning, 1] - WHEEL
    return Car(
        image=image.reshape(rows, columns, 4),
        origin=(left, top),
        at=np.flatnonzero(hit)[turning],
        radius=np.hypot(np.abs(x) - AXLES[0], y),
        angle=np.arctan2(y, x - np.sign(x) * AXLES[0]),
        lit=0.75 + 0.3 * smooth(-0.3, 0.3, -y),
    )


def turn_wheels(car: Car, distance: float) -> Array:
    """The car's image after so many metres."""
    image = car.image.copy()
    fifth = 2 * np.pi / 5
    spoke = np.zeros(len(car.at))
    for blur in (-0.12, 0.0, 0.12):
        away = np.abs((car.angle + distance / WHEEL + blur) % fifth - fifth / 2) * np.maximum(
            car.radius, 0.05
        )
        spoke += within(away, -1, 0.030 + 0.10 * car.radius, 0.02) / 3
    rim = mix(np.tile(colour(40, 41, 44), (len(spoke), 1)), colour(196, 200, 206), spoke)
    rim = mix(
        rim,
        colour(206, 209, 214),
        within(car.radius, 0.195, 0.232, 0.012) + within(car.radius, -1, 0.04, 0.02),
    )
    tyre = mix(rim, colour(30, 30, 32), within(car.radius, 0.232, 1, 0.012))
    image.reshape(-1, 4)[car.at, :3] = tyre * car.lit[:, None]
    return (image[:-1, :-1] + image[1:, :-1] + image[:-1, 1:] + image[1:, 1:]) / 4


# --- the scenery


def build_tree(seed: int, kind: str) -> list[Array]:
    """A tree as colours times opacity and opacity (rows, columns, 4), and smaller and smaller ones."""
    generator = np.random.default_rng(seed)
    height, width = 160, 128
    y, x = np.mgrid[:height, :width].astype(np.float32)
    image = np.zeros((height, width, 4), np.float32)

    def lay(rgb: Array, share: Array, rows: slice = slice(None), columns: slice = slice(None)) -> None:
        part = image[rows, columns]
        image[rows, columns] = part * (1 - share[..., None]) + np.r_[rgb, 1] * share[..., None]

    lay(colour(20, 30, 12), 0.5 * (1 - smooth(0.3, 1, np.hypot((x - 64) / 56, (y - 155) / 5))))
    trunk = within(x - 64 + 3 * np.sin(y / 21 + seed), -4, 4, 1.5) * (y > 70) * (y < 156)
    lay(colour(74, 58, 42), trunk)
    if kind == "round":
        hearts = np.c_[generator.normal(64, 19, 9), generator.normal(58, 20, 9), generator.uniform(20, 31, 9)]
    else:
        levels = np.linspace(14, 132, 12)
        hearts = np.c_[generator.normal(64, 2, 12), levels, 5 + levels * 0.24]
    leaves = []
    for cx, cy, size in hearts:
        for _ in range(48):
            bearing, out = generator.uniform(0, 2 * np.pi), size * generator.uniform(0, 1) ** 0.5
            dx, dy = out * np.cos(bearing), out * np.sin(bearing) * (0.5 if kind == "fir" else 0.9)
            lit = (
                0.62 - 0.30 * dy / size - 0.16 * dx / size - 0.18 * (cy - 60) / 60 + generator.normal(0, 0.10)
            )
            leaves.append((lit, cx + dx, cy + dy, generator.uniform(2.2, 5.2)))
    green = colour(118, 150, 58) if kind == "round" else colour(74, 112, 68)
    green = green * np.array([generator.uniform(0.85, 1.2), 1, 1], np.float32)
    for lit, cx, cy, size in sorted(leaves):
        rows = slice(max(0, int(cy - 7)), max(0, int(cy + 8)))
        columns = slice(max(0, int(cx - 7)), max(0, int(cx + 8)))
        share = np.clip(size + 0.5 - np.hypot(x[rows, columns] - cx, y[rows, columns] - cy), 0, 1)
        lay(np.clip(green * max(lit, 0.12) * 1.25, 0, 1), share, rows, columns)
    images = [image]
    while min(images[-1].shape[:2]) > 8:
        last = images[-1]
        images.append((last[::2, ::2] + last[1::2, ::2] + last[::2, 1::2] + last[1::2, 1::2]) / 4)
    return images


def paste(picture: Array, image: Array, left: float, top: float, scale: float, haze: float = 0.0) -> None:
    """Lay an image (rows, columns, 4) over the picture, ``scale`` pixels for each of its own."""
    height, width = image.shape[0] * scale, image.shape[1] * scale
    r0, r1 = max(0, int(top)), min(HEIGHT, int(top + height) + 1)
    c0, c1 = max(0, int(left)), min(WIDTH, int(left + width) + 1)
    if r0 >= r1 or c0 >= c1:
        return
    rows = (np.arange(r0, r1) + 0.5 - top) / scale - 0.5
    columns = (np.arange(c0, c1) + 0.5 - left) / scale - 0.5
    edge = (within(rows, 0, image.shape[0] - 1, 1)[:, None] * within(columns, 0, image.shape[1] - 1, 1))[
        ..., None
    ]
    rows, columns = rows.clip(0, image.shape[0] - 1.001), columns.clip(0, image.shape[1] - 1.001)
    shown = lookup(image, *np.meshgrid(rows, columns, indexing="ij")) * edge
    alpha = shown[..., 3:]
    over = shown[..., :3] * (1 - haze) + HAZE * haze * alpha
    picture[r0:r1, c0:c1] = picture[r0:r1, c0:c1] * (1 - alpha) + over


class Scene:
    """Everything around the car, and how it looks at a time."""

    def __init__(self) -> None:
        self.column, self.row = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
        self.directions = rays(self.column, self.row)
        self.tiles = {cell: noise(256, 256, 0.6, seed) for seed, cell in enumerate((0.07, 0.45, 3.0))}
        self.woods = noise(256, 512, 0.9, 7)
        self.ridge = noise(1, 4096, 1.35, 11)[0] + 0.05 * noise(1, 4096, 0.3, 12)[0]
        self.sky = self._sky()
        trees = [build_tree(seed, "fir" if seed % 3 == 2 else "round") for seed in range(7)]
        generator = np.random.default_rng(3)
        self.trees = []  # where along the road, how far from it, how high, and the pictures
        for number in range(74):
            near = number % 3
            self.trees.append(
                (
                    generator.uniform(0, 170),
                    (generator.uniform(10.5, 13), generator.uniform(15, 26), generator.uniform(28, 50))[near],
                    generator.uniform(4.0, 7.5) + near,
                    trees[generator.integers(len(trees))],
                )
            )

    def _sky(self) -> Array:
        """Sky with clouds and the sun, and mountains so far away that they stand still."""
        height = self.directions[..., 1] / np.linalg.norm(self.directions, axis=2)
        sky = mix(colour(214, 228, 238), colour(84, 146, 214), smooth(-0.02, 0.36, height))
        above = np.maximum(height, 0.03)
        cover = lookup(
            noise(256, 256, 1.5, 21),
            self.directions[..., 2] / above * 9,
            self.directions[..., 0] / above * 9,
        )
        sky = mix(sky, colour(250, 250, 250), 0.85 * smooth(0.1, 1.5, cover) * smooth(0.02, 0.12, height))
        away = np.hypot(self.column - 62, self.row - 30)
        glow = 0.55 * np.exp(-away / 16) + 0.35 * np.exp(-away / 60)
        sky = mix(sky, colour(255, 246, 214), np.clip(glow + (1 - smooth(8.5, 11, away)), 0, 1))
        bearing = np.arctan2(self.directions[..., 0], self.directions[..., 2])
        top = 0.075 + 0.028 * np.interp(bearing * 500 + 2000, np.arange(4096), self.ridge)
        blue = mix(colour(126, 152, 182), colour(176, 196, 212), smooth(0.12, 0.0, height))
        return mix(sky, blue, smooth(-0.0015, 0.0015, top - height))

    def _ground(self, moved: float) -> Array:
        """Road and meadows; what is above the horizon is of no use."""
        reach = -CAMERA[1] / np.minimum(self.directions[..., 1], -1e-3)
        x, z = CAMERA[0] + reach * self.directions[..., 0], CAMERA[2] + reach * self.directions[..., 2]
        dx, dz = (np.abs(np.gradient(v, axis=0)) + np.abs(np.gradient(v, axis=1)) for v in (x, z))
        along = x + moved
        rough = sum(
            lookup(tile, z / cell, along / cell) * np.clip(1.2 * cell / (dx + dz), 0, 1) * 0.6
            for cell, tile in self.tiles.items()
        )
        grass = mix(
            colour(92, 128, 50),
            colour(150, 158, 78),
            smooth(-1.8, 1.8, lookup(self.tiles[3.0], z / 5, along / 9)),
        )
        grass = grass * (1 + 0.13 * rough)[..., None]
        grass = mix(grass, HAZE, 0.5 * smooth(20, 220, reach))
        tar = (
            colour(112, 112, 114)
            * (1 + 0.045 * rough - 0.05 * np.cos((z - 0.0) * 3.6) * (z < 1.75))[..., None]
        )
        verge = colour(150, 142, 122) * (1 + 0.10 * rough)[..., None]
        picture = mix(grass, verge, within(z + 0.12 * rough, -2.9, 6.4, dz))
        picture = mix(picture, tar, within(z + 0.03 * rough, -2.3, 5.8, dz))
        for line in (-1.95, 5.4):
            picture = mix(picture, colour(226, 226, 220), 0.9 * within(z, line - 0.06, line + 0.06, dz))
        dash = within(along % 9.0, 2, 5, dx + SPEED * SHUTTER) * within(z, 1.69, 1.81, dz)
        return mix(picture, colour(232, 226, 200), 0.95 * dash)

    def _hills(
        self, picture: Array, moved: float, away: float, low: float, high: float, tint: Array
    ) -> Array:
        """A wooded ridge along the road, so far away."""
        reach = (away - CAMERA[2]) / self.directions[..., 2]
        x = CAMERA[0] + reach * self.directions[..., 0] + moved
        y = CAMERA[1] + reach * self.directions[..., 1]
        top = low + (high - low) * (
            0.5 + 0.25 * np.interp(x / away * 160 % 4096, np.arange(4096), self.ridge)
        )
        wood = lookup(self.woods, y / away * 150, x / away * 110)
        shade = (
            mix(tint, tint * 0.62, smooth(-1.5, 1.5, wood)) * (0.82 + 0.3 * smooth(0, 1, y / top))[..., None]
        )
        shade = mix(shade, HAZE, np.clip(reach / 620, 0, 0.72))
        return mix(picture, shade, within(y, -99, top, reach / FOCAL * 1.5))

    def _fence(self, picture: Array, moved: float) -> Array:
        """Posts and two rails beyond the road."""
        reach = (7.8 - CAMERA[2]) / self.directions[..., 2]
        x = CAMERA[0] + reach * self.directions[..., 0] + moved
        y = CAMERA[1] + reach * self.directions[..., 1]
        size = reach / FOCAL
        post = within(x % 2.6, 1.2, 1.36, size * 1.6 + SPEED * SHUTTER * 0.6) * within(y, 0, 1.12, size)
        rail = within(y, 0.42, 0.53, size) + within(y, 0.84, 0.95, size)
        wood = np.clip(np.maximum(post, 0.9 * rail), 0, 1)
        return mix(picture, mix(colour(150, 128, 100), HAZE, np.clip(reach / 200, 0, 0.6)), wood)

    def draw(self, time: float) -> Array:
        """The scenery at a time in seconds."""
        moved = SPEED * time
        picture = self._hills(self.sky, moved, 330, 24, 60, colour(82, 118, 84))
        picture = self._hills(picture, moved, 120, 3, 17, colour(84, 122, 58))
        picture = np.where((self.directions[..., 1] < -0.004)[..., None], self._ground(moved), picture)
        standing = []
        for place, away, height, images in self.trees:
            x = (place - moved + 160) % 170 - 160
            column, row, depth = project(np.array([x, 0.0, away]))
            standing.append((depth, column, row, height, images))
        for depth, column, row, height, images in sorted(standing, key=lambda tree: -tree[0]):
            pixels = FOCAL * height / depth
            level = int(np.clip(np.log2(160 / pixels), 0, len(images) - 1))
            scale = pixels / images[level].shape[0]
            paste(
                picture,
                images[level],
                column - 64 * pixels / 160,
                row - pixels * 155 / 160,
                scale,
                min(depth / 300, 0.5),
            )
        return self._fence(picture, moved)


def frames() -> list[Array]:
    """All pictures of the clip, (HEIGHT, WIDTH, 3) uint8."""
    scene, car = Scene(), build_car()
    origin = project(np.zeros(3))
    corner = 1 - 0.18 * ((scene.column / WIDTH - 0.5) ** 2 + (scene.row / HEIGHT - 0.5) ** 2)[..., None]
    pictures = []
    for number in range(RATE * SECONDS):
        time = number / RATE
        picture = scene.draw(time)
        ahead = -1.3 + 2.1 * smooth(-1, SECONDS + 1, np.array(time))  # the car overtakes the camera slowly
        column, row, depth = project(np.array([float(ahead), 0.0, 0.0]))
        scale = origin[2] / depth
        left = column + (car.origin[0] - origin[0]) * scale
        bounce = 0.35 * np.sin(7 * time) * np.sin(2.3 * time)
        top = row + (car.origin[1] - origin[1]) * scale + bounce
        paste(picture, turn_wheels(car, SPEED * time + float(ahead)), left, top, scale / 2)
        pictures.append((np.clip(picture * corner, 0, 1) * 255 + 0.5).astype(np.uint8))
    return pictures


def draw(path: Path) -> None:
    """Draw the clip and write it as an MP4 file whose index comes first."""
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "25", "preset": "slow"})
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
