"""Input sets: the videos that arguments and list files stand for."""

from __future__ import annotations

import codecs
import csv
import errno
import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, BinaryIO

from capvid.errors import CapvidError, UsageError
from capvid.utils.digests import Digests, identity
from capvid.utils.files import open_regular
from capvid.utils.limits import limits
from capvid.utils.storage import VideoPath, local_copy, located
from capvid.video.discovery import Failed, Search, real

COLUMNS = ("video", "path", "url", "file", "filename", "video_path")  # the first that exists is taken
_LONG_NAME, _LONG_PATH = 240, 2000  # bytes, of 255 and 4096 on most systems
_PEEK = 1 << 16  # bytes
_LONGEST_LINE = 1 << 16  # bytes; addresses with signatures are longer than any path
_LONGEST_ROW = 1 << 20  # characters of a table that are read at once


@dataclass(frozen=True)
class VideoInput:
    """One video of an input set.

    Attributes:
        path: path or address.
        key: relative path, unique among the inputs, that names its outputs; always with ``/``, never with
            ``..``.
    """

    path: VideoPath
    key: str


def find_videos(
    inputs: Sequence[Path | str],
    *,
    listed: Iterable[VideoPath | str] = (),
    recursive: bool = True,
    failed: Failed | None = None,
    timeout: float | None = None,
) -> list[VideoInput]:
    """Find the videos that files, folders and patterns stand for, each once.

    Files are taken as they are, even if missing or with another extension: opening them reports what is
    wrong. Folders are searched for known extensions in the order of names, skipping hidden files and folders
    and following symbolic links to folders once. A zip file stands for its folders of images, each the frames
    of a video, and a tar file, also one in a folder, for the videos in it. Addresses likewise stand for
    files, folders, patterns and tar archives. A path that does not exist and holds ``*``, ``?`` or ``[`` is a
    pattern; it matches files with known extensions, and others only if it ends in theirs.

    The key of a file is its name; below a folder, a zip file or the part of a pattern without wildcards, the
    path from there.

    Args:
        inputs: files, folders and patterns.
        listed: paths of a list, files or folders, taken literally. Their keys are these paths without
            extension, so that they hardly depend on what else is in the list.
        recursive: whether to search the folders of a folder.
        failed: called with the error of each input, or folder below one, that fails; None raises the first.
        timeout: seconds for each request to a server; None sets no limit.

    Raises:
        CapvidError: without ``failed``: a folder or pattern gives no video, a zip file no folder of images,
            or a folder cannot be listed.
    """
    names_by_path: dict[VideoPath, tuple[VideoPath, PurePosixPath]] = {}
    for path, name in _search(inputs, listed, recursive, failed, timeout):
        names_by_path.setdefault(real(path) if isinstance(path, Path) else path, (path, name))
    keys = _shortest_keys(
        [
            (target if isinstance(target, Path) else target.inner, _inner(name))
            for target, (_, name) in names_by_path.items()
        ]
    )
    return [VideoInput(path, key) for (path, _), key in zip(names_by_path.values(), keys, strict=True)]


def iter_videos(
    inputs: Sequence[Path | str],
    *,
    listed: Iterable[VideoPath | str] = (),
    recursive: bool = True,
    failed: Failed | None = None,
    timeout: float | None = None,
) -> Iterator[VideoInput]:
    """Yield the videos of :func:`find_videos`, with the same arguments, in constant memory per video.

    Each path or address comes once; symbolic links are not resolved to detect duplicates. The key is the name
    without extension and without dots, with a digest if an earlier video has the same.
    """
    digests, keys = Digests(), Digests()
    for path, name in _search(inputs, listed, recursive, failed, timeout):
        digest = identity(path)
        if not digests.add(digest):
            continue
        inner = _inner(name)
        key = (inner.parent / inner.stem.strip(".").replace(".", "_")).as_posix()
        if key == "." or not keys.add(identity(key)):
            key = f"{key}-{digest.hex()[:12]}"
            keys.add(identity(key))
        yield VideoInput(path, key)


def _search(
    inputs: Iterable[Path | str],
    listed: Iterable[VideoPath | str],
    recursive: bool,
    failed: Failed | None,
    timeout: float | None,
) -> Iterator[tuple[VideoPath, PurePosixPath]]:
    """Yield the paths and names of the videos that inputs and a list stand for."""

    def fail(error: CapvidError) -> None:
        raise error

    search = Search(recursive=recursive, failed=failed or fail, timeout=timeout)
    yield from chain.from_iterable(map(search.given, inputs))
    yield from chain.from_iterable(map(search.listed, listed))


def _shortest_keys(videos: Sequence[tuple[PurePath, PurePosixPath]]) -> list[str]:
    """Return the shortest keys that distinguish the videos, from their real paths and names.

    The key is the name without its extension; where two share it, with the extension; where they still share
    it, the path from further up; with a number as a last resort.
    """

    def key_at(path: PurePath, name: PurePosixPath, level: int) -> str:
        if level == 0:
            return (name.parent / (name.stem if name.stem.strip(".") else name.name)).as_posix()
        return name.as_posix() if level == 1 else _inner(PurePath(*path.parts[-level:])).as_posix()

    levels = [0] * len(videos)
    keys = [key_at(path, name, 0) for path, name in videos]
    while True:
        shared = {key for key, uses in Counter(keys).items() if uses > 1}
        raised = [
            index
            for index, (key, (path, _)) in enumerate(zip(keys, videos, strict=True))
            if key in shared and levels[index] < max(1, len(path.parts) - 1)
        ]
        if not raised:
            break
        for index in raised:
            levels[index] += 1
            keys[index] = key_at(*videos[index], levels[index])
    used = set(keys)
    for index, key in enumerate(keys):
        if key in shared and keys.index(key) < index:
            keys[index] = next(f"{key}-{number}" for number in count(2) if f"{key}-{number}" not in used)
            used.add(keys[index])
    return keys


