"""Videos kept as pictures: a zip file with a folder for each video, its frames in the order of names.

Such a video's path is that of the zip file and the folder in it, ``frames.zip/video12``. Pictures have no
times: each is taken to be shown for two seconds.
"""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from capvid.errors import EmptyVideoError, MissingVideoError, TruncatedVideoError, VideoError
from capvid.files import open_regular
from capvid.limits import limits
from capvid.video.source import FrameSource, VideoInfo

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
SECONDS = 2.0
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")  # none that runs a program or opens another file
_CHUNK = 4096  # bytes that are decompressed at a time
_ENTRY = 4  # bytes of memory, at least, for each byte of a zip file's directory
_pillow_lock = threading.Lock()


def archive_of(path: Path) -> Path | None:
    """The zip file that ``path`` leads into, or is; None for any other path."""
    for place in (path, *path.parents):
        if place.suffix.lower() == ".zip" and os.path.isfile(place):  # noqa: PTH113
            return place
    return None


def picture_folders(archive: Path) -> list[Path]:
    """Paths of the videos in a zip file, in the order of names: its folders that hold pictures.

    Raises:
        VideoError: it is not a zip file.
    """
    return [archive / folder for folder in _contents(archive)[1]]


def _contents(archive: Path) -> tuple[zipfile.ZipFile, dict[str, list[str]]]:
    """The open zip file, and the names of each folder's pictures."""
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
        # outputs are named by the folder: a name that leads out of the zip file is passed over
        inside = folder.parts and not folder.is_absolute() and ".." not in folder.parts
        if inside and name.lower().endswith(SUFFIXES):
            folders.setdefault(folder.as_posix(), []).append(name)
    return opened, folders


class UnsuitableImageError(ValueError):
    """An image beyond a limit, or not of the size of the others."""


class _BoundedReads:
    """A file that refuses reads beyond a limit: ``zipfile`` reads a whole directory at once."""

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
    """Read a member of a zip file of at most :attr:`~capvid.limits.Limits.member_bytes`.

    Raises:
        UnsuitableImageError: it is larger.
        zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError: it cannot be read.
    """
    most = limits().member_bytes
    size = archive.getinfo(name).file_size
    if size > most:
        raise UnsuitableImageError(
            f"has {size} bytes, more than the limit of {most}; raise CAPVID_LIMIT_MEMBER_BYTES"
        )
    data = bytearray()
    with archive.open(name) as member:
        # small pieces, since some decompressors give all that a piece holds, whatever the declared size
        while piece := member.read(_CHUNK):
            data += piece
    return bytes(data)


def decode_picture(read: Callable[[], bytes], size: tuple[int, int] | None = None) -> np.ndarray:
    """Decode the picture whose bytes ``read`` gives: (H, W, 3) uint8 RGB.

    Args:
        read: the source of the file's bytes.
        size: width and height that it must have; None allows any size within the limit on pixels.

    Raises:
        UnsuitableImageError: it is beyond a limit, or not of that size.
        ValueError: it cannot be read or decoded, whatever the reason.
    """
    from PIL import Image

    try:
        with _without_pillow_limit():
            image = Image.open(io.BytesIO(read()), formats=_FORMATS)
        with image:
            _check_size(image.size, size)
            return np.array(image.convert("RGB"))
    except (MemoryError, UnsuitableImageError):
        raise
    except Exception as error:  # zip files and pictures are broken in ways of many types
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _check_size(actual: tuple[int, int], wanted: tuple[int, int] | None) -> None:
    width, height = actual
    most = limits().frame_pixels
    if width * height > most:
        raise UnsuitableImageError(
            f"has {width} x {height} pixels, more than the limit of {most}; raise CAPVID_LIMIT_FRAME_PIXELS"
        )
    if wanted is not None and actual != wanted:
        raise UnsuitableImageError("is not of the size of the first picture")


@contextmanager
def _without_pillow_limit() -> Iterator[None]:
    """Set Pillow's own limit on pixels aside, which warns and cannot be changed per call."""
    from PIL import Image

    with _pillow_lock:
        before = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


class PicturesSource(FrameSource):
    """A :class:`~capvid.video.source.FrameSource` over the pictures of one folder in a zip file.

    Raises:
        VideoError: the zip file or its first picture cannot be read, or there is no such folder.
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
        """What is known about the video."""
        return self._info

    def frame_times(self) -> np.ndarray:
        """Presentation times (N,) in seconds: every picture is shown equally long."""
        return np.arange(len(self._names)) * SECONDS

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode pictures by index: (T, H, W, 3) uint8 RGB.

        Raises:
            TruncatedVideoError: a picture cannot be decoded.
            VideoError: it is larger than the limits, or not of the size of the first one.
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
        """Nothing to let go of: the zip file stays open for the next video in it."""
