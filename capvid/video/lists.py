"""Lists of videos: a path or address on each line, or in a column of a CSV or Parquet file."""

from __future__ import annotations

import codecs
import csv
import io
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from capvid.errors import UsageError
from capvid.storage import VideoPath, local_copy, located

COLUMNS = ("video", "path", "url", "file", "filename", "video_path")  # one of which is taken
_PEEK = 1 << 16


def read_list(source: VideoPath, column: str | None = None) -> Iterator[VideoPath]:
    """Give the entries of a list one after the other, however many there are.

    Args:
        source: a ``.csv``, ``.tsv`` or ``.parquet`` file with a column of paths or addresses, or a text file
            with one on each line, or with NUL after each; a path or address itself.
        column: its name; None takes the first of :data:`COLUMNS` that there is.

    Raises:
        UsageError: it cannot be read, or has no such column.
        StorageError: it cannot be fetched.
    """
    try:
        with local_copy(source) as path:
            suffix = source.suffix.lower()
            if suffix == ".parquet":
                yield from _parquet(source, path, column)
            elif suffix in (".csv", ".tsv"):
                yield from _table(source, path, column, delimiter="\t" if suffix == ".tsv" else ",")
            elif column is not None:
                raise UsageError(f"{source}: a list of lines has no columns", remedy="leave out --column")
            else:
                with path.open("rb") as file:
                    yield from read_paths(file)
    except OSError as error:
        said = error.strerror or "there is no such file"
        raise UsageError(f"{source}: the list cannot be read ({said})") from error


def read_paths(stream: IO[bytes]) -> Iterator[VideoPath]:
    """Give the entries of a text: one on each line, or with NUL after each, as ``find -print0`` writes them.

    Blank lines are passed over, and a carriage return at the end of a line is none of the path; bytes that
    are no text stay as they are.
    """
    head = stream.read(_PEEK)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # of PowerShell
        text = (head + stream.read()).decode("utf-16", "surrogatepass")
        head, stream = text.encode("utf-8", "surrogatepass"), io.BytesIO()
    head = head.removeprefix(codecs.BOM_UTF8)
    rows: Iterator[bytes]
    if b"\0" in head:
        rows = iter((head + stream.read()).split(b"\0"))
    else:
        lines = (head + stream.readline()).split(b"\n")
        rows = (row.rstrip(b"\n").removesuffix(b"\r") for row in chain(lines, stream))
    return (located(os.fsdecode(row)) for row in rows if row.strip())


def _table(source: VideoPath, path: Path, column: str | None, *, delimiter: str) -> Iterator[VideoPath]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter)
        try:
            name = _column(source, rows.fieldnames or (), column)
            for row in rows:
                if (text := row.get(name)) and text.strip():
                    yield located(text)
        except csv.Error as error:
            raise UsageError(f"{source}, line {rows.line_num}: not CSV ({error})") from error


def _parquet(source: VideoPath, path: Path, column: str | None) -> Iterator[VideoPath]:
    parquet = pyarrow_parquet()
    try:
        file = parquet.ParquetFile(path)
        name = _column(source, file.schema_arrow.names, column)
        for batch in file.iter_batches(columns=[name]):
            for value in batch.column(0).to_pylist():
                if value:
                    yield located(os.fsdecode(value) if isinstance(value, bytes) else str(value))
    except (OSError, ValueError) as error:  # of which Arrow's are
        raise UsageError(f"{source}: not Parquet that can be read ({error})") from error


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
