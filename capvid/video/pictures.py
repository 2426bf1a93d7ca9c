"""Videos kept as pictures: a zip file with a folder for each video, its frames in the order of names.

Such a video's path is that of the zip file and the folder in it, ``frames.zip/video12``. Pictures have no
times: each is taken to be shown for two seconds.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath

import numpy as np

from capvid.errors import EmptyVideoError, MissingVideoError, TruncatedVideoError, VideoError
from capvid.video.source import FrameSource, VideoInfo

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
SECONDS = 2.0


def archive_of(path: Path) -> Path | None:
    """The zip file that ``path`` leads into, or is; None for any other path."""
    for place in (path, *path.parents):
        if place.suffix.lower() == ".zip" and place.is_file():
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
    status = archive.stat()
    try:
        return _open(str(archive), status.st_size, status.st_mtime_ns)
    except (OSError, zipfile.BadZipFile) as error:
        raise VideoError(archive, f"is not a zip file that can be read ({error})") from error


@lru_cache(maxsize=4)
def _open(archive: str, size: int, changed: int) -> tuple[zipfile.ZipFile, dict[str, list[str]]]:
    opened = zipfile.ZipFile(archive)
    folders: dict[str, list[str]] = {}
    for name in sorted(opened.namelist()):
        folder = PurePosixPath(name).parent
        # outputs are named by the folder: a name that leads out of the zip file is passed over
        inside = folder.parts and not folder.is_absolute() and ".." not in folder.parts
        if inside and name.lower().endswith(SUFFIXES):
            folders.setdefault(folder.as_posix(), []).append(name)
    return opened, folders


def decode_picture(read: Callable[[], bytes]) -> np.ndarray:
    """Decode the picture whose bytes ``read`` gives: (H, W, 3) uint8 RGB.

    Raises:
        ValueError: it cannot be read or decoded, whatever the reason.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read())) as image:
            return np.array(image.convert("RGB"))
    except Exception as error:  # zip files and pictures are broken in ways of many types
        raise ValueError(f"{type(error).__name__}: {error}") from error


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
        height, width = self._decode(0).shape[:2]
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
            VideoError: its size is not that of the first one.
        """
        frames = [self._decode(index) for index in indices]
        size = (self._info.height, self._info.width, 3)
        for index, frame in zip(indices, frames, strict=True):
            if frame.shape != size:
                raise VideoError(self._path, f"{self._names[index]} is not of the size of the first picture")
        return np.stack(frames) if frames else np.empty((0, *size), np.uint8)

    def _decode(self, index: int) -> np.ndarray:
        try:
            return decode_picture(lambda: self._archive.read(self._names[index]))
        except ValueError as error:
            raise TruncatedVideoError(
                self._path, f"{self._names[index]} cannot be decoded", remedy="get it again"
            ) from error

    def close(self) -> None:
        """Nothing to let go of: the zip file stays open for the next video in it."""
