"""The image reader: zip archives with a folder of frames for each video."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from capvid.errors import TruncatedVideoError, VideoError
from capvid.utils.files import open_regular
from capvid.utils.validation import limits
from capvid.video.frame_source import FrameSource

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
SECONDS = 2.0  # duration of each image
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")  # no format that runs a program or opens other files
_CHUNK = 4096  # bytes decompressed at a time
_DIRECTORY_FACTOR = 4  # minimum bytes of memory per byte of a zip file's directory
_pillow_lock = threading.Lock()

Contents = tuple[zipfile.ZipFile, dict[str, list[str]]]  # the open file, and each folder's images


def archive_of(path: Path) -> Path | None:
    """Return the zip file that contains ``path``, or ``path`` itself if it is one; None for other paths."""
    for parent in (path, *path.parents):
        if parent.suffix.lower() == ".zip" and os.path.isfile(parent):  # noqa: PTH113
            return parent
    return None


def image_folders(archive: Path) -> list[Path]:
    """Return the sorted paths of the folders with images in a zip file; raise VideoError if unreadable."""
    return [archive / folder for folder in _contents(archive)[1]]


def _contents(archive: Path) -> Contents:
    """Return an open zip file and its images; raise VideoError if it cannot be read."""
    try:
        status = archive.stat()
        return _open(str(archive), status.st_size, status.st_mtime_ns)
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise VideoError(archive, f"is not a zip file that can be read ({error})") from error


@lru_cache(maxsize=4)
def _open(archive: str, *version: int) -> Contents:
    max_bytes = limits().header_bytes // _DIRECTORY_FACTOR
    opened = zipfile.ZipFile(_BoundedReads(open_regular(archive), max_bytes))
    folders: dict[str, list[str]] = {}
    for name in sorted(opened.namelist()):
        folder = PurePosixPath(name).parent
        # outputs are named after the folder, so names that lead out of the zip file are skipped
        inside = folder.parts and not folder.is_absolute() and ".." not in folder.parts
        if inside and name.lower().endswith(SUFFIXES):
            folders.setdefault(folder.as_posix(), []).append(name)
    return opened, folders


class _BoundedReads:
    """A file that refuses reads beyond a limit, since ``zipfile`` reads a directory at once."""

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._file, self._max_bytes = file, max_bytes

    def read(self, size: int = -1) -> bytes:
        if size > self._max_bytes:
            raise zipfile.BadZipFile(f"its directory has {size} bytes, more than the limit")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class UnsuitableImageError(ValueError):
    """The image exceeds a limit, or differs in size from the others."""


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a member of a zip file, of at most :attr:`~capvid.utils.validation.Limits.member_bytes`.

    Raises:
        UnsuitableImageError: the member is larger.
        zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError: the member cannot be read.
    """
    size, max_size = archive.getinfo(name).file_size, limits().member_bytes
    if size > max_size:
        raise UnsuitableImageError(
            f"has {size} bytes, more than the limit of {max_size}; raise CAPVID_LIMIT_MEMBER_BYTES"
        )
    with archive.open(name) as member:
        # small chunks: some decompressors return all that a chunk expands to, whatever the declared size
        return b"".join(iter(lambda: member.read(_CHUNK), b""))


def decode_image(read: Callable[[], bytes], size: tuple[int, int] | None = None) -> np.ndarray:
    """Decode the image whose bytes ``read`` returns: (H, W, 3) uint8 RGB.

    Raises:
        UnsuitableImageError: it exceeds a limit, or its width and height are not ``size``.
        ValueError: it cannot be read or decoded, for any reason.
    """
    from PIL import Image

    try:
        data = io.BytesIO(read())
        with _pillow_lock:  # Pillow's own limit on pixels only warns and cannot be set per call
            pillow_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                image = Image.open(data, formats=_FORMATS)
            finally:
                Image.MAX_IMAGE_PIXELS = pillow_limit
        with image:
            (width, height), max_pixels = image.size, limits().frame_pixels
            if width * height > max_pixels:
                raise UnsuitableImageError(
                    f"has {width} x {height} pixels, more than the limit of {max_pixels}; "
                    "raise CAPVID_LIMIT_FRAME_PIXELS"
                )
            if size is not None and image.size != size:
                raise UnsuitableImageError("does not have the size of the first image")
            return np.array(image.convert("RGB"))
    except (MemoryError, UnsuitableImageError):
        raise
    except Exception as error:  # damaged zip files and images raise errors of many types
        raise ValueError(f"{type(error).__name__}: {error}") from error


class ImageSource(FrameSource):
    """Frame source over the images of one folder in a zip file, which all have the same duration.

    The zip file, in which ``path`` is a folder, stays open for further videos.

    Raises:
        VideoError: the zip file or its first image cannot be read, or there is no such folder.
    """

    def __init__(self, path: Path, archive: Path) -> None:
        self._path = path
        self._archive, folders = _contents(archive)
        self._names = folders.get(path.relative_to(archive).as_posix(), [])
        if not self._names:
            problem = "is not a folder of images"
            raise VideoError(path, problem, remedy=f"check the contents of {archive.name}", kind="empty")
        self._size: tuple[int, int] | None = None
        first = self._decode(0)
        self._size = first.shape[1], first.shape[0]
        self._describe(
            np.arange(len(self._names)) * SECONDS,
            first,
            still=SECONDS,
            path=path,
            reader="images",
            codec=Path(self._names[0]).suffix[1:].lower(),
            why="images in a zip file",
        )

    def _decode(self, index: int) -> np.ndarray:
        name = self._names[index]
        try:
            return decode_image(lambda: read_member(self._archive, name), self._size)
        except UnsuitableImageError as error:
            raise VideoError(self._path, f"{name} {error}") from error
        except ValueError as error:
            problem = f"{name} cannot be decoded"
            raise TruncatedVideoError(self._path, problem, remedy="get it again") from error
