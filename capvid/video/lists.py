"""Lists of videos: a path or address on each line, or in a column of a CSV or Parquet file."""

from __future__ import annotations

import codecs
import csv
import errno
import io
import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, BinaryIO

from capvid.errors import UsageError
from capvid.files import open_regular
from capvid.limits import limits
from capvid.storage import VideoPath, local_copy, located

COLUMNS = ("video", "path", "url", "file", "filename", "video_path")  # one of which is taken
_PEEK = 1 << 16
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LONGEST_LINE = 1 << 16  # bytes; addresses with signatures are longer than any path
_LONGEST_ROW = 1 << 20  # characters of a table that are read at once


def read_list(
    source: VideoPath, column: str | None = None, *, timeout: float | None = None
) -> Iterator[VideoPath]:
    """Give the entries of a list one after the other, however many there are.

    Args:
        source: a ``.csv``, ``.tsv`` or ``.parquet`` file with a column of paths or addresses, or a text file
            with one on each line, or with NUL after each; a path or address itself.
        column: its name; None takes the first of :data:`COLUMNS` that there is.
        timeout: seconds for fetching the list; None waits for ever.

    Raises:
        UsageError: it cannot be read, or has no such column.
        StorageError: it cannot be fetched.
    """
    try:
        most = limits().list_bytes
        with local_copy(source, max_bytes=most, timeout=timeout) as path, open_list(path) as file:
            suffix = source.suffix.lower()
            if suffix == ".parquet":
                yield from _parquet(source, file, column)
            elif suffix in (".csv", ".tsv"):
                yield from _table(source, file, column, delimiter="\t" if suffix == ".tsv" else ",")
            elif column is not None:
                raise UsageError(f"{source}: a list of lines has no columns", remedy="leave out --column")
            else:
                yield from read_paths(file, name=source)
    except OSError as error:
        said = error.strerror or "there is no such file"
        raise UsageError(f"{source}: the list cannot be read ({said})") from error


def open_list(path: Path) -> BinaryIO:
    """Open the file of a list.

    Raises:
        UsageError: there is none, or it is no regular file: the list may be read twice, and a pipe cannot be.
    """
    try:
        return open_regular(path)
    except OSError as error:
        is_pipe = error.errno == errno.EINVAL
        raise UsageError(
            f"{path}: the list cannot be read ({error.strerror})",
            remedy="pipe it into the command and use --from-file -" if is_pipe else "",
        ) from error


def read_paths(stream: IO[bytes], *, name: object = "the list") -> Iterator[VideoPath]:
    """Give the entries of a text: one on each line, or with NUL after each, as ``find -print0`` writes them.

    Blank lines are passed over, and a carriage return at the end of a line is none of the path; bytes that
    are no text stay as they are.

    Args:
        stream: holds the text.
        name: of the list, for errors.

    Raises:
        UsageError: a line is too long for a path.
    """
    head = stream.read(_PEEK)
    blocks: Iterator[bytes] = chain([head], iter(lambda: stream.read(_PEEK), b""))
    if head.startswith(_UTF16):  # of PowerShell
        decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
        blocks = (decoder.decode(block).encode("utf-8", "surrogatepass") for block in blocks)
    elif head.startswith(codecs.BOM_UTF8):
        blocks = chain([head.removeprefix(codecs.BOM_UTF8)], islice(blocks, 1, None))
    separator = b"\0" if b"\0" in head and not head.startswith(_UTF16) else b"\n"
    for row in _split(blocks, separator, name):
        row = row if separator == b"\0" else row.removesuffix(b"\r")
        if row.strip():
            yield located(os.fsdecode(row))


def _split(blocks: Iterator[bytes], separator: bytes, name: object) -> Iterator[bytes]:
    """The rows of a text that comes block by block; only one row and one block are held."""
    number, rest = 0, b""
    for block in blocks:
        *rows, rest = (rest + block).split(separator)
        for row in (*rows, rest):
            number += 1
            if len(row) > _LONGEST_LINE:
                raise UsageError(
                    f"{name}, line {number}: longer than any path ({_LONGEST_LINE} bytes)",
                    remedy="give a text file with one path or address on each line",
                )
        number -= 1
        yield from rows
    yield rest


def _table(source: VideoPath, binary: BinaryIO, column: str | None, *, delimiter: str) -> Iterator[VideoPath]:
    file = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.DictReader(_table_lines(file), delimiter=delimiter)
    try:
        name = _column(source, rows.fieldnames or (), column)
        for row in rows:
            if (text := row.get(name)) and text.strip():
                yield located(text)
    except csv.Error as error:
        raise UsageError(f"{source}, line {rows.line_num}: not CSV ({error})") from error


def _table_lines(file: IO[str]) -> Iterator[str]:
    """The lines of a table; csv has a limit for fields, but applies it once the line is in memory."""
    while line := file.readline(_LONGEST_ROW):
        if len(line) == _LONGEST_ROW and not line.endswith(("\n", "\r")):
            raise csv.Error(f"longer than {_LONGEST_ROW} characters")
        yield line


def _parquet(source: VideoPath, binary: BinaryIO, column: str | None) -> Iterator[VideoPath]:
    parquet = pyarrow_parquet()
    from pyarrow import ArrowException

    try:
        file = parquet.ParquetFile(binary)
        name = _column(source, file.schema_arrow.names, column)
        _check_pages(source, file, name)
        for batch in file.iter_batches(columns=[name]):
            for value in batch.column(0).to_pylist():
                if value:
                    yield located(os.fsdecode(value) if isinstance(value, bytes) else str(value))
    except (OSError, ValueError, ArrowException, MemoryError) as error:
        raise UsageError(f"{source}: not Parquet that can be read ({error})") from error


def _check_pages(source: VideoPath, file: Any, name: str) -> None:
    """Raise UsageError where a chunk of the column unpacks to more than fits comfortably in memory."""
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            wanted = chunk.path_in_schema.split(".")[0] == name
            if wanted and not 0 <= chunk.total_uncompressed_size <= limits().member_bytes:
                raise UsageError(
                    f"{source}: a column chunk of {chunk.total_uncompressed_size} bytes, "
                    f"more than the limit of {limits().member_bytes}",
                    remedy="write the list with smaller row groups",
                )


def pyarrow_parquet() -> Any:
    """Import what reads and writes Parquet.

    Raises:
        UsageError: it is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow", remedy="pip install 'capvid[remote]'") from error
    return parquet


def _column(source: VideoPath, names: Any, column: str | None) -> str:
    wanted = COLUMNS if column is None else (column,)
    for name in wanted:
        if name in names:
            return name
    there = ", ".join(map(str, names)) or "none"
    lacking = f"no column {column}" if column else "no column that is known to hold videos"
    raise UsageError(f"{source}: {lacking} (there are: {there})", remedy="name it with --column")
