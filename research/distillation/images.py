"""Training images from folders and zip files, random crops and augmentation."""

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

PREFETCH = 64


@dataclass(frozen=True)
class ImageSource:
    """An image file: its name without suffix (``video12/004``) and a function that returns its bytes."""

    name: str
    read: Callable[[], bytes]


def image_size(how: Preprocess) -> tuple[int, int]:
    """Return the height and width to which ``how`` resizes images.

    Raises:
        UsageError: ``how`` has no fixed size.
    """
    if how.size is None:
        raise UsageError("a backbone is only trained on images of a fixed size", remedy="give it a size")
    return how.size


def find_images(sources: Sequence[Path]) -> list[ImageSource]:
    """Find the images in folders and zip files, sorted by name within each source.

    Raises:
        DataError: a source is missing, not a folder or zip file, or without images; or a name occurs twice.
    """
    found: list[ImageSource] = []
    for source in sources:
        images = list(_images_in_folder(source) if source.is_dir() else _images_in_archive(source))
        if not images:
            raise DataError(f"{source}: no images in it", remedy=f"give {', '.join(SUFFIXES)} files")
        found += images
    names = [image.name for image in found]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the image {duplicate} occurs twice", remedy="give each image a name of its own")
    return found


def _images_in_folder(folder: Path) -> Iterator[ImageSource]:
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES):
        yield ImageSource(path.relative_to(folder).with_suffix("").as_posix(), path.read_bytes)


def _images_in_archive(path: Path) -> Iterator[ImageSource]:
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such folder or zip file of images") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: neither a folder nor a zip file ({error})") from error
    for name in sorted(name for name in archive.namelist() if name.lower().endswith(SUFFIXES)):
        yield ImageSource(plain_name(name), lambda name=name: read_member(archive, name))  # type: ignore[misc]


def plain_name(name: str) -> str:
    """Return an image's name without its suffix; other names stay as they are."""
    path = PurePosixPath(name)
    return path.with_suffix("").as_posix() if path.suffix.lower() in SUFFIXES else name


def _decode(image: ImageSource) -> np.ndarray:
    """Decode an image: (1, H, W, 3) uint8 RGB.

    Raises:
        DataError: it cannot be decoded.
    """
    try:
        return decode_image(image.read)[None]
    except ValueError as error:
        raise DataError(f"{image.name}: not an image that can be decoded ({error})") from error


def decode_images(images: Sequence[ImageSource], workers: int) -> Iterator[np.ndarray]:
    """Decode images in order, prefetching in ``workers`` threads."""
    with ThreadPoolExecutor(workers) as pool:
        for first in range(0, len(images), PREFETCH):
            yield from pool.map(_decode, images[first : first + PREFETCH])


