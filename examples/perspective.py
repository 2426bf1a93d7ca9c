"""The camera, and what is drawn with, for ``draw_clip.py``.

Notation: x along the road, y upwards, z across it and away from the camera, in metres; pictures are arrays
(rows, columns, 3) of 0 to 1.
"""

from __future__ import annotations

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
    """Return a texture (rows, columns) that can be tiled, rougher for a smaller slope; standardised."""
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
    """Return a colour from the usual numbers up to 255."""
    return np.array([red, green, blue], np.float32) / 255
