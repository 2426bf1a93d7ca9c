"""Views of pictures with targets of their own.

A student learns more from what a teacher sees in the very part of the picture that it is shown itself (Beyer
et al., "Knowledge distillation: A good teacher is patient and consistent", CVPR 2022, arXiv:2106.05237). To
ask the teachers anew at every step would take many times as long as the step; so some views of each picture
are cut once, and the teachers are asked about them once.

Notation for array shapes: N pictures, H and W height and width of one of them, h and w of a student's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from capvid.features.backbones import Backbone
from capvid.features.registry import Preprocess
from capvid.training.distil.pictures import Picture, decoded, picture_array

LEAST_AREA = 0.4  # share of the picture
STRETCH = 1.14
LEAST_SIDE = 32  # pixels, where the picture has as many


@dataclass(frozen=True)
class View:
    """The view ``number`` of every picture.

    Attributes:
        number: from 0.
        pictures: (N, 3, h, w) uint8, as the student gets them.
        description: all that they depend on beside the pictures.
    """

    number: int
    pictures: np.ndarray
    description: str


def cut(picture: np.ndarray, row: int, number: int) -> np.ndarray:
    """Cut a part out of a picture (H, W, 3), stretched at random and mirrored or not.

    The same ``row`` and ``number`` give the same part.
    """
    height, width = picture.shape[:2]
    draw = np.random.default_rng((row, number))
    side = math.sqrt(draw.uniform(LEAST_AREA, 1))
    stretch = math.exp(draw.uniform(-math.log(STRETCH), math.log(STRETCH)))
    rows = min(height, max(LEAST_SIDE, round(height * side / stretch)))
    columns = min(width, max(LEAST_SIDE, round(width * side * stretch)))
    top, left = int(draw.integers(height - rows + 1)), int(draw.integers(width - columns + 1))
    part = picture[top : top + rows, left : left + columns]
    return np.ascontiguousarray(part[:, ::-1] if draw.random() < 0.5 else part)


def make_view(
    pictures: Sequence[Picture],
    number: int,
    how: Preprocess,
    path: Path,
    *,
    workers: int = 2,
    progress: Callable[[int], None] = lambda done: None,
) -> View:
    """Cut a view out of every picture and prepare it by ``how``, but for black borders.

    They are kept in the file ``path`` and found there again.
    """
    how = replace(how, trim=False)
    description = f"view {number}, area from {LEAST_AREA:g}, stretch to {STRETCH:g}, {how.describe()}"
    array = picture_array(
        pictures,
        how,
        path,
        cut=lambda picture, row: cut(picture, row, number),
        of=description,
        workers=workers,
        progress=progress,
    )
    return View(number, array, description)


def view_crops(
    view: View, pictures: Sequence[Picture], teacher: Backbone, workers: int
) -> Iterator[np.ndarray]:
    """The view of each picture in turn, as the teacher wants it.

    A network of single frames gets the part of the picture itself, (1, h', w', 3) by its own preprocessing; a
    network of clips, which knows pictures as small as the student's and would cut out their centre, gets the
    student's pixels, the same in all frames (1, C, h, w, 3).
    """
    clip = teacher.entry.clip
    if clip is None:
        for row, picture in enumerate(decoded(pictures, workers)):
            yield teacher.prepare(cut(picture[0], row, view.number)[None])
    else:
        for pixels in view.pictures:
            frame = pixels.transpose(1, 2, 0)  # (h, w, 3)
            yield np.broadcast_to(frame, (1, clip.frames, *frame.shape))
