"""The red car of ``draw_clip.py``: traced once, as a solid, with wheels that turn.

Notation: x along the road, y upwards, z across it and away from the camera, in metres; pictures are arrays
(rows, columns, 3) of 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from perspective import CAMERA, LIGHT, Array, colour, lookup, mix, project, rays, smooth, within


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
    """Return the greater of two, with the crease between them rounded."""
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
    """Return what is mirrored in the car from directions (n, 3): road, trees, sky."""
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
    """Return the car's image after so many metres."""
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
