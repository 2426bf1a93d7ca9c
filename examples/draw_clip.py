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
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

WIDTH, HEIGHT, RATE, SECONDS = 320, 240, 20, 6
FOCAL = 385.0  # pixels
CAMERA, TARGET = np.array([5.4, 2.0, -6.6]), np.array([0.2, 1.15, 0.0])
SPEED = 9.6  # metres a second
BLUR = SPEED * 0.5 / RATE  # metres in the time that the shutter is open
LIGHT = np.array([0.25, 0.8, -0.55]) / np.linalg.norm([0.25, 0.8, -0.55])
HAZE = np.array([0.80, 0.86, 0.90])

Array = np.ndarray

forward = (TARGET - CAMERA) / np.linalg.norm(TARGET - CAMERA)
right = np.array([forward[2], 0.0, -forward[0]]) / np.hypot(forward[0], forward[2])
upward = np.array([0.0, 1.0, 0.0]) - forward * forward[1]
upward /= np.linalg.norm(upward)


def project(point: Array) -> tuple[float, float, float]:
    """Column, row and depth at which a point (3,) is seen."""
    across, up, depth = ((point - CAMERA) @ axis for axis in (right, upward, forward))
    return float(WIDTH / 2 + FOCAL * across / depth), float(HEIGHT / 2 - FOCAL * up / depth), float(depth)


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
        dx, dy = bx - ax, by - ay
        along = np.clip(((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy), 0, 1)
        nearest = np.minimum(nearest, np.hypot(x - ax - along * dx, y - ay - along * dy))
        if ay != by:
            inside ^= ((ay > y) != (by > y)) & (x < dx * (y - ay) / dy + ax)
    return np.where(inside, -nearest, nearest)


def profile(points: list[tuple[float, float]]) -> Array:
    """Distances from a side view with rounded corners, for x from -3 to 3 and y from -1 to 3 by 0.01 m."""
    x, y = np.meshgrid(np.arange(-3, 3, 0.01), np.arange(-1, 3, 0.01))
    table = polygon_distance(points, x, y)
    for axis in (0, 1, 0, 1):
        table = np.mean([np.roll(table, shift, axis) for shift in range(-5, 6)], axis=0)
    return table.astype(np.float32)


NOSE = [(2.02, 0.2), (2.16, 0.38), (2.14, 0.6), (1.98, 0.76), (0.95, 0.97)]
BODY = profile([*NOSE, (-1.6, 1.0), (-2.08, 0.97), (-2.16, 0.7), (-2.14, 0.4), (-2.0, 0.22)])
ROOF = [(0.4, 1.42), (-0.3, 1.49), (-1.1, 1.42)]
CABIN = profile([(1.22, 0.8), (1.22, 0.9), *ROOF, (-1.8, 0.95), (-1.8, 0.8)])
AXLES, WHEEL = 1.3, 0.335  # before and behind the middle; radius


def soft_greater(one: Array, other: Array, by: float) -> Array:
    """The greater of two, with the crease between them rounded."""
    return (one + other + np.sqrt((one - other) ** 2 + by * by)) / 2


def read_profile(table: Array, x: Array, y: Array) -> Array:
    """Distance from a side view at points (x, y)."""
    return lookup(table, np.clip((y + 1) * 100, 0, 398), np.clip((x + 3) * 100, 0, 598))


def wheel_radius(x: Array, y: Array) -> Array:
    """Distance from the nearer axle, in the side view."""
    return np.hypot(np.abs(x) - AXLES, y - WHEEL)


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
    put(side & (cabin < -0.04) & (y > 0.985), 30, 30, 34)
    pane = side & (cabin < -0.065) & (y > 1.01) & (np.abs(x + 0.30) > 0.035) & (x < 0.80)
    screen = front & ~side & (y > 1.0) & (y < 1.385) & (np.abs(z) < 0.74 - 0.40 * (y - 0.9)) & (cabin > -0.3)
    put(pane | screen, 40, 50, 56, mirror=0.26)
    for beside, who in ((x - 0.02, pane), (z - 0.36, screen), (x + 0.78, pane & (y < 1.2))):  # driver, seat
        put(who & (np.hypot(beside, y - 1.19) < 0.085), 26, 22, 22, mirror=0.2)
        put(who & (np.hypot(beside / 1.7, y - 0.98) < 0.12), 22, 24, 28, mirror=0.2)
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
    """The car twice as large as it is seen, with what is needed to turn its wheels.

    ``image`` (rows, columns, 4) holds colours times opacity, and opacity, its shadow on the road included;
    ``left`` and ``top`` are where its corner is in the picture. Of the wheels' pixels ``at`` says where they
    are in the flattened image, ``radius`` and ``angle`` where on the wheel, and ``lit`` how bright.
    """

    image: Array
    left: float
    top: float
    at: Array
    radius: Array
    angle: Array
    lit: Array


def shine(points: Array, normals: Array) -> Array:
    """Colours (n, 3) of the car in daylight."""
    shade, mirrors = paint(points, normals)
    view = (points - CAMERA) / np.linalg.norm(points - CAMERA, axis=1, keepdims=True)
    facing = -(view * normals).sum(axis=1)
    mirrored = view + 2 * facing[:, None] * normals
    fresnel = mirrors + (1 - mirrors) * np.clip(1 - facing, 0, 1) ** 5
    low = 0.45 + 0.55 * smooth(0.1, 0.75, points[:, 1])  # less of the sky is seen from below
    light = 0.42 * low * (0.75 + 0.25 * normals[:, 1]) + 0.72 * np.clip(normals @ LIGHT, 0, 1)
    colours = mix(shade * light[:, None], surroundings(mirrored), fresnel)
    colours += (0.7 * np.clip(mirrored @ LIGHT, 0, 1) ** 60 * (mirrors > 0.05))[:, None]
    x, y, z = points.T
    colours[(y < 0.75) & (wheel_radius(x, y) < 0.41) & (np.abs(z) < 0.8)] = colour(16, 16, 18)
    return np.clip(colours, 0, 1)


def build_car() -> Car:
    """Trace the car and its shadow."""
    box = [project(np.array([x, y, z])) for x in (-2.3, 2.3) for y in (0, 1.55) for z in (-1.3, 1.5)]
    left, top, _ = np.min(box, axis=0) // 1
    columns, rows, _ = (2 * (np.max(box, axis=0) - (left, top, 0))).astype(int)
    column, row = np.meshgrid(left + (np.arange(columns) + 0.5) / 2, top + (np.arange(rows) + 0.5) / 2)
    directions = rays(column, row).reshape(-1, 3)

    image = np.zeros((rows * columns, 4), np.float32)
    ground = CAMERA - directions * (CAMERA[1] / np.minimum(directions[:, 1:2], -1e-3))
    out = np.maximum(np.abs(ground - np.array([-0.12, 0, 0.25])) - (1.75, 0, 0.7), 0)
    image[:, 3] = 0.78 * (1 - smooth(-0.1, 0.62, np.hypot(out[:, 0], out[:, 2])))

    hit, points = trace(directions)
    steps = np.eye(3) * 0.006
    slopes = [np.minimum(*solid(points + step)) - np.minimum(*solid(points - step)) for step in steps]
    normals = np.stack(slopes, axis=1) / np.linalg.norm(slopes, axis=0)[:, None]
    image[hit] = np.c_[shine(points, normals), np.ones(len(points))]

    where = np.flatnonzero(hit)
    car, wheel = solid(points)
    turning = (wheel < car) & (np.abs(normals[:, 2]) > 0.5)
    image[where[(wheel < car) & ~turning], :3] = colour(24, 24, 26)
    x, y = points[turning, 0], points[turning, 1] - WHEEL
    return Car(
        image=image.reshape(rows, columns, 4),
        left=left,
        top=top,
        at=where[turning],
        radius=np.hypot(np.abs(x) - AXLES, y),
        angle=np.arctan2(y, x - np.sign(x) * AXLES),
        lit=0.75 + 0.3 * smooth(-0.3, 0.3, -y),
    )


def turn_wheels(car: Car, distance: float) -> Array:
    """The car's image after so many metres."""
    image, radius, fifth = car.image.copy(), car.radius, 2 * np.pi / 5
    spoke = np.zeros(len(car.at))
    for blur in (-0.12, 0.0, 0.12):
        away = np.abs((car.angle + distance / WHEEL + blur) % fifth - fifth / 2) * np.maximum(radius, 0.05)
        spoke += within(away, -1, 0.030 + 0.10 * radius, 0.02) / 3
    metal = within(radius, 0.195, 0.232, 0.012) + within(radius, -1, 0.04, 0.02)
    shade = mix(colour(40, 41, 44), colour(200, 204, 210), np.maximum(spoke, metal))
    shade = mix(shade, colour(30, 30, 32), within(radius, 0.232, 1, 0.012))
    image.reshape(-1, 4)[car.at, :3] = shade * car.lit[:, None]
    return (image[:-1, :-1] + image[1:, :-1] + image[:-1, 1:] + image[1:, 1:]) / 4


# --- the scenery


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
    """A tree as colours times opacity and opacity (160, 128, 4), and the same smaller and smaller."""
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
        """Posts and two rails beyond the road."""
        reach, x, y = self.wall(7.8)
        size = reach / FOCAL
        post = within((x + moved) % 2.6, 1.2, 1.36, size * 1.6 + 0.6 * BLUR) * within(y, 0, 1.12, size)
        rail = within(y, 0.40, 0.54, size) + within(y, 0.84, 0.98, size)
        wood = mix(colour(206, 196, 178), HAZE, np.clip(reach / 200, 0, 0.6))
        return mix(below, wood, np.maximum(post, 0.9 * rail))

    def draw(self, time: float) -> Array:
        """The scenery at a time in seconds."""
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
