"""Pictures to learn from: out of folders and zip files into one array, decoded once."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capvid.backbones.backbone import Backbone
from capvid.backbones.catalog import Preprocess
from capvid.backbones.preprocessing import prepare
from capvid.errors import DataError, UsageError
from capvid.utils.files import atomic_write_text
from capvid.video.image_reader import SUFFIXES, decode_image, read_member

AHEAD = 64


@dataclass(frozen=True)
class Picture:
    """One picture: its name without suffix (``video12/004``), and a function that gives its bytes."""

    name: str
    read: Callable[[], bytes]


def picture_size(how: Preprocess) -> tuple[int, int]:
    """Height and width to which ``how`` squashes pictures.

    Raises:
        UsageError: it does not squash them.
    """
    if how.size is None:
        raise UsageError("a backbone is only trained on pictures of a fixed size", remedy="give it a size")
    return how.size


def find_pictures(sources: Sequence[Path]) -> list[Picture]:
    """Find the pictures in folders and zip files, in the order of names within each.

    Raises:
        DataError: a source is missing, not a folder or zip file, or without pictures; or a name comes twice.
    """
    found: list[Picture] = []
    for source in sources:
        pictures = list(_below(source) if source.is_dir() else _inside(source))
        if not pictures:
            raise DataError(f"{source}: no pictures in it", remedy=f"give {', '.join(SUFFIXES)} files")
        found += pictures
    names = [picture.name for picture in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the picture {twice} comes twice", remedy="give each picture a name of its own")
    return found


def _below(folder: Path) -> Iterator[Picture]:
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES):
        yield Picture(path.relative_to(folder).with_suffix("").as_posix(), path.read_bytes)


def _inside(path: Path) -> Iterator[Picture]:
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such folder or zip file of pictures") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: neither a folder nor a zip file ({error})") from error
    for name in sorted(name for name in archive.namelist() if name.lower().endswith(SUFFIXES)):
        yield Picture(plain_name(name), lambda name=name: read_member(archive, name))  # type: ignore[misc]


def plain_name(name: str) -> str:
    """Return a picture's name without its suffix; other names stay as they are."""
    path = PurePosixPath(name)
    return path.with_suffix("").as_posix() if path.suffix.lower() in SUFFIXES else name


def _decoded(picture: Picture) -> np.ndarray:
    """Decode a picture: (1, H, W, 3) uint8 RGB.

    Raises:
        DataError: it cannot be decoded.
    """
    try:
        return decode_image(picture.read)[None]
    except ValueError as error:
        raise DataError(f"{picture.name}: not a picture that can be decoded ({error})") from error


def decoded(pictures: Sequence[Picture], workers: int) -> Iterator[np.ndarray]:
    """Decode pictures in order, ahead in ``workers`` threads."""
    with ThreadPoolExecutor(workers) as pool:
        for first in range(0, len(pictures), AHEAD):
            yield from pool.map(_decoded, pictures[first : first + AHEAD])


def picture_array(
    pictures: Sequence[Picture],
    how: Preprocess,
    path: Path,
    *,
    cut: Callable[[np.ndarray, int], np.ndarray] | None = None,
    of: str = "",
    workers: int = 2,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """Prepare all pictures by ``how`` into one array (N, 3, H, W) uint8, kept in the file ``path``.

    A file that is there already, of the right size and for the same pictures, is taken as it is.

    Args:
        pictures: N of them.
        how: to a fixed size.
        path: of the file.
        cut: gives the part of a picture (H', W', 3), by its row, that is taken instead of the whole.
        of: what is cut, in words; other words mean another array.
        workers: threads that decode.
        progress: is told how many pictures are done.
    """
    shape = (len(pictures), 3, *picture_size(how))
    index = path.with_suffix(".txt")
    names = "\n".join([of or how.describe(), *(picture.name for picture in pictures)])
    if path.exists() and index.exists() and index.read_text(encoding="utf-8") == names:
        return np.memmap(path, np.uint8, "r", shape=shape)
    index.unlink(missing_ok=True)
    array = np.memmap(path, np.uint8, "w+", shape=shape)
    for row, image in enumerate(decoded(pictures, workers)):
        if cut is not None:
            image = cut(image[0], row)[None]
        array[row] = prepare(image, how)[0].transpose(2, 0, 1)
        progress(row + 1)
    array.flush()
    atomic_write_text(index, names)
    return array


BLURRED = 0.15  # share of batches whose views are blurred along the rows, as by a moving camera
GREY = torch.tensor([0.299, 0.587, 0.114])


def views(
    pictures: Tensor, size: tuple[int, int], *, least_area: float, generator: torch.Generator
) -> Tensor:
    """Random views of pictures: part of the picture, mirrored or not, in other light and colours.

    Args:
        pictures: (B, 3, H, W) uint8, on any device.
        size: (h, w) of the views.
        least_area: least share of a picture that a view shows.
        generator: of all that is drawn, on the CPU, so that every device gets the same views.

    Returns:
        (B, 3, h, w) float32 from 0 to 255.
    """
    count = len(pictures)

    def uniform(low: float, high: float) -> Tensor:
        return (torch.rand(count, generator=generator) * (high - low) + low).to(pictures.device)

    area, stretch = uniform(least_area, 1.0).sqrt(), torch.exp(uniform(math.log(0.85), math.log(1.18)))
    wide, high = (area * stretch).clamp_max(1.0), (area / stretch).clamp_max(1.0)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    transform = torch.zeros(count, 2, 3, device=pictures.device)
    transform[:, 0, 0], transform[:, 1, 1] = wide * mirror, high
    transform[:, 0, 2], transform[:, 1, 2] = uniform(-1, 1) * (1 - wide), uniform(-1, 1) * (1 - high)
    grid = F.affine_grid(transform, [count, 3, *size], align_corners=False)  # (B, h, w, 2)
    seen = F.grid_sample(pictures.float(), grid, padding_mode="border", align_corners=False)
    if float(torch.rand((), generator=generator)) < BLURRED:
        seen = F.avg_pool2d(F.pad(seen, (2, 2, 0, 0), mode="replicate"), (1, 5), 1)
    return _recoloured(seen, uniform(0.5, 1.3), uniform(0.7, 1.3), uniform(0.3, 1.4))


def whole(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures (B, 3, H, W) uint8, seen whole: (B, 3, h, w) float32 from 0 to 255."""
    return F.interpolate(pictures.float(), size=size, mode="bilinear", antialias=True)


def _recoloured(pictures: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Scale light, distance from the mean, and distance from grey, (B,) each; one matrix per picture."""
    grey, eye = GREY.to(pictures.device), torch.eye(3, device=pictures.device)
    saturation = saturation.view(-1, 1, 1)
    matrix = saturation * eye + (1 - saturation) * grey.expand(3, 3)  # (B, 3, 3)
    matrix = matrix * (brightness * contrast).view(-1, 1, 1)
    mean = pictures.mean((2, 3)) @ grey * brightness * (1 - contrast)  # (B,)
    flat = torch.baddbmm(mean.view(-1, 1, 1), matrix, pictures.flatten(2))
    return flat.clamp_(0, 255).view_as(pictures)


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
    """Return the view of each picture in turn, as the teacher wants it.

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
