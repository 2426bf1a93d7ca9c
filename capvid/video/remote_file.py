"""Large MP4 files at addresses, of which only the ranges are fetched that the chosen frames need."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from capvid.errors import VideoError
from capvid.utils.storage import Blob, Deadline, StorageError, read_range, size_of
from capvid.utils.validation import limits
from capvid.video.container_kind import boxes

MIN_BYTES = 16 << 20  # a smaller file is fetched at once
_BLOCK = 256 << 10
_MAX_AHEAD = 32  # blocks of one request

_opened: dict[str, RemoteFile] = {}  # by the path of the local copy


class RemoteFile:
    """A sparse local copy of a remote file, filled block by block.

    Args:
        blob: the remote file.
        size: its length in bytes.
        descriptor: of the local copy.
        deadline: for all requests.
    """

    def __init__(self, blob: Blob, size: int, descriptor: int, deadline: Deadline) -> None:
        self.size = size
        self._blob, self._descriptor, self._deadline = blob, descriptor, deadline
        self._missing = set(range(-(-size // _BLOCK)))
        self._next, self._ahead = -1, 1  # block after the last request, and the blocks of the next one
        os.truncate(descriptor, size)

    def fetch(self, start: int, stop: int) -> None:
        """Fetch what is missing of a range; raise StorageError if that fails."""
        for block in range(start // _BLOCK, -(-min(stop, self.size) // _BLOCK)):
            if block not in self._missing:
                continue
            self._ahead = min(2 * self._ahead, _MAX_AHEAD) if block == self._next else 1
            count = 1
            while count < self._ahead and block + count in self._missing:
                count += 1
            first, last = block * _BLOCK, min((block + count) * _BLOCK, self.size)
            origin = self._blob.start
            data = read_range(self._blob.url, origin + first, origin + last, deadline=self._deadline)
            os.pwrite(self._descriptor, data, first)
            self._missing.difference_update(range(block, block + count))
            self._next = block + count

    def read(self, start: int, length: int) -> bytes:
        """Read a range, which may end beyond the file."""
        length = max(0, min(length, self.size - start))
        self.fetch(start, start + length)
        return os.pread(self._descriptor, length, start)


class _Stream(io.RawIOBase):
    """An independent position in a remote file, for FFmpeg."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence, self._file.size)
        return self._position

    def tell(self) -> int:
        return self._position


def stream_of(path: Path) -> io.RawIOBase | None:
    """Return a stream that fetches what it reads of a remote file's local copy; None for other paths."""
    file = _opened.get(str(path))
    return None if file is None else _Stream(file)


@contextmanager
def sparse_copy(blob: Blob, timeout: float | None = None) -> Iterator[Path | None]:
    """Yield a local copy of a large remote MP4 that has its boxes' headers and its index.

    The rest is fetched as far as FFmpeg reads it. None if the file is small or no MP4 with an index, or if
    the server sends no parts of files.
    """
    deadline = Deadline(timeout)
    with tempfile.TemporaryFile(prefix="capvid-") as copy:
        path = Path(f"/proc/self/fd/{copy.fileno()}")
        size = blob.size if blob.member else size_of(blob.url, deadline=deadline) or 0
        try:
            usable = MIN_BYTES <= size <= limits().remote_bytes and path.exists()
            usable = (
                usable and read_range(blob.url, blob.start + 4, blob.start + 8, deadline=deadline) == b"ftyp"
            )
            if usable:
                file = RemoteFile(blob, size, copy.fileno(), deadline)
                usable = _fetch_index(file, path)
        except StorageError:  # the server does not send parts, or fetching all will tell the reason
            usable = False
        if not usable:
            yield None
            return
        _opened[str(path)] = file
        try:
            yield path
        finally:
            _opened.pop(str(path), None)


def _fetch_index(file: RemoteFile, path: Path) -> bool:
    """Fetch the headers of the outermost boxes and the index; return whether there is one."""
    has_index, end = False, 0
    with suppress(VideoError):
        while end < file.size:
            file.fetch(end, end + 16)
            at, length, name = next((box for box in boxes(path) if box[0] == end), (0, 0, b""))
            if not length or name == b"moof":
                return False
            if name == b"moov":
                if length > limits().header_bytes:
                    return False
                file.fetch(at, at + length)
                has_index = True
            end = at + length
    return has_index
