"""The image reader: image files, and zip archives with a folder of frames for each video."""

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
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "WEBP")  # no format that runs a program or opens other files
_ORIENTATION = 0x112  # EXIF tag
_ORIENTATIONS = {  # clockwise degrees, after mirroring top to bottom
    2: (180, True),
    3: (180, False),
    4: (0, True),
    5: (90, True),
    6: (90, False),
    7: (270, True),
    8: (270, False),
}
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
    try:
        with _open_image(io.BytesIO(read())) as image:
            if size is not None and image.size != size:
                raise UnsuitableImageError("does not have the size of the first image")
            return _rgb(image)
    except (MemoryError, UnsuitableImageError):
        raise
    except Exception as error:  # damaged zip files and images raise errors of many types
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _open_image(file: IO[bytes]) -> Any:
    """Open an image with Pillow; raise UnsuitableImageError if it exceeds a limit."""
    from PIL import Image

    with _pillow_lock:  # Pillow's own limit on pixels only warns and cannot be set per call
        pillow_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(file, formats=_FORMATS)
        finally:
            Image.MAX_IMAGE_PIXELS = pillow_limit
    (width, height), max_pixels = image.size, limits().frame_pixels
    if width * height > max_pixels:
        raise UnsuitableImageError(
            f"has {width} x {height} pixels, more than the limit of {max_pixels}; "
            "raise CAPVID_LIMIT_FRAME_PIXELS"
        )
    return image


def _rgb(image: Any) -> np.ndarray:
    """Return an image as (H, W, 3) uint8; one of 16 bits by their upper halves, which Pillow would clip."""
    if image.mode.startswith("I;16"):
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    return np.array(image.convert("RGB"))


def _damaged_image(path: Path) -> VideoError:
    return TruncatedVideoError(path, "the image is damaged", remedy="get it again")


class StillSource(FrameSource):
    """Frame source over an image file: one frame, or those of an animated WebP, turned as its EXIF says.

    Raises:
        VideoError: it cannot be decoded, or exceeds a limit.
    """

    def __init__(self, path: Path) -> None:
        from PIL import UnidentifiedImageError

        self._path = path
        self._file = open_regular(path)
        try:
            self._image = _open_image(self._file)
            count = self._image.n_frames if self._image.format == "WEBP" else 1
            if count > limits().video_frames:
                raise UnsuitableImageError(f"has over {limits().video_frames} frames, which is the limit")
            seconds = [0.0]
            for number in range(count - 1):
                self._image.seek(number)
                self._image.load()
                seconds.append(seconds[-1] + self._image.info.get("duration", 100) / 1000)
            first = self._decode(0)
        except UnsuitableImageError as error:
            raise VideoError(path, str(error)) from error
        except UnidentifiedImageError as error:  # such as HEIC
            problem, remedy = "is an image (HEIC or AVIF) that cannot be read", "convert it to JPEG"
            raise VideoError(path, problem, remedy=remedy, kind="not-a-video") from error
        except (MemoryError, VideoError):
            raise
        except Exception as error:  # of many types
            raise _damaged_image(path) from error
        rotation, mirrored = _ORIENTATIONS.get(self._image.getexif().get(_ORIENTATION, 1), (0, False))
        self._describe(
            np.array(seconds),
            first,
            path=path,
            reader="images",
            codec=str(self._image.format).lower(),
            rotation=rotation,
            mirrored=mirrored,
            why="an image",
        )

    def _decode(self, index: int) -> np.ndarray:
        from PIL import ImageOps

        try:
            if self._image.tell() != index:
                self._image.seek(index)
            return _rgb(ImageOps.exif_transpose(self._image))
        except MemoryError:
            raise
        except Exception as error:  # of many types
            raise _damaged_image(self._path) from error

    def close(self) -> None:
        """Release the file."""
        self._image.close()
        self._file.close()


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