def image_array(
    images: Sequence[ImageSource],
    how: Preprocess,
    path: Path,
    *,
    crop: Callable[[np.ndarray, int], np.ndarray] | None = None,
    description: str = "",
    workers: int = 2,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """Prepare all images by ``how`` into one array (N, 3, H, W) uint8, kept in the file ``path``.

    An existing file for the same images and preparation is reused.

    Args:
        images: N image files.
        how: preprocessing to a fixed size.
        path: file that holds the array.
        crop: returns the crop of an image (H', W', 3) with this row; None keeps the entire image.
        description: identifies the preparation; a file with another description is replaced.
        workers: threads that decode.
        progress: called with the number of prepared images.
    """
    shape = (len(images), 3, *image_size(how))
    index = path.with_suffix(".txt")
    names = "\n".join([description or repr(how), *(image.name for image in images)])
    if path.exists() and index.exists() and index.read_text(encoding="utf-8") == names:
        return np.memmap(path, np.uint8, "r", shape=shape)
    index.unlink(missing_ok=True)
    array = np.memmap(path, np.uint8, "w+", shape=shape)
    for row, image in enumerate(decode_images(images, workers)):
        if crop is not None:
            image = crop(image[0], row)[None]
        array[row] = prepare(image, how)[0].transpose(2, 0, 1)
        progress(row + 1)
    array.flush()
    atomic_write_text(index, names)
    return array


BLURRED = 0.15  # share of batches whose views are blurred horizontally, to imitate a moving camera
GREY = torch.tensor([0.299, 0.587, 0.114])


def random_views(
    images: Tensor, size: tuple[int, int], *, least_area: float, generator: torch.Generator
) -> Tensor:
    """Return augmented views: random crops with random mirroring, lighting and colours.

    Args:
        images: (B, 3, H, W) uint8, on any device.
        size: (h, w) of the views.
        least_area: smallest share of an image that a view covers.
        generator: CPU generator, so that every device gets the same views.

    Returns:
        (B, 3, h, w) float32 from 0 to 255.
    """
    count = len(images)

    def uniform(low: float, high: float) -> Tensor:
        return (torch.rand(count, generator=generator) * (high - low) + low).to(images.device)

    area, stretch = uniform(least_area, 1.0).sqrt(), torch.exp(uniform(math.log(0.85), math.log(1.18)))
    wide, high = (area * stretch).clamp_max(1.0), (area / stretch).clamp_max(1.0)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    transform = torch.zeros(count, 2, 3, device=images.device)
    transform[:, 0, 0], transform[:, 1, 1] = wide * mirror, high
    transform[:, 0, 2], transform[:, 1, 2] = uniform(-1, 1) * (1 - wide), uniform(-1, 1) * (1 - high)
    grid = F.affine_grid(transform, [count, 3, *size], align_corners=False)  # (B, h, w, 2)
    seen = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    if float(torch.rand((), generator=generator)) < BLURRED:
        seen = F.avg_pool2d(F.pad(seen, (2, 2, 0, 0), mode="replicate"), (1, 5), 1)
    return _adjust_colours(seen, uniform(0.5, 1.3), uniform(0.7, 1.3), uniform(0.3, 1.4))


def resize_images(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images (B, 3, H, W) uint8 to (B, 3, h, w) float32 from 0 to 255."""
    return F.interpolate(images.float(), size=size, mode="bilinear", antialias=True)


def _adjust_colours(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Scale brightness, contrast and saturation, (B,) each, with one matrix per image."""
    grey, eye = GREY.to(images.device), torch.eye(3, device=images.device)
    saturation = saturation.view(-1, 1, 1)
    matrix = saturation * eye + (1 - saturation) * grey.expand(3, 3)  # (B, 3, 3)
    matrix = matrix * (brightness * contrast).view(-1, 1, 1)
    mean = images.mean((2, 3)) @ grey * brightness * (1 - contrast)  # (B,)
    flat = torch.baddbmm(mean.view(-1, 1, 1), matrix, images.flatten(2))
    return flat.clamp_(0, 255).view_as(images)


LEAST_AREA = 0.4  # share of the image
STRETCH = 1.14
LEAST_SIDE = 32  # pixels, if the image is large enough


@dataclass(frozen=True)
class View:
    """View ``number`` of every image.

    Attributes:
        number: from 0.
        images: (N, 3, h, w) uint8, as input of the student.
        description: everything the views depend on besides the images.
    """

    number: int
    images: np.ndarray
    description: str


def random_crop(image: np.ndarray, row: int, number: int) -> np.ndarray:
    """Return a random crop of an image (H, W, 3), with random stretch and mirroring.

    The same ``row`` and ``number`` give the same crop.
    """
    height, width = image.shape[:2]
    draw = np.random.default_rng((row, number))
    side = math.sqrt(draw.uniform(LEAST_AREA, 1))
    stretch = math.exp(draw.uniform(-math.log(STRETCH), math.log(STRETCH)))
    rows = min(height, max(LEAST_SIDE, round(height * side / stretch)))
    columns = min(width, max(LEAST_SIDE, round(width * side * stretch)))
    top, left = int(draw.integers(height - rows + 1)), int(draw.integers(width - columns + 1))
    part = image[top : top + rows, left : left + columns]
    return np.ascontiguousarray(part[:, ::-1] if draw.random() < 0.5 else part)


def make_view(
    images: Sequence[ImageSource],
    number: int,
    how: Preprocess,
    path: Path,
    *,
    workers: int = 2,
    progress: Callable[[int], None] = lambda done: None,
) -> View:
    """Crop a view from every image and prepare it by ``how``, without trimming black borders.

    The views are cached in the file ``path``.
    """
    how = replace(how, trim=False)
    description = f"view {number}, area from {LEAST_AREA:g}, stretch to {STRETCH:g}, {how}"
    array = image_array(
        images,
        how,
        path,
        crop=lambda image, row: random_crop(image, row, number),
        description=description,
        workers=workers,
        progress=progress,
    )
    return View(number, array, description)


def view_crops(
    view: View, images: Sequence[ImageSource], teacher: Backbone, workers: int
) -> Iterator[np.ndarray]:
    """Yield the view of each image, preprocessed for the teacher.

    A network of single frames gets the crop with its own preprocessing, (1, h', w', 3). A network of clips,
    whose own input is as small as the student's and would be centre-cropped, gets the student's pixels,
    repeated in all frames, (1, C, h, w, 3).
    """
    clip = teacher.entry.clip
    if clip is None:
        for row, image in enumerate(decode_images(images, workers)):
            yield teacher.prepare(random_crop(image[0], row, view.number)[None])
    else:
        for pixels in view.images:
            frame = pixels.transpose(1, 2, 0)  # (h, w, 3)
            yield np.broadcast_to(frame, (1, clip.frames, *frame.shape))
