"""What files, folders, patterns, archives and addresses stand for: the videos there, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from capvid.errors import CapvidError, MissingVideoError
from capvid.isolation import input_error
from capvid.storage import (
    Blob,
    Deadline,
    StorageError,
    VideoPath,
    ask,
    filesystem,
    located,
    patiently,
    protocol_of,
)
from capvid.video.archives import is_archive, members
from capvid.video.patterns import Failed, expand, is_file, is_folder, is_pattern, walk

_EXTENSIONS = ".3g2 .3gp .asf .avi .divx .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .vob"
EXTENSIONS = frozenset([*_EXTENSIONS.split(), ".webm", ".wmv"])
_FILES = EXTENSIONS | {".safetensors", ".tar", ".zip"}  # what is no folder, without asking the server

Found = tuple[VideoPath, PurePosixPath]
_T = TypeVar("_T")


class Search:
    """Finds videos: of each the path, and a name below the folder or archive it was found in.

    Args:
        recursive: whether to look into the folders of a folder.
        failed: is told of each input, and each folder below one, that fails; once, if it is come to in
            several ways.
        timeout: seconds for each request to a server, and for the headers of each remote archive; None waits
            for ever.
    """

    def __init__(self, *, recursive: bool, failed: Failed, timeout: float | None = None) -> None:
        self._timeout = timeout
        self.failures = 0
        self._said: set[str] = set()
        self._last: CapvidError | None = None
        self._recursive = recursive
        self._failed = failed

    def given(self, text: str | Path | Blob) -> Iterator[Found]:
        """Videos of an argument: a file, folder, pattern, archive or address."""
        path = located(text)
        if isinstance(path, Blob):
            yield from self._at(path)
        elif is_pattern(path):
            yield from self._matching(path)
        else:
            yield from self._take(path, PurePosixPath(path.name), PurePosixPath())

    def listed(self, text: str | Path | Blob) -> Iterator[Found]:
        """Videos of an entry in a list, which is taken literally and named by all of its path."""
        path = located(text)
        if isinstance(path, Blob):
            yield from self._at(path, literally=True)
        else:
            written = PurePosixPath(path.relative_to(path.anchor))
            yield from self._take(path, written, written)

    def _take(self, given: Path, name: PurePosixPath, within: PurePosixPath) -> Iterator[Found]:
        """A file by its ``name``, or the videos of a folder or archive, which are named ``within``."""
        if is_file(given) and given.suffix.lower() == ".zip":
            yield from self._pictures(given, within)
        elif is_file(given) and is_archive(given):
            yield from self._members(given, within.parent / given.stem)
        elif not is_folder(given):
            yield given, name
        else:
            where = "this folder" if self._recursive else "this folder itself"
            yield from self._some(
                self._below(given, within),
                lambda: CapvidError(
                    f"{given}: no videos in {where}", remedy="give a folder with video files"
                ),
            )

    def _matching(self, pattern: Path) -> Iterator[Found]:
        """What matches a pattern."""
        base, paths = expand(pattern, self._fail)
        wanted = EXTENSIONS | ({pattern.suffix.lower()} - {""})

        def found() -> Iterator[Found]:
            for path in paths:
                name = PurePosixPath(path.relative_to(base))
                if is_folder(path):
                    yield from self._below(path, name)
                elif path.suffix.lower() in wanted:
                    yield from self._take(path, name, name)

        yield from self._some(found(), lambda: _no_match(pattern, "there is no such file, and"))

    def _below(self, folder: Path, within: PurePosixPath) -> Iterator[Found]:
        """The videos below a folder, and those in its archives."""
        for path, inner in walk(folder, self._fail, recursive=self._recursive):
            name = within / path.relative_to(folder)
            if not inner and path.suffix.lower() in EXTENSIONS:
                yield path, name
            elif not inner and is_archive(path):
                yield from self._inside(path, name.with_suffix(""))

    def _pictures(self, archive: Path, within: PurePosixPath) -> Iterator[Found]:
        """The folders of pictures in a zip file."""
        from capvid.video.pictures import SUFFIXES, picture_folders

        try:
            folders = picture_folders(archive)
        except Exception as cause:
            self._fail(input_error(archive, cause))
            return
        for folder in folders:
            yield folder, within / folder.relative_to(archive)
        if not folders:
            self._fail(
                CapvidError(
                    f"{archive}: no folders of pictures in this zip file",
                    remedy=f"put the frames of each video ({', '.join(SUFFIXES)}) into a folder of its own",
                )
            )

    def _members(self, archive: VideoPath, within: PurePosixPath) -> Iterator[Found]:
        """The videos in a tar archive that was asked for."""
        yield from self._some(
            self._inside(archive, within),
            lambda: CapvidError(f"{archive}: no videos in this archive", remedy="give one with video files"),
        )

    def _inside(self, archive: VideoPath, within: PurePosixPath) -> Iterator[Found]:
        """The videos in a tar archive, if there are any."""
        try:
            for blob in members(archive, timeout=self._timeout):
                if blob.suffix.lower() in EXTENSIONS:
                    yield blob, within / _safe(blob.member)
        except OSError as error:
            self._fail(StorageError(f"{archive}: {error}"))
        except Exception as cause:
            self._fail(input_error(archive, cause))

    def _at(self, blob: Blob, *, literally: bool = False) -> Iterator[Found]:
        """Videos at an address: of a file, an archive, a folder, or what matches a pattern."""
        name = _safe(f"{blob.url.split('://', 1)[1].partition('/')[0]}/{blob.inner}")
        suffix = blob.suffix.lower()
        try:
            if not literally and is_remote_pattern(blob) and not self._is_there(blob):
                yield from self._remote_match(blob)
            elif suffix == ".zip":
                raise CapvidError(
                    f"{blob}: zip files are read on this machine only", remedy="fetch it, or use a tar file"
                )
            elif suffix in _FILES or not self._is_remote_folder(blob):
                if is_archive(blob):
                    yield from self._members(
                        blob, (name if literally else PurePosixPath(name.name)).with_suffix("")
                    )
                else:
                    yield blob, name if literally else PurePosixPath(name.name)
            else:
                yield from self._remote_folder(blob, name if literally else PurePosixPath())
        except CapvidError as error:
            if error is self._last:  # which was told of already, and stops the search
                raise
            self._fail(error)
        except FileNotFoundError:
            self._fail(MissingVideoError(blob, "there is nothing at this address"))

    def _ask(self, url: str, method: str, **options: Any) -> Any:
        """Call a method of the file system, which has forgotten what it listed before."""
        deadline = Deadline(self._timeout)

        def action() -> Any:
            _system(url).invalidate_cache()
            return ask(url, method, url, deadline=deadline, **options)

        return patiently(url, "listed", action, deadline)

    def _is_there(self, blob: Blob) -> bool:
        return bool(self._ask(blob.url, "exists"))

    def _is_remote_folder(self, blob: Blob) -> bool:
        if protocol_of(blob.url).startswith("http"):
            return False
        return bool(self._ask(blob.url, "isdir"))

    def _remote_folder(self, blob: Blob, within: PurePosixPath) -> Iterator[Found]:
        depth = None if self._recursive else 1
        base = blob.url.rstrip("/")
        paths = self._ask(base, "find", maxdepth=depth)
        yield from self._some(
            self._remote(base, sorted(paths), within),
            lambda: CapvidError(f"{base}: no videos in this folder", remedy="give a folder with video files"),
        )

    def _remote_match(self, blob: Blob) -> Iterator[Found]:
        paths = self._ask(blob.url, "glob")
        fixed: list[str] = []
        for part in blob.url.split("/"):
            if any(sign in part for sign in "*?["):
                break
            fixed.append(part)
        if len(fixed) == 2:  # the protocol alone
            fixed.append("")
        yield from self._some(
            self._remote("/".join(fixed), sorted(map(str, paths)), PurePosixPath()),
            lambda: _no_match(blob),
        )

    def _remote(self, base: str, paths: list[str], within: PurePosixPath) -> Iterator[Found]:
        """Videos, and those in archives, among the paths below an address; hidden ones are passed over."""
        root = str(_system(base)._strip_protocol(base)).rstrip("/")
        for path in paths:
            inner = path.removeprefix(root).lstrip("/")
            blob = Blob(f"{base.removesuffix('/')}/{inner}")
            if any(part.startswith(".") for part in inner.split("/")):
                continue
            if is_archive(blob):
                yield from self._inside(blob, (within / _safe(inner)).with_suffix(""))
            elif blob.suffix.lower() in EXTENSIONS:
                yield blob, within / _safe(inner)

    def _some(self, found: Iterator[_T], nothing: Callable[[], CapvidError]) -> Iterator[_T]:
        """The same; if there is none, and nothing has been said of why, that is said."""
        failures, empty = self.failures, True
        for item in found:
            empty = False
            yield item
        if empty and self.failures == failures:
            self._fail(nothing())

    def _fail(self, error: CapvidError) -> None:
        self.failures += 1
        self._last = error
        if str(error) not in self._said:  # a folder may be come to in several ways
            self._said.add(str(error))
            self._failed(error)


def is_remote_pattern(blob: Blob) -> bool:
    """Whether the path at an address holds ``*`` or ``[``."""
    return any(sign in str(blob.inner) for sign in "*[")


def stands_for_many(path: VideoPath) -> bool:
    """Whether an argument stands for a batch: a pattern, folder or archive; of addresses as they look."""
    if not isinstance(path, Blob):
        return path.suffix.lower() in (".zip", ".tar") or is_folder(path) or is_pattern(path)
    suffix = path.suffix.lower()
    if is_remote_pattern(path) or suffix in (".tar", ".zip"):
        return True
    return suffix not in _FILES and not protocol_of(path.url).startswith("http")


def _no_match(pattern: VideoPath, before: str = "") -> CapvidError:
    return MissingVideoError(
        pattern,
        f"{before} no video matches it as a pattern".strip(),
        remedy="check the path; hidden files are passed over",
    )


def _safe(name: str) -> PurePosixPath:
    """A path to name outputs by, which leads nowhere else."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return PurePosixPath(*parts)


def _system(url: str) -> Any:
    return filesystem(protocol_of(url))
