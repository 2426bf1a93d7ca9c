"""Which reader for which video, when the user leaves it open; and what to try when one gives up.

PyAV is taken by default: it gives the same pictures as decord in two thirds of the time, jumps in long
videos, and notices damage that decord conceals. decord is asked where PyAV cannot open a file.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from capvid.errors import NoVideoStreamError, TruncatedVideoError, VideoError
from capvid.video.container import kind_of
from capvid.video.packets import Packets, scan
from capvid.video.source import FrameSource

_ONLY_PYAV = ("gif", "h264", "mpeg", "mpeg-ps", "mpeg-ts", "webp")


def open_suited(path: Path) -> FrameSource:
    """Open a file with the reader that suits it.

    Raises:
        VideoError: no reader can open it; the subclass says why.
    """
    from capvid.video.pictures import PicturesSource, archive_of

    if archive_of(path):
        return PicturesSource(path)
    from capvid.video.pyav_reader import PyAVSource

    kind = kind_of(path)
    try:
        packets = _packets(path, kind)
    except NoVideoStreamError:
        raise
    except VideoError as error:
        return _by_decord(path, kind, error)
    return PyAVSource(path, why=_why_pyav(packets, kind), packets=packets)


def _packets(path: Path, kind: str) -> Packets:
    """The packets of a file; those of the last one are kept, since a long video is read in parts."""
    try:
        found = path.stat()
    except OSError:
        return scan(path, kind)
    return _scanned(path, kind, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1)
def _scanned(path: Path, kind: str, *version: int) -> Packets:
    return scan(path, kind)


def _by_decord(path: Path, kind: str, error: VideoError) -> FrameSource:
    """Open a video of which PyAV gives no packets; if decord cannot either, PyAV's ``error`` counts."""
    from capvid.video.decord_reader import DecordSource

    if kind in _ONLY_PYAV:
        raise error
    try:
        return DecordSource(path, why="PyAV cannot open it")
    except VideoError:
        raise error from None


def _why_pyav(packets: Packets, kind: str) -> str:
    if packets.damaged:
        return "the file is damaged"
    if packets.codec == "av1":
        return "decord cannot decode av1"
    if kind in _ONLY_PYAV:
        return f"decord cannot read {kind} reliably"
    return "default"


def instead_of(source: FrameSource, error: VideoError, *, reader: str) -> FrameSource | None:
    """Open a video anew after reading it has failed, for only those of its frames that are right.

    Args:
        source: what has failed.
        error: how.
        reader: what the user asked for.

    Returns:
        The video, or ``None`` where nothing else can be done.

    Raises:
        VideoError: it cannot be opened that way either.
    """
    from capvid.video.pyav_reader import PyAVSource

    if isinstance(source, PyAVSource) and not source.careful and isinstance(error, TruncatedVideoError):
        why = source.info.why if reader == "pyav" else "the file is damaged"
        return PyAVSource(source.info.path, why=why, careful=True)
    return None
