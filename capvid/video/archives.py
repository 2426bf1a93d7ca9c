"""Videos in tar archives, such as the shards of WebDataset: each is read where it lies, none is unpacked."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import PurePosixPath
from typing import BinaryIO, cast

from capvid.errors import VideoError
from capvid.files import open_regular
from capvid.storage import Blob, Deadline, StorageError, VideoPath, is_url, read_range, size_of

_FETCH = 1 << 16  # bytes fetched at a time where only the headers between members are read
_MOST_HEADER_BYTES = 1 << 20  # of one member; tarfile holds them in memory, and joins sparse maps slowly
# what tarfile lets through of damaged headers, beside its own errors
_DAMAGED = (ValueError, OverflowError, LookupError, TypeError, RecursionError, EOFError)


def is_archive(path: VideoPath) -> bool:
    """Whether the name is that of a tar archive; compressed ones are none, for they have no places."""
    return path.suffix.lower() == ".tar"


def members(archive: VideoPath, *, timeout: float | None = None) -> Iterator[Blob]:
    """Give the files in a tar archive, in their order; hidden ones are passed over.

    Args:
        archive: a path or an address.
        timeout: seconds for reading the headers at an address; None waits for ever.

    Raises:
        VideoError: it is no tar archive, or cut off.
        StorageError: it cannot be fetched.
    """
    url = str(archive)
    try:
        with closing(_HeaderReader(url, timeout)) as file:
            yield from _listed(archive, url, file)
    except FileNotFoundError as error:
        raise VideoError(archive, "there is no such file") from error
    except OSError as error:
        raise VideoError(archive, f"cannot be read ({error.strerror or error})") from error


def _listed(archive: VideoPath, url: str, file: _HeaderReader) -> Iterator[Blob]:
    end = -1
    try:
        with tarfile.open(fileobj=cast(BinaryIO, file), mode="r:") as tar:
            while (entry := tar.next()) is not None:
                file.budget = _MOST_HEADER_BYTES
                if tar.offset <= end:
                    raise tarfile.ReadError("a member that ends before it begins")
                end = tar.offset
                parts = PurePosixPath(entry.name).parts
                tar.members.clear()  # type: ignore[attr-defined]  # of which it would keep all
                if (
                    entry.isreg()
                    and not entry.issparse()
                    and parts
                    and not any(part.startswith(".") for part in parts)
                ):
                    yield Blob(url, entry.name, entry.offset_data, entry.size)
    except (tarfile.TarError, *_DAMAGED) as error:
        reason = str(error) or type(error).__name__
        raise VideoError(archive, f"is not a tar archive that can be read ({reason})") from error


class _HeaderReader:
    """The part of a file's interface that tarfile needs, with a limit on what it reads.

    Attributes:
        budget: bytes that may be read until it is set again.
    """

    def __init__(self, url: str, timeout: float | None) -> None:
        self.budget = _MOST_HEADER_BYTES
        self._url = url
        self._deadline = Deadline(timeout)
        self._file: BinaryIO | None = None
        self._position = 0
        self._block, self._block_start = b"", 0
        if is_url(url):
            size = size_of(url, deadline=self._deadline)
            if size is None:
                raise StorageError(
                    f"{url}: the server does not send parts of a file, which a tar archive needs",
                    remedy="fetch the archive first",
                )
            self._size = size
        else:
            self._file = open_regular(url)
            self._size = os.fstat(self._file.fileno()).st_size

    def read(self, count: int) -> bytes:
        self.budget -= count
        if count < 0 or self.budget < 0:
            raise tarfile.ReadError(f"a header of more than {_MOST_HEADER_BYTES} bytes")
        end = min(self._position + count, self._size)
        if self._position >= end:
            return b""
        data = self._bytes(self._position, end)
        self._position = end
        return data

    def _bytes(self, start: int, end: int) -> bytes:
        if self._file is not None:
            self._file.seek(start)
            return self._file.read(end - start)
        if not self._block_start <= start <= end <= self._block_start + len(self._block):
            stop = min(self._size, max(end, start + _FETCH))
            self._block = read_range(self._url, start, stop, deadline=self._deadline)
            self._block_start = start
        return self._block[start - self._block_start : end - self._block_start]

    def seek(self, position: int) -> int:
        if position < 0:
            raise tarfile.ReadError("a member that begins before the archive")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
