"""Input sets: the videos in files, folders, patterns, archives and addresses."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import count, takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from capvid.errors import CapvidError, VideoError, input_error
from capvid.utils.escaping import terminal, utf8_text
from capvid.utils.output_check import content_kind
from capvid.utils.storage import (
    Blob,
    Deadline,
    StorageError,
    VideoPath,
    ask,
    filesystem,
    parse_path,
    protocol_of,
    with_retries,
)

_EXTENSIONS = """
.264 .265 .3g2 .3gp .asf .avi .avifs .divx .dv .f4v .flv .gif .h264 .h265 .hevc .ivf .m2ts .m2v .m4v .mj2 .mkv
.mov .mp4 .mpeg .mpg .mts .mxf .nut .obu .ogv .qt .rm .rmvb .ts .vob .vvc .webm .wmv .wtv .y4m
"""
EXTENSIONS = frozenset(_EXTENSIONS.split())
_FILES = EXTENSIONS | {".safetensors", ".tar", ".zip"}  # extensions of addresses that are never folders
_CHECK_PATTERN = "check the path; hidden files are skipped"
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|[nrt])")  # of an unprintable character
_WILD = re.compile(r"[*?[]")
_REMOTE_WILD = re.compile(r"[*[]")  # in addresses a question mark begins a query
_MAX_SAMPLE = 100  # members of a WebDataset sample
_MAX_NAME, _MAX_PATH = 240, 2000  # bytes; most systems allow 255 and 4096

# Unlike the methods of Path, these functions return False instead of raising, as for a name that is too long.
_is_folder, _is_file = os.path.isdir, os.path.isfile

NamedVideo = tuple[VideoPath, PurePosixPath]
OnError = Callable[[CapvidError], None]


@dataclass(frozen=True)
class VideoInput:
    """One video of an input set."""

    path: VideoPath
    key: str  # relative path with ``/`` and without ``..``, unique among the inputs; names its outputs


def find_videos(
    inputs: Sequence[Path | str],
    *,
    listed: Iterable[VideoPath | str] = (),
    recursive: bool = True,
    features: bool = False,
    on_error: OnError | None = None,
    timeout: float | None = None,
) -> list[VideoInput]:
    """Find the videos in files, folders and patterns, each once.

    Files are taken as they are, even if missing or with another extension; opening them reports the problem.
    Folders are searched for known extensions in the order of names, skipping hidden files and folders and
    following symbolic links to folders once. A zip file contains folders of images, each the frames of a
    video; a tar file, also one in a folder, contains videos. Addresses can be files, folders, patterns and
    tar archives as well. A path that does not exist and contains ``*``, ``?`` or ``[`` is a pattern; it
    matches files with known extensions, and other files only if it ends in their extension.

    The key of a file is its name; in a folder, a zip file or the part of a pattern without wildcards, it is
    the relative path. It has no extension, unless another video has the same key.

    Args:
        inputs: files, folders and patterns.
        listed: paths of a list, files or folders, taken literally. Their keys are these paths, so that they
            hardly depend on the other entries of the list.
        recursive: whether to search subfolders.
        features: whether a folder without videos stands for the feature files in it.
        on_error: called with the error of each input or subfolder that fails; None raises the first error.
        timeout: seconds for each request to a server, and for the headers of each remote archive; None
            disables the limit.

    Raises:
        CapvidError: without ``on_error``: a folder, pattern or archive contains no video, or cannot be read.
    """
    videos: dict[VideoPath, NamedVideo] = {}
    for path, name in _Search(recursive, features, on_error, timeout).videos(inputs, listed):
        real = path
        if isinstance(path, Path) and "\0" not in str(path):  # a NUL is reported when the file is opened
            real = Path(os.path.realpath(path))
        videos.setdefault(real, (path, _safe(name)))
    keys = _shortest_keys(
        [(real if isinstance(real, Path) else real.inner, name) for real, (_, name) in videos.items()]
    )
    return [VideoInput(path, key) for (path, _), key in zip(videos.values(), keys, strict=True)]


def iter_videos(
    inputs: Sequence[Path | str],
    *,
    listed: Iterable[VideoPath | str] = (),
    recursive: bool = True,
    features: bool = False,
    on_error: OnError | None = None,
    timeout: float | None = None,
) -> Iterator[VideoInput]:
    """Yield the videos of :func:`find_videos`, with the same arguments, in constant memory per video.

    Each path or address is yielded once, but symbolic links are not resolved to detect duplicates. The key is
    the name without extension, dots, backslashes and unprintable characters, with a digest if an earlier
    video has the same key.
    """
    from capvid.video.input_lists import Digests

    digests, keys = Digests(), Digests()
    for path, name in _Search(recursive, features, on_error, timeout).videos(inputs, listed):
        digest = identity(path)
        if not digests.add(digest):
            continue
        name = _safe(name)
        key = (name.parent / name.stem.strip(".").replace(".", "_")).as_posix()
        key = _ESCAPE.sub("_", terminal(key.replace("\\", "_")))
        if key == "." or not keys.add(identity(key)):
            key = f"{key}-{digest.hex()[:12]}"
            keys.add(identity(key))
        yield VideoInput(path, key)


def stands_for_many(path: VideoPath) -> bool:
    """Return whether an argument is a pattern, folder or archive, without sending requests."""
    suffix = path.suffix.lower()
    if suffix in (".tar", ".zip"):
        return True
    if isinstance(path, Path):
        return _is_folder(path) or bool(_WILD.search(str(path)) and not os.path.lexists(path))
    is_file = suffix in _FILES or protocol_of(path.url).startswith("http")
    return not is_file or bool(_REMOTE_WILD.search(str(path.inner)))


def _shortest_keys(videos: Sequence[tuple[PurePath, PurePosixPath]]) -> list[str]:
    """Return the shortest keys that distinguish the videos, from their real paths and names.

    The key is the name without extension. If several videos share it, the extension is added, then parent
    folders, and as a last resort a number.
    """
    levels = [0] * len(videos)  # 0: without extension, 1: with extension, n: the last n parts of the path
    while True:
        keys = []
        for (path, name), level in zip(videos, levels, strict=True):
            if level == 0 and name.stem.strip("."):
                name = name.parent / name.stem
            elif level > 1:
                name = _safe(PurePath(*path.parts[-level:]))
            keys.append(name.as_posix())
        uses = Counter(keys)
        ambiguous = [
            index
            for index, (key, (path, _)) in enumerate(zip(keys, videos, strict=True))
            if uses[key] > 1 and levels[index] < max(1, len(path.parts) - 1)
        ]
        if not ambiguous:
            break
        for index in ambiguous:
            levels[index] += 1
    used, earlier = set(keys), set()
    for index, key in enumerate(keys):
        if key in earlier:
            keys[index] = next(f"{key}-{number}" for number in count(2) if f"{key}-{number}" not in used)
            used.add(keys[index])
        earlier.add(key)
    return keys


def _safe(name: PurePath | str) -> PurePosixPath:
    """Return a relative name without ``..``, short enough for file systems."""
    name = PurePosixPath(name) if isinstance(name, str) else name
    parts = [part for part in name.parts if part not in ("..", name.anchor)]
    if len(os.fsencode(name)) > _MAX_PATH:
        parts = parts[-1:]
    for index, part in enumerate(parts):
        raw = os.fsencode(part)
        if len(raw) > _MAX_NAME:
            parts[index] = f"{raw[:150].decode('utf-8', 'ignore')}-{hashlib.sha256(raw).hexdigest()[:16]}"
    return PurePosixPath(*parts) if parts else PurePosixPath("video")


@dataclass
class _Search:
    """Search for videos, each with its relative path in the folder or archive that contains it as a name."""

    recursive: bool
    features: bool
    on_error: OnError | None
    timeout: float | None
    _reported: set[str] = field(default_factory=set)
    _last_error: CapvidError | None = None
    _num_errors: int = 0

    def videos(self, inputs: Iterable[Path | str], listed: Iterable[VideoPath | str]) -> Iterator[NamedVideo]:
        """Yield the videos of arguments, and those of a list, whose names are their full paths."""
        for path in map(parse_path, inputs):
            if isinstance(path, Blob):
                yield from self._at_address(path, is_listed=False)
            elif _WILD.search(str(path)) and not os.path.lexists(path):
                reason = "there is no such file, and no video matches it as a pattern"
                error = VideoError(path, reason, remedy=_CHECK_PATTERN, kind="missing")
                yield from self._require(self._matching(path), error)
            else:
                yield from self._at_path(path, PurePosixPath(path.name), PurePosixPath())
        for path in map(parse_path, listed):
            if isinstance(path, Blob):
                yield from self._at_address(path, is_listed=True)
            else:
                name = PurePosixPath(path.relative_to(path.anchor))
                yield from self._at_path(path, name, name)

    def _at_path(self, path: Path, name: PurePosixPath, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield a file as ``name``, or the videos of a folder or archive with names below ``within``."""
        suffix = path.suffix.lower()
        if suffix == ".zip" and _is_file(path):
            yield from self._image_folders(path, within)
        elif suffix == ".tar" and _is_file(path):
            videos = self._members(path, name.parent / path.stem)
            yield from self._require(videos, _no_videos(path, "this archive"))
        elif _is_folder(path):
            kind = "this folder" if self.recursive else "this folder itself"
            yield from self._require(self._in_folder(path, within), _no_videos(path, kind))
        else:
            yield path, name

    def _matching(self, pattern: Path) -> Iterator[NamedVideo]:
        """Yield the videos that match a pattern, in the order of names.

        ``*`` and ``?`` match within a name, ``**`` matches folders at any depth. Hidden files and folders are
        skipped unless the pattern contains the dot; ``**`` follows symbolic links to folders once.
        """
        parts = pattern.parts
        base = Path(*takewhile(lambda part: not _WILD.search(part), parts))
        wild = parts[len(base.parts) :] + (("*",) if parts[-1] == "**" else ())
        for path in sorted(set(self._matches(base, wild)), key=lambda path: path.parts):
            name = PurePosixPath(path.relative_to(base))
            if _is_folder(path):
                yield from self._below(path, name)
            elif path.suffix.lower() in EXTENSIONS | ({pattern.suffix.lower()} - {""}):
                yield from self._at_path(path, name, name)

    def _matches(self, folder: Path, parts: Sequence[str]) -> Iterator[Path]:
        """Yield the paths below a folder that match the parts of a pattern."""
        if not parts:
            yield folder
            return
        part, rest = parts[0], parts[1:]
        if part == "**":
            yield from self._matches(folder, rest)
            if _is_folder(folder):
                for path, is_folder in self._walk(folder, recursive=True):
                    if is_folder:
                        yield from self._matches(path, rest)
        elif not _WILD.search(part):
            if os.path.lexists(folder / part):
                yield from self._matches(folder / part, rest)
        elif _is_folder(folder):
            for path, is_folder in self._entries(folder):
                hidden = path.name.startswith(".") and not part.startswith(".")
                if not hidden and fnmatch(path.name, part) and (not rest or is_folder):
                    yield from self._matches(path, rest)

    def _in_folder(self, folder: Path, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the videos in a folder; if there is none, its feature files, without those of views."""
        empty = True
        for video in self._below(folder, within):
            empty = False
            yield video
        if not empty:
            return
        files = [path for path, is_folder in self._walk(folder, recursive=self.recursive) if not is_folder]
        files = [path for path in files if path.suffix == ".safetensors" and content_kind(path) == "features"]
        if files and not self.features:
            problem = f"{folder}: no videos in this folder, but feature files"
            self._report(CapvidError(problem, remedy="give videos; capvid caption takes feature files"))
            return
        keys = {path.with_suffix("") for path in files}
        for path in files:
            if path.with_name(path.stem.rpartition("@")[0] or path.name) not in keys:
                yield path, within / path.relative_to(folder)

    def _below(self, folder: Path, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the videos in a folder, and those in its archives."""
        for path, is_folder in self._walk(folder, recursive=self.recursive):
            if not is_folder:
                yield from self._file(path, within / path.relative_to(folder))

    def _file(self, path: VideoPath, name: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield a file with a known extension, or the videos in an archive."""
        if path.suffix.lower() in EXTENSIONS:
            yield path, name
        elif path.suffix.lower() == ".tar":
            yield from self._members(path, name.with_suffix(""))

    def _walk(self, folder: Path, *, recursive: bool) -> Iterator[tuple[Path, bool]]:
        """Yield the visible paths in a folder in the order of names, each with whether it is a folder."""
        visited = {os.path.realpath(folder)}
        pending = [self._entries(folder)]
        while pending:  # no recursion, since folders may be nested too deeply for it
            path, is_folder = next(pending[-1], (None, False))
            if path is None:
                pending.pop()
            elif path.name.startswith("."):
                continue
            elif not is_folder:
                yield path, False
            elif recursive and (real := os.path.realpath(path)) not in visited:
                visited.add(real)
                yield path, True
                pending.append(self._entries(path))

    def _entries(self, folder: Path) -> Iterator[tuple[Path, bool]]:
        """Yield the paths directly in a folder in the order of names, each with whether it is a folder."""
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            problem = f"{folder}: cannot be listed ({error.strerror})"
            self._report(CapvidError(problem, remedy="check its permissions"))
            return
        for entry in entries:
            # entry.is_dir() raises for a circular link, which is reported when it is opened
            yield Path(entry.path), _is_folder(entry) if entry.is_symlink() else entry.is_dir()

    def _image_folders(self, archive: Path, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the folders of images in a zip file."""
        from capvid.video.image_reader import SUFFIXES, image_folders

        try:
            folders = image_folders(archive)
            if not folders:
                remedy = f"put the frames of each video ({', '.join(SUFFIXES)}) into a folder of its own"
                raise CapvidError(f"{archive}: no folders of images in this zip file", remedy=remedy)
        except Exception as cause:
            self._report(input_error(archive, cause))
        else:
            yield from ((folder, within / folder.relative_to(archive)) for folder in folders)

    def _members(self, archive: VideoPath, within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the videos in a tar archive."""
        from capvid.video.input_lists import members

        try:
            for blob in _with_siblings(members(archive, timeout=self.timeout)):
                yield blob, within / _safe(blob.member)
        except OSError as error:
            self._report(StorageError(f"{archive}: {error}"))
        except Exception as cause:
            self._report(input_error(archive, cause))

    def _at_address(self, blob: Blob, *, is_listed: bool) -> Iterator[NamedVideo]:
        """Yield the videos at an address: a file, an archive, a folder, or the matches of a pattern."""
        url, suffix = blob.url, blob.suffix.lower()
        name = _safe(f"{url.split('://', 1)[1].partition('/')[0]}/{blob.inner}")
        within = name if is_listed else PurePosixPath()
        name = name if is_listed else PurePosixPath(name.name)
        is_pattern = not is_listed and _REMOTE_WILD.search(str(blob.inner))
        try:
            if is_pattern and not self._ask(url, "exists"):
                base = list(takewhile(lambda part: not _WILD.search(part), url.split("/")))
                if len(base) == 2:  # only the protocol
                    base.append("")
                videos = self._at_addresses("/".join(base), self._ask(url, "glob"), within)
                reason = "no video matches it as a pattern"
                error = VideoError(blob, reason, remedy=_CHECK_PATTERN, kind="missing")
                yield from self._require(videos, error)
            elif suffix == ".zip":
                problem = f"{blob}: zip files must be on this machine"
                raise CapvidError(problem, remedy="fetch it, or use a tar file")
            elif suffix == ".tar":
                videos = self._members(blob, name.with_suffix(""))
                yield from self._require(videos, _no_videos(blob, "this archive"))
            elif suffix in _FILES or protocol_of(url).startswith("http") or not self._ask(url, "isdir"):
                yield blob, name
            else:
                folder = url.rstrip("/")
                paths = self._ask(folder, "find", maxdepth=None if self.recursive else 1)
                videos = self._at_addresses(folder, paths, within)
                yield from self._require(videos, _no_videos(folder, "this folder"))
        except CapvidError as failure:
            if failure is self._last_error:  # raised by _report
                raise
            self._report(failure)
        except FileNotFoundError:
            self._report(VideoError(blob, "there is nothing at this address", kind="missing"))

    def _at_addresses(self, base: str, paths: Sequence[str], within: PurePosixPath) -> Iterator[NamedVideo]:
        """Yield the videos among paths below an address, and those in archives, but no hidden ones."""
        root = str(filesystem(protocol_of(base))._strip_protocol(base)).rstrip("/")
        for path in sorted(map(str, paths)):
            inner = path.removeprefix(root).lstrip("/")
            if not any(part.startswith(".") for part in inner.split("/")):
                yield from self._file(Blob(f"{base.removesuffix('/')}/{inner}"), within / _safe(inner))

    def _ask(self, url: str, method: str, **options: Any) -> Any:
        """Call a method of the remote file system, bypassing its cache of listings."""
        deadline = Deadline(self.timeout)

        def action() -> Any:
            filesystem(protocol_of(url)).invalidate_cache()
            return ask(url, method, url, deadline=deadline, **options)

        return with_retries(url, "listed", action, deadline)

    def _require(self, videos: Iterator[NamedVideo], error: CapvidError) -> Iterator[NamedVideo]:
        """Yield the videos; if there is none, and no error has been reported instead, report ``error``."""
        num_errors, empty = self._num_errors, True
        for video in videos:
            empty = False
            yield video
        if empty and self._num_errors == num_errors:
            self._report(error)

    def _report(self, error: CapvidError) -> None:
        """Report an error once, or raise it."""
        self._num_errors += 1
        self._last_error = error
        if self.on_error is None:
            raise error
        if str(error) not in self._reported:  # several inputs may contain the same folder
            self._reported.add(str(error))
            self.on_error(error)


def sample_name(member: str) -> tuple[str, str]:
    """Split the name of a member at the first dot after its folder, as WebDataset does: sample, extension."""
    folder, slash, name = member.rpartition("/")
    stem, _, extension = name.partition(".")
    return f"{folder}{slash}{stem}", extension


def _with_siblings(blobs: Iterable[Blob]) -> Iterator[Blob]:
    """Yield the videos among the members of an archive, each with the other members of its sample."""

    def videos() -> Iterator[Blob]:
        others = tuple(blob for blob in sample if blob.suffix.lower() not in EXTENSIONS)
        return (replace(blob, siblings=others) for blob in sample if blob.suffix.lower() in EXTENSIONS)

    sample: list[Blob] = []  # neighbours
    try:
        for blob in blobs:
            is_next = sample and sample_name(blob.member)[0] != sample_name(sample[0].member)[0]
            if is_next or len(sample) == _MAX_SAMPLE:
                yield from videos()
                sample = []
            sample.append(blob)
    except Exception:  # a damaged archive, whose intact videos count
        yield from videos()
        raise
    yield from videos()


def _no_videos(path: VideoPath | str, container: str) -> CapvidError:
    return CapvidError(f"{path}: no videos in {container}", remedy="give one with video files")


def identity(path: VideoPath | str) -> bytes:
    """Return the digest (16 bytes) that identifies a path or address in records."""
    return hashlib.blake2b(utf8_text(path).encode(), digest_size=16).digest()


def in_part(path: VideoPath | str, number: int, parts: int) -> bool:
    """Return whether a path or address is in part ``number`` (from 1) of inputs divided into ``parts``.

    Its digest alone decides, so that neither other inputs nor their order matter.
    """
    return int.from_bytes(identity(path)[:8], "big") % parts == number - 1
