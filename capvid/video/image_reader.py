"""The image reader: zip archives with a folder of frames for each video."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from capvid.errors import EmptyVideoError, MissingVideoError, TruncatedVideoError, VideoError
from capvid.utils.files import open_regular
from capvid.utils.limits import limits
from capvid.video.frame_source import FrameSource, VideoInfo

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
SECONDS = 2.0
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")  # none that runs a program or opens another file
_CHUNK = 4096  # bytes decompressed at a time
_ENTRY = 4  # bytes of memory, at least, for each byte of a zip file's directory
_pillow_lock = threading.Lock()


def archive_of(path: Path) -> Path | None:
    """Return the zip file that ``path`` leads into, or is; None for any other path."""
    for parent in (path, *path.parents):
        if parent.suffix.lower() == ".zip" and os.path.isfile(parent):  # noqa: PTH113
            return parent
    return None


def picture_folders(archive: Path) -> list[Path]:
    """Return the sorted paths of the videos in a zip file: its folders that hold images.

    Raises:
        VideoError: not a zip file.
    """
    return [archive / folder for folder in _contents(archive)[1]]


def _contents(archive: Path) -> tuple[zipfile.ZipFile, dict[str, list[str]]]:
    """Return the open zip file, and the names of each folder's images."""
    try:
        status = archive.stat()
        return _open(str(archive), status.st_size, status.st_mtime_ns)
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise VideoError(archive, f"is not a zip file that can be read ({error})") from error


@lru_cache(maxsize=4)
def _open(archive: str, size: int, changed: int) -> tuple[zipfile.ZipFile, dict[str, list[str]]]:
    opened = zipfile.ZipFile(_BoundedReads(open_regular(archive), limits().header_bytes // _ENTRY))
    folders: dict[str, list[str]] = {}
    for name in sorted(opened.namelist()):
        folder = PurePosixPath(name).parent
        # outputs are named by the folder: a name that leads out of the zip file is skipped
        inside = folder.parts and not folder.is_absolute() and ".." not in folder.parts
        if inside and name.lower().endswith(SUFFIXES):
            folders.setdefault(folder.as_posix(), []).append(name)
    return opened, folders


class UnsuitableImageError(ValueError):
    """An image beyond a limit, or not of the size of the others."""


class _BoundedReads:
    """A file that refuses reads beyond a limit: ``zipfile`` reads a directory at once."""

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes

    def read(self, size: int = -1) -> bytes:
        """Read like the file, up to the limit."""
        if size > self._max_bytes:
            raise zipfile.BadZipFile(f"its directory has {size} bytes, more than the limit")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a member of a zip file of at most :attr:`~capvid.utils.limits.Limits.member_bytes`.

    Raises:
        UnsuitableImageError: it is larger.
        zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError: it cannot be read.
    """
    size, max_size = archive.getinfo(name).file_size, limits().member_bytes
    if size > max_size:
        raise UnsuitableImageError(
            f"has {size} bytes, more than the limit of {max_size}; raise CAPVID_LIMIT_MEMBER_BYTES"
        )
    with archive.open(name) as member:
        # small pieces: some decompressors return all that a piece holds, whatever the declared size
        return b"".join(iter(lambda: member.read(_CHUNK), b""))


def decode_picture(read: Callable[[], bytes], size: tuple[int, int] | None = None) -> np.ndarray:
    """Decode the image whose bytes ``read`` returns: (H, W, 3) uint8 RGB.

    Args:
        read: function that returns the bytes of the file.
        size: required width and height; None allows any size within the limit on pixels.

    Raises:
        UnsuitableImageError: it is beyond a limit, or of another size.
        ValueError: it cannot be read or decoded, whatever the reason.
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
            width, height = image.size
            max_pixels = limits().frame_pixels
            if width * height > max_pixels:
                raise UnsuitableImageError(
                    f"has {width} x {height} pixels, more than the limit of {max_pixels}; "
                    "raise CAPVID_LIMIT_FRAME_PIXELS"
                )
            if size is not None and image.size != size:
                raise UnsuitableImageError("is not of the size of the first picture")
            return np.array(image.convert("RGB"))
    except (MemoryError, UnsuitableImageError):
        raise
    except Exception as error:  # zip files and images are broken in ways of many types
        raise ValueError(f"{type(error).__name__}: {error}") from error


class PicturesSource(FrameSource):
    """Frame source over the images of one folder in a zip file.

    Raises:
        VideoError: the zip file or its first image cannot be read, or there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        archive = archive_of(path)
        if archive is None:
            raise MissingVideoError(path, "leads into no zip file")
        self._path = path
        self._archive, folders = _contents(archive)
        self._names = folders.get(path.relative_to(archive).as_posix(), [])
        if not self._names:
            raise EmptyVideoError(path, "is no folder of pictures", remedy=f"see what is in {archive.name}")
        self._size: tuple[int, int] | None = None
        height, width = self._decode(0).shape[:2]
        self._size = width, height
        count = len(self._names)
        self._info = VideoInfo(
            path=path,
            reader="pictures",
            codec=Path(self._names[0]).suffix[1:].lower(),
            width=width,
            height=height,
            num_frames=count,
            duration=SECONDS * count,
            fps=1 / SECONDS,
            why="pictures in a zip file",
        )

    @property
    def info(self) -> VideoInfo:
        """Properties of the video."""
        return self._info

    def frame_times(self) -> np.ndarray:
        """Return the presentation times (N,) in seconds: every image lasts equally long."""
        return np.arange(len(self._names)) * SECONDS

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode images by index: (T, H, W, 3) uint8 RGB.

        Raises:
            TruncatedVideoError: an image cannot be decoded.
            VideoError: an image is larger than the limits, or not of the size of the first one.
        """
        frames = np.empty((len(indices), self._info.height, self._info.width, 3), np.uint8)
        for row, index in zip(frames, indices, strict=True):
            row[:] = self._decode(index)
        return frames

    def _decode(self, index: int) -> np.ndarray:
        name = self._names[index]
        try:
            return decode_picture(lambda: read_member(self._archive, name), self._size)
        except UnsuitableImageError as error:
            raise VideoError(self._path, f"{name} {error}") from error
        except ValueError as error:
            raise TruncatedVideoError(
                self._path, f"{name} cannot be decoded", remedy="get it again"
            ) from error

    def close(self) -> None:
        """Do nothing: the zip file stays open for the next video in it."""
