"""Pictures to learn from: out of folders and zip files into one array, decoded once."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from capvid.errors import DataError, UsageError
from capvid.features.preprocess import prepare
from capvid.features.registry import Preprocess
from capvid.files import atomic_write_text
from capvid.video.pictures import SUFFIXES, decode_picture, read_member

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
    """A picture's name without its suffix; other names stay as they are."""
    path = PurePosixPath(name)
    return path.with_suffix("").as_posix() if path.suffix.lower() in SUFFIXES else name


def _decoded(picture: Picture) -> np.ndarray:
    """Decode a picture: (1, H, W, 3) uint8 RGB.

    Raises:
        DataError: it cannot be decoded.
    """
    try:
        return decode_picture(picture.read)[None]
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
