"""Lists of inputs: text with a path or address per line, tables with a column of them, tar archives."""

from __future__ import annotations

import codecs
import csv
import errno
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

import numpy as np

from capvid.errors import UsageError, VideoError
from capvid.utils.files import open_regular
from capvid.utils.storage import (
    Blob,
    Deadline,
    StorageError,
    VideoPath,
    is_url,
    local_copy,
    parse_path,
    read_range,
    size_of,
)
from capvid.utils.validation import limits

COLUMNS = ("video", "path", "url", "file", "filename", "video_path")  # default columns, by priority
DIGEST_BYTES = 16
_BLOCK = 1 << 16  # bytes read at a time
_MAX_LINE = 1 << 16  # bytes; signed addresses are longer than any path
_MAX_ROW = 1 << 20  # characters in a row of a table
_FETCHED_BYTES = 1 << 16  # fetched at a time from an archive of which only the headers are needed
_MAX_HEADER_BYTES = 1 << 20  # of one member; tarfile keeps them in memory, and joins sparse maps slowly
# errors that tarfile raises for damaged headers, besides its own
_DAMAGED = (ValueError, OverflowError, LookupError, TypeError, RecursionError, EOFError)
_RECENT = 1 << 16  # digests kept in a plain set before they are merged into the sorted array


def read_list(
    source: VideoPath, column: str | None = None, *, timeout: float | None = None
) -> Iterator[VideoPath]:
    """Yield the entries of a list, in constant memory.

    Args:
        source: path or address of a ``.csv``, ``.tsv`` or ``.parquet`` file with a column of paths or
            addresses, or of a text file in which each ends with a newline or NUL.
        column: name of the column; None takes the first of :data:`COLUMNS` that exists.
        timeout: seconds for fetching the list; None disables the limit.

    Raises:
        UsageError: the list cannot be read, or has no such column.
        StorageError: the list cannot be fetched.
    """
    try:
        max_bytes = limits().list_bytes
        with local_copy(source, max_bytes=max_bytes, timeout=timeout) as path, open_list(path) as file:
            suffix = source.suffix.lower()
            if suffix == ".parquet":
                yield from _read_parquet(source, file, column)
            elif suffix in (".csv", ".tsv"):
                yield from _read_table(source, file, column, delimiter="\t" if suffix == ".tsv" else ",")
            elif column is not None:
                raise UsageError(f"{source}: a text file has no columns", remedy="leave out --column")
            else:
                yield from read_paths(file, name=source)
    except OSError as error:
        reason = error.strerror or "there is no such file"
        raise UsageError(f"{source}: the list cannot be read ({reason})") from error


def read_piped(text: bytes, column: str | None = None) -> Iterator[VideoPath]:
    """Yield the entries of a list from stdin: Parquet, CSV or TSV, or a path or address per line.

    It is a table if ``column`` is given, or if its first line names one of :data:`COLUMNS` and is no path.

    Raises:
        UsageError: the list cannot be read, or has no such column.
    """
    source, stream = Path("stdin"), io.BytesIO(text)
    if text.startswith(b"PAR1"):
        yield from _read_parquet(source, stream, column)
        return
    line = text[:_MAX_LINE].removeprefix(codecs.BOM_UTF8).partition(b"\n")[0].removesuffix(b"\r")
    delimiter = None if column is None else ","
    if b"\0" not in line and not os.path.lexists(line):
        wanted = {column} if column is not None else set(COLUMNS)
        for each in ",;\t":
            names = next(csv.reader([os.fsdecode(line)], delimiter=each), [])
            delimiter = each if wanted & set(names) else delimiter
    if delimiter is None:
        yield from read_paths(stream)
    else:
        yield from _read_table(source, stream, column, delimiter=delimiter)


def open_list(path: Path) -> BinaryIO:
    """Open the file of a list; raise UsageError if it is not a regular file, such as a pipe."""
    try:
        return open_regular(path)
    except OSError as error:
        remedy = "pipe it into the command and use --from-file -" if error.errno == errno.EINVAL else ""
        raise UsageError(f"{path}: the list cannot be read ({error.strerror})", remedy=remedy) from error


