"""Detection of frames without new content (fades, repeated stills) and of black borders.

Array shapes: T frames, H and W their height and width, K kept frames, h and w height and width of subsampled
frames (about 64 x 64), from which both are detected.
"""

from __future__ import annotations

import numpy as np

_SAMPLES = 64  # per side
_MAX_FLAT_CONTRAST = 12  # levels between the darkest and the brightest 1 % of a frame of one colour
_MAX_DIFFERENCE = 1.0  # mean difference in levels between frames that count as equal
_MAX_CELL_DIFFERENCE = 4.0  # the same in each cell of a grid, so that small moving objects count
_CELLS = 8  # per side
_MAX_BLACK = 24  # maximum value in a border; compression noise reaches 20
_BRIGHT = 40  # values above are certainly not black
_MIN_EDGE = 0.5  # fraction of a border's edge along which the image must begin
_MIN_SINGLE_BORDER = 0.04  # fraction of a side's length, for a border without a counterpart
_MIN_RATIO = 0.8  # of the sizes of opposite borders that are taken for a pair
_MAX_CUT = 0.4  # fraction of a side's length, for both borders together


def useful_frames(frames: np.ndarray) -> np.ndarray:
    """Return the ascending indices (K,) of frames (T, H, W, 3) uint8 that show something new, at least one.

    Frames of one flat colour and frames nearly identical to the last kept frame are dropped. If all are flat,
    the first frame with the highest contrast is kept. Without frames, ValueError is raised.
    """
    if not len(frames):
        raise ValueError("no frames to choose from")
    height, width = frames.shape[1:3]
    samples = frames[:, :: _step(height), :: _step(width)]  # (T, h, w, 3)
    contrast = _contrast(samples)
    candidates = np.flatnonzero(contrast > _MAX_FLAT_CONTRAST)
    if len(candidates):  # a fade within black borders is flat only inside them
        top, bottom, left, right = _borders(samples, candidates)
        inside = samples[candidates, top : samples.shape[1] - bottom, left : samples.shape[2] - right]
        candidates = candidates[_contrast(inside) > _MAX_FLAT_CONTRAST]
    if not len(candidates):
        return np.array([int(contrast.argmax())])
    kept = [int(candidates[0])]
    for index in candidates[1:]:
        if not _equal(samples[kept[-1]], samples[index]):
            kept.append(int(index))
    return np.array(kept)


def letterbox(frames: np.ndarray) -> tuple[int, int, int, int]:
    """Return the widths of the black borders of frames (T, H, W, 3) uint8: (top, bottom, left, right).

    A border is black in every useful frame and has a sharp edge: along most of it, the image begins in at
    least one frame. Darkness that fades into the image is no border, unless the opposite border is sharp and
    about as wide. A border without counterpart must be at least 4 % of the side's length. Borders wider than
    40 % together are reduced to that in proportion.
    """
    return _borders(frames, useful_frames(frames))


def _step(length: int) -> int:
    return max(1, round(length / _SAMPLES))


def _contrast(samples: np.ndarray) -> np.ndarray:
    """Return the levels (T,) between the darkest and the brightest 1 % of each frame (T, h, w, 3)."""
    values = np.moveaxis(samples, 3, 1).reshape(len(samples), 3, -1)  # (T, 3, hw)
    low = values.shape[2] // 100
    high = values.shape[2] - 1 - low
    ordered = np.partition(values, (low, high), axis=2)
    return (ordered[:, :, high].astype(np.int64) - ordered[:, :, low]).max(axis=1)


def _equal(frame: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two frames (h, w, 3) differ little, on average and in every cell of a grid."""
    difference = np.abs(frame.astype(np.int16) - other).mean(axis=2)  # (h, w)
    if difference.mean() > _MAX_DIFFERENCE:
        return False
    rows, columns = (max(1, side // _CELLS) for side in difference.shape)
    height, width = difference.shape[0] // rows, difference.shape[1] // columns
    cells = difference[: height * rows, : width * columns].reshape(height, rows, width, columns)
    return bool(cells.mean(axis=(1, 3)).max() <= _MAX_CELL_DIFFERENCE)


def _borders(frames: np.ndarray, useful: np.ndarray) -> tuple[int, int, int, int]:
    """Return the borders of the frames (T, H, W, 3) with the indices ``useful`` (K,)."""
    height, width = frames.shape[1:3]
    rows = frames[:, :, :: _step(width)][useful].max(axis=0).max(axis=2)  # (H, w), over frames and colours
    top, bottom = _ends(rows)
    columns = frames[:, top : height - bottom : _step(height)][useful].max(axis=0).max(axis=2)  # (h, W)
    return (top, bottom, *_ends(columns.T))


def _ends(brightest: np.ndarray) -> tuple[int, int]:
    """Return the borders at the first and the last line, from the maximum values of lines (L, w)."""
    length = len(brightest)
    depth = max(8, length // 60)  # lines: at least one block of the compression
    runs, sharp = [], []  # at each end: number of black lines, and whether they end in a sharp edge
    for lines in (brightest, brightest[::-1]):
        run = int((lines.max(axis=1) > _MAX_BLACK).argmax())  # 0 if all lines are black
        runs.append(run)
        sharp.append(run > 0 and (lines[run : run + depth].max(axis=0) > _BRIGHT).mean() >= _MIN_EDGE)
    first, last = (run if edge else 0 for run, edge in zip(runs, sharp, strict=True))
    if sharp[0] != sharp[1]:  # the image may be dark at one of two equal borders
        border = first or last
        if min(runs) >= _MIN_RATIO * border:
            first, last = min(runs[0], border), min(runs[1], border)
        elif border < _MIN_SINGLE_BORDER * length:
            first, last = 0, 0
    limit = int(_MAX_CUT * length)
    if limit < first + last:
        first, last = limit * first // (first + last), limit * last // (first + last)
    return first, last
