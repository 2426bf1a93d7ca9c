"""Discovery of videos in files, folders, path patterns, archives and at addresses."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

from capvid.errors import CapvidError, MissingVideoError, VideoError, input_error
from capvid.utils.files import open_regular
from capvid.utils.storage import (
    Blob,
    Deadline,
    StorageError,
    VideoPath,
    ask,
    filesystem,
    is_url,
    located,
    patiently,
    protocol_of,
    read_range,
    size_of,
)

_EXTENSIONS = ".3g2 .3gp .asf .avi .divx .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .vob"
EXTENSIONS = frozenset([*_EXTENSIONS.split(), ".webm", ".wmv"])
_FILES = EXTENSIONS | {".safetensors", ".tar", ".zip"}  # never folders, so that no server is asked
_FETCH = 1 << 16  # bytes fetched at a time where only the headers between members are read
_MAX_HEADER_BYTES = 1 << 20  # of one member; tarfile holds them in memory, and joins sparse maps slowly
# errors that tarfile raises for damaged headers, besides its own
_DAMAGED = (ValueError, OverflowError, LookupError, TypeError, RecursionError, EOFError)

NamedVideo = tuple[VideoPath, PurePosixPath]
Failed = Callable[[CapvidError], None]
_T = TypeVar("_T")


class Search:
    """Search for videos; each comes with a name below the folder or archive that holds it.

    Args:
        recursive: whether to search the folders of a folder.
        failed: called once with the error of each input, or folder below one, that fails.
        timeout: seconds for each request to a server, and for the headers of each remote archive; None sets
            no limit.
    """

    def __init__(self, *, recursive: bool, failed: Failed, timeout: float | None = None) -> None:
        self._recursive, self._failed, self._timeout = recursive, failed, timeout
        self._reported: set[str] = set()
        self._last_error: CapvidError | None = None
        self._failures = 0

    def given(self, text: str | Path | Blob) -> Iterator[NamedVideo]:
        """Yield the videos of an argument: a file, folder, pattern, archive or address."""
        path = located(text)
        if isinstance(path, Blob):
            yield from self._remote(path)
        elif is_pattern(path):
            error = _no_match(path, "there is no such file, and no video matches it as a pattern")
            yield from self._require(self._matching(path), error)
        else:
            yield from self._local(path, PurePosixPath(path.name), PurePosixPath())

    def listed(self, text: str | Path | Blob) -> Iterator[NamedVideo]:
        """Yield the videos of an entry in a list, taken literally and named by its full path."""
        path = located(text)
        if isinstance(path, Blob):
            yield from self._remote(path, literally=True)
        else:
            name = PurePosixPath(path.relative_to(path.anchor))
            yield from self._local(path, name, name)

    def _local(self, path: Path, name: PurePosixPath, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield a file as ``name``, or the videos of a folder or archive, named below ``within``."""
        if is_file(path) and path.suffix.lower() == ".zip":
            yield from self._image_folders(path, within)
        elif is_file(path) and is_archive(path):
            error = CapvidError(f"{path}: no videos in this archive", remedy="give one with video files")
            yield from self._require(self._members(path, within.parent / path.stem), error)
        elif is_folder(path):
            where = "this folder" if self._recursive else "this folder itself"
            error = CapvidError(f"{path}: no videos in {where}", remedy="give a folder with video files")
            yield from self._require(self._below(path, within), error)
        else:
            yield path, name

    def _matching(self, pattern: Path) -> Iterator[NamedVideo]:
        """Yield the videos that match a pattern."""
        base, paths = expand(pattern, self._fail)
        for path in paths:
            name = PurePosixPath(path.relative_to(base))
            if is_folder(path):
                yield from self._below(path, name)
            elif path.suffix.lower() in EXTENSIONS | ({pattern.suffix.lower()} - {""}):
                yield from self._local(path, name, name)

    def _below(self, folder: Path, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the videos below a folder, and those in its archives."""
        for path, inner in walk(folder, self._fail, recursive=self._recursive):
            name = within / path.relative_to(folder)
            if not inner and path.suffix.lower() in EXTENSIONS:
                yield path, name
            elif not inner and is_archive(path):
                yield from self._members(path, name.with_suffix(""))

    def _image_folders(self, archive: Path, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the folders of images in a zip file."""
        from capvid.video.image_reader import SUFFIXES, picture_folders

        try:
            folders = picture_folders(archive)
        except Exception as cause:
            self._fail(input_error(archive, cause))
            return
        remedy = f"put the frames of each video ({', '.join(SUFFIXES)}) into a folder of its own"
        error = CapvidError(f"{archive}: no folders of pictures in this zip file", remedy=remedy)
        videos = ((folder, within / folder.relative_to(archive)) for folder in folders)
        yield from self._require(videos, error)

    def _members(self, archive: VideoPath, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the videos in a tar archive, if there are any."""
        try:
            for blob in members(archive, timeout=self._timeout):
                if blob.suffix.lower() in EXTENSIONS:
                    yield blob, within / _safe(blob.member)
        except OSError as error:
            self._fail(StorageError(f"{archive}: {error}"))
        except Exception as cause:
            self._fail(input_error(archive, cause))

    def _remote(self, blob: Blob, *, literally: bool = False) -> Iterator[NamedVideo]:
        """Yield the videos at an address: a file, an archive, a folder, or the matches of a pattern."""
        full_name = _safe(f"{blob.url.split('://', 1)[1].partition('/')[0]}/{blob.inner}")
        name = full_name if literally else PurePosixPath(full_name.name)
        try:
            if not literally and is_remote_pattern(blob) and not self._ask(blob.url, "exists"):
                paths = self._ask(blob.url, "glob")
                base = list(takewhile(lambda part: not _is_wild(part), blob.url.split("/")))
                if len(base) == 2:  # the protocol alone
                    base.append("")
                videos = self._remote_videos("/".join(base), paths, PurePosixPath())
                yield from self._require(videos, _no_match(blob, "no video matches it as a pattern"))
            elif blob.suffix.lower() == ".zip":
                raise CapvidError(
                    f"{blob}: zip files are read on this machine only", remedy="fetch it, or use a tar file"
                )
            elif is_archive(blob):
                error = CapvidError(f"{blob}: no videos in this archive", remedy="give one with video files")
                yield from self._require(self._members(blob, name.with_suffix("")), error)
            elif (
                blob.suffix.lower() in _FILES
                or protocol_of(blob.url).startswith("http")
                or not self._ask(blob.url, "isdir")
            ):
                yield blob, name
            else:
                folder = blob.url.rstrip("/")
                paths = self._ask(folder, "find", maxdepth=None if self._recursive else 1)
                videos = self._remote_videos(folder, paths, name if literally else PurePosixPath())
                error = CapvidError(
                    f"{folder}: no videos in this folder", remedy="give a folder with video files"
                )
                yield from self._require(videos, error)
        except CapvidError as error:
            if error is self._last_error:  # reported already; it stops the search
                raise
            self._fail(error)
        except FileNotFoundError:
            self._fail(MissingVideoError(blob, "there is nothing at this address"))

    def _ask(self, url: str, method: str, **options: Any) -> Any:
        """Call a method of the file system, bypassing its cache of listings."""
        deadline = Deadline(self._timeout)

        def action() -> Any:
            filesystem(protocol_of(url)).invalidate_cache()
            return ask(url, method, url, deadline=deadline, **options)

        return patiently(url, "listed", action, deadline)

    def _remote_videos(self, base: str, paths: Sequence[str], within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the videos, and those in archives, among paths below an address; hidden ones are skipped."""
        root = str(filesystem(protocol_of(base))._strip_protocol(base)).rstrip("/")
        for path in sorted(map(str, paths)):
            inner = path.removeprefix(root).lstrip("/")
            blob = Blob(f"{base.removesuffix('/')}/{inner}")
            if any(part.startswith(".") for part in inner.split("/")):
                continue
            if is_archive(blob):
                yield from self._members(blob, (within / _safe(inner)).with_suffix(""))
            elif blob.suffix.lower() in EXTENSIONS:
                yield blob, within / _safe(inner)

    def _require(self, items: Iterator[_T], error: CapvidError) -> Iterator[_T]:
        """Yield the items; where there is none, and no failure has been reported for it, report ``error``."""
        failures, empty = self._failures, True
        for item in items:
            empty = False
            yield item
        if empty and self._failures == failures:
            self._fail(error)

    def _fail(self, error: CapvidError) -> None:
        self._failures += 1
        self._last_error = error
        if str(error) not in self._reported:  # a folder may be reached in several ways
            self._reported.add(str(error))
            self._failed(error)


def is_remote_pattern(blob: Blob) -> bool:
    """Return whether the path at an address holds ``*`` or ``[``."""
    return any(sign in str(blob.inner) for sign in "*[")


def stands_for_many(path: VideoPath) -> bool:
    """Return whether an argument stands for a batch: a pattern, folder or archive; no server is asked."""
    if not isinstance(path, Blob):
        return path.suffix.lower() in (".zip", ".tar") or is_folder(path) or is_pattern(path)
    suffix = path.suffix.lower()
    if is_remote_pattern(path) or suffix in (".tar", ".zip"):
        return True
    return suffix not in _FILES and not protocol_of(path.url).startswith("http")


def _no_match(pattern: VideoPath, reason: str) -> CapvidError:
    return MissingVideoError(pattern, reason, remedy="check the path; hidden files are passed over")


def _safe(name: str) -> PurePosixPath:
    """Return a path to name outputs by, without parts that lead elsewhere."""
    return PurePosixPath(*(part for part in name.split("/") if part not in ("", ".", "..")))


def is_pattern(path: Path) -> bool:
    """Return whether the path holds ``*``, ``?`` or ``[`` and no file has that very name."""
    return any(map(_is_wild, path.parts)) and not os.path.lexists(path)


def expand(pattern: Path, failed: Failed) -> tuple[Path, list[Path]]:
    """Expand a pattern: ``*`` and ``?`` within a name, ``**`` for any number of folders.

    Hidden files and folders are skipped unless the pattern names the dot; ``**`` follows each symbolic link
    to a folder once.

    Args:
        pattern: relative to the current folder, or absolute.
        failed: called with the error of each folder that cannot be listed.

    Returns:
        the folder before the first part with a wildcard, and the sorted paths.
    """
    wild = next(index for index, part in enumerate(pattern.parts) if _is_wild(part))
    base, parts = Path(*pattern.parts[:wild]), pattern.parts[wild:]
    if parts[-1] == "**":
        parts = (*parts, "*")
    return base, sorted(set(_matches(base, parts, failed)), key=lambda path: path.parts)


def walk(folder: Path, failed: Failed, *, recursive: bool = True) -> Iterator[tuple[Path, bool]]:
    """Yield the paths below a folder, sorted by name, each with whether it is a folder.

    Hidden files and folders are skipped, symbolic links to folders followed once.

    Args:
        folder: not yielded itself.
        failed: called with the error of each folder that cannot be listed.
        recursive: whether to enter the folders below.
    """
    visited = {real(folder)}
    pending = [iter(_entries(folder, failed))]
    while pending:  # no recursion: folders may be nested deeper than calls may be
        entry = next(pending[-1], None)
        if entry is None:
            pending.pop()
            continue
        if entry.name.startswith("."):
            continue
        path = Path(entry.path)
        if not _is_folder(entry):
            yield path, False
        elif recursive and (target := real(path)) not in visited:
            visited.add(target)
            yield path, True
            pending.append(iter(_entries(path, failed)))


def real(path: Path) -> Path:
    """Return the path without symbolic links, as far as they can be resolved."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return Path(os.path.normpath(path.absolute()))


def is_folder(path: Path) -> bool:
    """Return whether there is a folder that can be examined."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Return whether there is a regular file that can be examined."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _matches(folder: Path, parts: Sequence[str], failed: Failed) -> Iterator[Path]:
    """Yield the paths below the folder that match the parts of a pattern."""
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _matches(folder, rest, failed)
        if is_folder(folder):
            for path, inner in walk(folder, failed):
                if inner:
                    yield from _matches(path, rest, failed)
    elif not _is_wild(part):
        if os.path.lexists(folder / part):
            yield from _matches(folder / part, rest, failed)
    elif is_folder(folder):
        for entry in _entries(folder, failed):
            hidden = entry.name.startswith(".") and not part.startswith(".")
            if not hidden and fnmatch(entry.name, part) and (not rest or _is_folder(entry)):
                yield from _matches(folder / entry.name, rest, failed)


def _entries(folder: Path, failed: Failed) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        failed(CapvidError(f"{folder}: cannot be listed ({error.strerror})", remedy="see its permissions"))
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link; opening it reports that
        return False


def _is_wild(part: str) -> bool:
    return any(sign in part for sign in "*?[")


def is_archive(path: VideoPath) -> bool:
    """Return whether the name is that of a tar archive; compressed ones have no random access."""
    return path.suffix.lower() == ".tar"


def members(archive: VideoPath, *, timeout: float | None = None) -> Iterator[Blob]:
    """Yield the files in a tar archive, in their order; hidden ones are skipped.

    Args:
        archive: a path or an address.
        timeout: seconds for reading the headers at an address; None sets no limit.

    Raises:
        VideoError: not a tar archive, or cut off.
        StorageError: it cannot be fetched.
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
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
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
    """The part of a file's interface that tarfile needs, with a limit on the bytes read.

    Attributes:
        budget: bytes that may be read until it is set again.
    """

    def __init__(self, url: str, timeout: float | None) -> None:
        self.budget = _MAX_HEADER_BYTES
        self._url, self._deadline = url, Deadline(timeout)
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
            raise tarfile.ReadError(f"a header of more than {_MAX_HEADER_BYTES} bytes")
        start, end = self._position, min(self._position + count, self._size)
        if start >= end:
            return b""
        self._position = end
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