def read_paths(stream: IO[bytes], *, name: object = "the list") -> Iterator[VideoPath]:
    """Yield the entries of a text: one per line, or NUL-separated as by ``find -print0``.

    Blank lines and carriage returns at the end of lines are skipped; bytes that are not UTF-8 are preserved.
    Only one row and one block are in memory. Errors begin with ``name``.

    Raises:
        UsageError: a line is too long for a path.
    """
    head = stream.read(_BLOCK)
    blocks: Iterator[bytes] = chain([head], iter(lambda: stream.read(_BLOCK), b""))
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes
    if is_utf16:
        decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
        blocks = (decoder.decode(block).encode("utf-8", "surrogatepass") for block in blocks)
    elif head.startswith(codecs.BOM_UTF8):
        blocks = chain([head.removeprefix(codecs.BOM_UTF8)], islice(blocks, 1, None))
    separator = b"\0" if b"\0" in head and not is_utf16 else b"\n"
    number, rest = 1, b""
    for block in chain(blocks, (separator,)):
        *rows, rest = (rest + block).split(separator)
        for index, row in enumerate((*rows, rest)):
            if len(row) > _MAX_LINE:
                problem = f"{name}, line {number + index}: longer than any path ({_MAX_LINE} bytes)"
                raise UsageError(problem, remedy="give a text file with one path or address per line")
        number += len(rows)
        for row in rows:
            row = row if separator == b"\0" else row.removesuffix(b"\r")
            if row.strip():
                yield parse_path(os.fsdecode(row))


def _read_table(
    source: VideoPath, binary: BinaryIO, column: str | None, *, delimiter: str
) -> Iterator[VideoPath]:
    """Yield the entries in a column of a CSV or TSV file; spreadsheets also write ``;`` and UTF-16."""
    head = binary.read(_MAX_LINE)
    binary.seek(0)
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding, errors = ("utf-16", "replace") if is_utf16 else ("utf-8-sig", "surrogateescape")
    if delimiter == ",":
        delimiter = max(",;", key=head.decode(encoding, errors).partition("\n")[0].count)
    file = io.TextIOWrapper(binary, encoding=encoding, errors=errors, newline="")

    def lines() -> Iterator[str]:
        # csv limits the size of fields, but only after the whole line is in memory
        while line := file.readline(_MAX_ROW):
            if len(line) == _MAX_ROW and not line.endswith(("\n", "\r")):
                raise csv.Error(f"longer than {_MAX_ROW} characters")
            yield line

    rows = csv.DictReader(lines(), delimiter=delimiter)
    try:
        name = _column(source, rows.fieldnames or (), column)
        for row in rows:
            if (text := row.get(name)) and text.strip():
                yield parse_path(text)
    except csv.Error as error:
        raise UsageError(f"{source}, line {rows.line_num}: not CSV ({error})") from error


def _read_parquet(source: VideoPath, binary: BinaryIO, column: str | None) -> Iterator[VideoPath]:
    """Yield the entries in a column of a Parquet file."""
    parquet = pyarrow_parquet()
    from pyarrow import ArrowException

    max_bytes = limits().member_bytes
    try:
        file = parquet.ParquetFile(binary)
        name = _column(source, file.schema_arrow.names, column)
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                size = chunk.total_uncompressed_size
                is_column = chunk.path_in_schema.split(".")[0] == name
                if is_column and not 0 <= size <= max_bytes:  # a chunk is decompressed at once
                    problem = f"a column chunk of {size} bytes, more than the limit of {max_bytes}"
                    raise UsageError(f"{source}: {problem}", remedy="write the list with smaller row groups")
        for batch in file.iter_batches(columns=[name]):
            for value in batch.column(0).to_pylist():
                if value:
                    yield parse_path(os.fsdecode(value) if isinstance(value, bytes) else str(value))
    except (OSError, ValueError, ArrowException, MemoryError) as error:
        raise UsageError(f"{source}: not Parquet that can be read ({error})") from error


