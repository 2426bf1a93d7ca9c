"""Detection of frames without content (fades, repeated stills) and of black borders.

Array shapes: T frames, H and W their height and width, K kept frames, h and w height and width of the
subsampled frames (about 64 a side) on which everything is decided.
"""

from __future__ import annotations

import numpy as np

_SAMPLES = 64  # to a side
_FLAT = 12  # levels between the darkest and the brightest hundredth of an image of one colour
_SAME = 1.0  # mean difference in grey levels up to which an image is the one before
_SAME_PART = 4.0  # likewise in each part of the image, so that a small object that moves counts
_PARTS = 8  # to a side
_BLACK = 24  # brightest value in a border; noise of the compression reaches 20
_BRIGHT = 40  # darkest value that is surely not black
_EDGE = 0.5  # share of an edge's length along which the image must begin
_ONE_SIDE = 0.04  # least share of a side's length for a border that the opposite side lacks
_ALIKE = 0.8  # least ratio of two borders that are taken for a pair
_MAX_CUT = 0.4  # share of a side's length that is cut at most


def useful(frames: np.ndarray) -> np.ndarray:
    """Return the ascending indices (K,) of frames (T, H, W, 3) uint8 that show something new, at least one.

    Frames of one flat colour and frames nearly identical to the last kept one are dropped. Of frames that are
    all flat, the most varied is kept, and the first where they are equal. No frame at all is a ValueError.
    """
    if not len(frames):
        raise ValueError("no frames to choose from")
    height, width = frames.shape[1:3]
    samples = frames[:, :: _step(height), :: _step(width)]  # (T, h, w, 3)
    contrast = _contrast(samples)
    lively = np.flatnonzero(contrast > _FLAT)
    if len(lively):  # a fade within black borders is flat only without them
        top, bottom, left, right = _borders(samples, lively)
        inside = samples[lively, top : samples.shape[1] - bottom, left : samples.shape[2] - right]
        lively = lively[_contrast(inside) > _FLAT]
    if not len(lively):
        return np.array([int(contrast.argmax())])
    kept = [int(lively[0])]
    for index in lively[1:]:
        if not _same(samples[kept[-1]], samples[index]):
            kept.append(int(index))
    return np.array(kept)


def letterbox(frames: np.ndarray) -> tuple[int, int, int, int]:
    """Return the black borders of frames (T, H, W, 3) uint8: (top, bottom, left, right), 0 without border.

    A border is black in every useful frame and ends where, along most of the edge and in at least one frame,
    the image begins; darkness that fades into the image is part of the image, unless the opposite
    border, which is sharp, is as large. A border without counterpart on the opposite side counts if it is at
    least 4 % of the side's length. Borders of more than 40 % together are shortened to that, in proportion.
    """
    return _borders(frames, useful(frames))


def _step(length: int) -> int:
    return max(1, round(length / _SAMPLES))


def _contrast(samples: np.ndarray) -> np.ndarray:
    """Return the levels between the darkest and the brightest hundredth of an image (T, h, w, 3): (T,)."""
    values = np.moveaxis(samples, 3, 1).reshape(len(samples), 3, -1)  # (T, 3, hw)
    low = values.shape[2] // 100
    high = values.shape[2] - 1 - low
    ordered = np.partition(values, (low, high), axis=2)
    return (ordered[:, :, high].astype(np.int64) - ordered[:, :, low]).max(axis=1)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two images (h, w, 3) differ little, as a whole and in every part."""
    difference = np.abs(one.astype(np.int16) - other).mean(axis=2)  # (h, w)
    if difference.mean() > _SAME:
        return False
    rows, columns = (max(1, side // _PARTS) for side in difference.shape)
    height, width = difference.shape[0] // rows, difference.shape[1] // columns
    parts = difference[: height * rows, : width * columns].reshape(height, rows, width, columns)
    return bool(parts.mean(axis=(1, 3)).max() <= _SAME_PART)


def _borders(frames: np.ndarray, kept: np.ndarray) -> tuple[int, int, int, int]:
    """Return the borders in frames (T, H, W, 3), of which ``kept`` (K,) show something."""
    height, width = frames.shape[1:3]
    rows = frames[:, :, :: _step(width)][kept].max(axis=0).max(axis=2)  # (H, w), over all frames and colours
    top, bottom = _ends(rows)
    columns = frames[:, top : height - bottom : _step(height)][kept].max(axis=0).max(axis=2)  # (h, W)
    return (top, bottom, *_ends(columns.T))


def _ends(brightest: np.ndarray) -> tuple[int, int]:
    """Return the borders at the first and the last line, from the brightest values of lines (L, w)."""
    length = len(brightest)
    depth = max(8, length // 60)  # lines: one block of the compression, or more
    runs, sharp = [], []  # of each end: black lines, and whether an image begins behind them
    for lines in (brightest, brightest[::-1]):
        run = int((lines.max(axis=1) > _BLACK).argmax())  # 0 if all are black
        runs.append(run)
        sharp.append(run > 0 and (lines[run : run + depth].max(axis=0) > _BRIGHT).mean() >= _EDGE)
    first, last = (run if edge else 0 for run, edge in zip(runs, sharp, strict=True))
    if sharp[0] != sharp[1]:  # the image may be dark at one of two equal borders
        other = first or last
        if min(runs) >= _ALIKE * other:
            first, last = min(runs[0], other), min(runs[1], other)
        elif other < _ONE_SIDE * length:
            first, last = 0, 0
    limit = int(_MAX_CUT * length)
    if limit < first + last:
        first, last = limit * first // (first + last), limit * last // (first + last)
    return first, last