def _inner(name: PurePath) -> PurePosixPath:
    """Return the name without parts that lead upwards, at most as long as file systems accept."""
    parts = [part for part in name.parts if part not in ("..", name.anchor)]
    if len(os.fsencode(name)) > _LONG_PATH:
        parts = parts[-1:]
    for index, part in enumerate(parts):
        raw = os.fsencode(part)
        if len(raw) > _LONG_NAME:
            parts[index] = f"{raw[:150].decode('utf-8', 'ignore')}-{hashlib.sha256(raw).hexdigest()[:16]}"
    return PurePosixPath(*parts) if parts else PurePosixPath("video")


def read_list(
    source: VideoPath, column: str | None = None, *, timeout: float | None = None
) -> Iterator[VideoPath]:
    """Yield the entries of a list, in constant memory.

    Args:
        source: a ``.csv``, ``.tsv`` or ``.parquet`` file with a column of paths or addresses, or a text file
            with one on each line, or with NUL after each; a path or address itself.
        column: name of the column; None takes the first of :data:`COLUMNS` that exists.
        timeout: seconds for fetching the list; None sets no limit.

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
                raise UsageError(f"{source}: a list of lines has no columns", remedy="leave out --column")
            else:
                yield from read_paths(file, name=source)
    except OSError as error:
        reason = error.strerror or "there is no such file"
        raise UsageError(f"{source}: the list cannot be read ({reason})") from error


def open_list(path: Path) -> BinaryIO:
    """Open the file of a list.

    Raises:
        UsageError: no such file, or not a regular one: the list may be read twice, and a pipe cannot be.
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
    """Yield the entries of a text, one per line, or with NUL after each, as ``find -print0`` writes them.

    Blank lines and carriage returns at the end of lines are skipped; bytes that are not text stay as they
    are. Only one row and one block are in memory.

    Args:
        stream: the text.
        name: name of the list, for errors.

    Raises:
        UsageError: a line is too long for a path.
    """
    head = stream.read(_PEEK)
    blocks: Iterator[bytes] = chain([head], iter(lambda: stream.read(_PEEK), b""))
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # of PowerShell
    if is_utf16:
        decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
        blocks = (decoder.decode(block).encode("utf-8", "surrogatepass") for block in blocks)
    elif head.startswith(codecs.BOM_UTF8):
        blocks = chain([head.removeprefix(codecs.BOM_UTF8)], islice(blocks, 1, None))
    separator = b"\0" if b"\0" in head and not is_utf16 else b"\n"
    number, rest = 1, b""
    for block in chain(blocks, (separator,)):
        *rows, rest = (rest + block).split(separator)
        for row in (*rows, rest):
            if len(row) > _LONGEST_LINE:
                raise UsageError(
                    f"{name}, line {number}: longer than any path ({_LONGEST_LINE} bytes)",
                    remedy="give a text file with one path or address on each line",
                )
            number += 1
        number -= 1  # of the unfinished row
        for row in rows:
            row = row if separator == b"\0" else row.removesuffix(b"\r")
            if row.strip():
                yield located(os.fsdecode(row))


def _read_table(
    source: VideoPath, binary: BinaryIO, column: str | None, *, delimiter: str
) -> Iterator[VideoPath]:
    file = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="")

    def lines() -> Iterator[str]:
        # csv has a limit for fields, but applies it only once the line is in memory
        while line := file.readline(_LONGEST_ROW):
            if len(line) == _LONGEST_ROW and not line.endswith(("\n", "\r")):
                raise csv.Error(f"longer than {_LONGEST_ROW} characters")
            yield line

    rows = csv.DictReader(lines(), delimiter=delimiter)
    try:
        name = _column(source, rows.fieldnames or (), column)
        for row in rows:
            if (text := row.get(name)) and text.strip():
                yield located(text)
    except csv.Error as error:
        raise UsageError(f"{source}, line {rows.line_num}: not CSV ({error})") from error


def _read_parquet(source: VideoPath, binary: BinaryIO, column: str | None) -> Iterator[VideoPath]:
    parquet = pyarrow_parquet()
    from pyarrow import ArrowException

    try:
        file = parquet.ParquetFile(binary)
        name = _column(source, file.schema_arrow.names, column)
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                size = chunk.total_uncompressed_size
                is_column = chunk.path_in_schema.split(".")[0] == name
                if is_column and not 0 <= size <= limits().member_bytes:  # it is unpacked as one
                    raise UsageError(
                        f"{source}: a column chunk of {size} bytes, "
                        f"more than the limit of {limits().member_bytes}",
                        remedy="write the list with smaller row groups",
                    )
        for batch in file.iter_batches(columns=[name]):
            for value in batch.column(0).to_pylist():
                if value:
                    yield located(os.fsdecode(value) if isinstance(value, bytes) else str(value))
    except (OSError, ValueError, ArrowException, MemoryError) as error:
        raise UsageError(f"{source}: not Parquet that can be read ({error})") from error


def pyarrow_parquet() -> Any:
    """Return ``pyarrow.parquet``; raise UsageError if it is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow", remedy="pip install 'capvid[remote]'") from error
    return parquet


def _column(source: VideoPath, names: Any, column: str | None) -> str:
    for name in COLUMNS if column is None else (column,):
        if name in names:
            return name
    available = ", ".join(map(str, names)) or "none"
    lacking = f"no column {column}" if column else "no column that is known to hold videos"
    raise UsageError(f"{source}: {lacking} (there are: {available})", remedy="name it with --column")