def pyarrow_parquet() -> Any:
    """Return ``pyarrow.parquet``; raise UsageError if it is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow", remedy="pip install 'capvid[parquet]'") from error
    return parquet


def _column(source: VideoPath, names: Sequence[str], column: str | None) -> str:
    """Return the name of the column with the entries."""
    for name in COLUMNS if column is None else (column,):
        if name in names:
            return name
    available = ", ".join(map(str, names)) or "none"
    problem = f"no column {column}" if column else f"no column named {', '.join(COLUMNS)}"
    raise UsageError(f"{source}: {problem} (it has {available})", remedy="name the column with --column")


def members(archive: VideoPath, *, timeout: float | None = None) -> Iterator[Blob]:
    """Yield the files in a tar archive in their order, except hidden files.

    ``timeout`` limits the seconds for reading all headers at an address.

    Raises:
        VideoError: the file is not a tar archive, or truncated.
        StorageError: the archive cannot be fetched.
    """
    url, end = str(archive), -1
    try:
        with (
            closing(_HeaderReader(url, timeout)) as file,
            tarfile.open(fileobj=cast(BinaryIO, file), mode="r:") as tar,
        ):
            while (entry := tar.next()) is not None:
                file.budget = _MAX_HEADER_BYTES
                if tar.offset <= end:
                    raise tarfile.ReadError("a member that ends before it begins")
                end = tar.offset
                tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all members
                parts = PurePosixPath(entry.name).parts
                hidden = not parts or any(part.startswith(".") for part in parts)
                if entry.isreg() and not entry.issparse() and not hidden:
                    yield Blob(url, entry.name, entry.offset_data, entry.size)
    except FileNotFoundError as error:
        raise VideoError(archive, "there is no such file") from error
    except OSError as error:
        raise VideoError(archive, f"cannot be read ({error.strerror or error})") from error
    except (tarfile.TarError, *_DAMAGED) as error:
        reason = str(error) or type(error).__name__
        raise VideoError(archive, f"is not a tar archive that can be read ({reason})") from error


class _HeaderReader:
    """A local or remote file with the methods that tarfile needs and a limit on the bytes read."""

    def __init__(self, url: str, timeout: float | None) -> None:
        self.budget = _MAX_HEADER_BYTES  # remaining bytes; the caller resets it for each member
        self._url, self._deadline, self._position = url, Deadline(timeout), 0
        self._block, self._block_start = b"", 0
        self._file = None if is_url(url) else open_regular(url)
        size = size_of(url, deadline=self._deadline)
        if size is None:
            problem = f"{url}: the server does not send parts of a file, which a tar archive needs"
            raise StorageError(problem, remedy="fetch the archive first")
        self._size = size

    def read(self, count: int) -> bytes:
        self.budget -= count
        if count < 0 or self.budget < 0:
            raise tarfile.ReadError(f"a header of more than {_MAX_HEADER_BYTES} bytes")
        start, end = self._position, min(self._position + count, self._size)
        if start >= end:
            return b""
        self._position = end
        if self._file is not None:
            self._file.seek(start)
            return self._file.read(end - start)
        if not self._block_start <= start <= end <= self._block_start + len(self._block):
            stop = min(self._size, max(end, start + _FETCHED_BYTES))
            self._block = read_range(self._url, start, stop, deadline=self._deadline)
            self._block_start = start
        return self._block[start - self._block_start : end - self._block_start]

    def seek(self, position: int) -> None:
        if position < 0:
            raise tarfile.ReadError("a member that begins before the archive")
        self._position = position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Digests:
    """Compact set of digests of :data:`DIGEST_BYTES`."""

    def __init__(self) -> None:
        self._sorted = np.empty((0, 2), np.uint64)  # by the first column
        self._recent: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, digest: bytes) -> bool:
        if digest in self._recent:
            return True
        first, second = np.frombuffer(digest, np.uint64)
        row = int(np.searchsorted(self._sorted[:, 0], first))
        while row < len(self._sorted) and self._sorted[row, 0] == first:
            if self._sorted[row, 1] == second:
                return True
            row += 1
        return False

    def add(self, digest: bytes) -> bool:
        """Add a digest and return whether it is new."""
        if digest in self:
            return False
        self._recent.add(digest)
        if len(self._recent) > max(_RECENT, len(self._sorted) // 4):
            self._merge(b"".join(self._recent))
            self._recent.clear()
        return True

    def update(self, digests: bytes) -> None:
        """Add joined digests, many at a time."""
        if len(digests) > DIGEST_BYTES * _RECENT:
            self._merge(digests)
        else:
            for start in range(0, len(digests), DIGEST_BYTES):
                self.add(digests[start : start + DIGEST_BYTES])

    def _merge(self, digests: bytes) -> None:
        rows = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        merged = np.concatenate([self._sorted, rows])
        self._sorted = merged[np.argsort(merged[:, 0], kind="stable")]
