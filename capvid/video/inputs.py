"""From files, folders, patterns and lists on the command line to the videos they stand for."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from capvid.errors import CapvidError, MissingVideoError
from capvid.video.patterns import Failed, expand, is_file, is_folder, is_pattern, real, walk

_EXTENSIONS = ".3g2 .3gp .asf .avi .divx .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .vob"
EXTENSIONS = frozenset([*_EXTENSIONS.split(), ".webm", ".wmv"])

_LONG_NAME, _LONG_PATH = 240, 2000  # bytes, of 255 and 4096 on most systems


@dataclass(frozen=True)
class VideoInput:
    """One video to work on.

    Attributes:
        path: where it is.
        key: a relative path, unique among the inputs, to name its outputs by; always with ``/``, and never
            with ``..``.
    """

    path: Path
    key: str


def find_videos(
    inputs: Sequence[Path | str],
    *,
    listed: Sequence[Path] = (),
    recursive: bool = True,
    failed: Failed | None = None,
) -> list[VideoInput]:
    """Find the videos that files, folders and patterns stand for, each once.

    Files are taken as they are, also those that do not exist or have another extension: what is wrong with
    them shows when they are opened. Folders are searched for known extensions, in the order of names; hidden
    files and folders are passed over, and symbolic links to folders followed once. A zip file stands for its
    folders of pictures, each the frames of a video. A path that does not exist and holds ``*``, ``?`` or
    ``[`` is a pattern; it finds files with known extensions, any others only if it ends in theirs.

    The key of a file is its name; below a folder, a zip file or the part of a pattern without wildcards, the
    path from there.

    Args:
        inputs: files, folders and patterns.
        listed: paths of a list, files or folders, taken literally. Their keys are these paths without
            extension, so that they hardly depend on what else is in the list.
        recursive: whether to look into the folders of a folder.
        failed: is told of each input, and each folder below one, that fails; None raises the first.

    Raises:
        CapvidError: without ``failed``: a folder or pattern gives no video, a zip file no folder of pictures,
            or a folder cannot be listed.
    """
    search = _Search(recursive=recursive, failed=failed or _raise)
    for given in map(Path, inputs):
        if is_pattern(given):
            search.match(given)
        else:
            search.take(given, Path(given.name), Path())
    for path in listed:
        written = path.relative_to(path.anchor)
        search.take(path, written, written)
    keys = _keys(search.found)
    return [VideoInput(path, key) for (path, _), key in zip(search.found.values(), keys, strict=True)]


def read_paths(data: bytes) -> list[Path]:
    """Read a list of paths: one on each line, or with NUL after each, as ``find -print0`` writes them.

    Blank lines are passed over, and a carriage return at the end of a line is none of the path; bytes that
    are no text stay as they are.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # of PowerShell
        data = data.decode("utf-16", "surrogatepass").encode("utf-8", "surrogatepass")
    data = data.removeprefix(codecs.BOM_UTF8)
    rows = data.split(b"\0") if b"\0" in data else [row.removesuffix(b"\r") for row in data.split(b"\n")]
    return [Path(os.fsdecode(row)) for row in rows if row.strip()]


def _raise(error: CapvidError) -> None:
    raise error


class _Search:
    """Videos found so far, by their real paths: path, and name to make the key of."""

    def __init__(self, *, recursive: bool, failed: Failed) -> None:
        self.found: dict[Path, tuple[Path, Path]] = {}
        self.failures = 0
        self._said: set[str] = set()
        self._recursive = recursive
        self._failed = failed

    def take(self, given: Path, name: Path, within: Path) -> None:
        """Add a file by its ``name``, or the videos of a folder or zip file, which are named ``within``."""
        failures = self.failures
        if given.suffix.lower() == ".zip" and is_file(given):
            self._open(given, within)
        elif not is_folder(given):
            self._add(given, name)
        elif not self._below(given, within) and self.failures == failures:
            where = "this folder" if self._recursive else "this folder itself"
            self._fail(CapvidError(f"{given}: no videos in {where}", remedy="give a folder with video files"))

    def match(self, pattern: Path) -> None:
        """Add what matches a pattern."""
        failures, count = self.failures, 0
        base, paths = expand(pattern, self._fail)
        wanted = EXTENSIONS | ({pattern.suffix.lower()} - {""})
        for path in paths:
            name = path.relative_to(base)
            if is_folder(path):
                count += self._below(path, name)
            elif path.suffix.lower() in wanted:
                self.take(path, name, name)
                count += 1
        if not count and self.failures == failures:
            self._fail(
                MissingVideoError(
                    pattern,
                    "there is no such file, and no video matches it as a pattern",
                    remedy="check the path; hidden files are passed over",
                )
            )

    def _below(self, folder: Path, within: Path) -> int:
        """Add the videos below a folder, and give their number."""
        count = 0
        for path, inner in walk(folder, self._fail, recursive=self._recursive):
            if not inner and path.suffix.lower() in EXTENSIONS:
                self._add(path, within / path.relative_to(folder))
                count += 1
        return count

    def _open(self, archive: Path, within: Path) -> None:
        """Add the folders of pictures in a zip file."""
        from capvid.video.pictures import SUFFIXES, picture_folders

        try:
            folders = picture_folders(archive)
        except CapvidError as error:
            self._fail(error)
            return
        for folder in folders:
            self._add(folder, within / folder.relative_to(archive))
        if not folders:
            self._fail(
                CapvidError(
                    f"{archive}: no folders of pictures in this zip file",
                    remedy=f"put the frames of each video ({', '.join(SUFFIXES)}) into a folder of its own",
                )
            )

    def _add(self, path: Path, name: Path) -> None:
        self.found.setdefault(real(path), (path, name))

    def _fail(self, error: CapvidError) -> None:
        self.failures += 1
        if str(error) not in self._said:  # a folder may be come to in several ways
            self._said.add(str(error))
            self._failed(error)


def _keys(found: Mapping[Path, tuple[Path, Path]]) -> list[str]:
    """Shortest names that tell the videos apart, given by their real paths.

    The name without its extension; where two share it, the extension too; where they still share it, the path
    from further up; a number as a last resort.
    """
    videos = [(place, _inner(name)) for place, (_, name) in found.items()]
    level = [0] * len(videos)
    keys = [_key(place, name, 0) for place, name in videos]
    while True:
        shared = {key for key, count in Counter(keys).items() if count > 1}
        raised = [
            n
            for n, (key, (place, _)) in enumerate(zip(keys, videos, strict=True))
            if key in shared and level[n] < max(1, len(place.parts) - 1)
        ]
        if not raised:
            break
        for n in raised:
            level[n] += 1
            keys[n] = _key(*videos[n], level[n])
    used = set(keys)
    for n, key in enumerate(keys):
        if key in shared and keys.index(key) < n:
            number = 2
            while f"{key}-{number}" in used:
                number += 1
            keys[n] = f"{key}-{number}"
            used.add(keys[n])
    return keys


def _key(place: Path, name: PurePosixPath, level: int) -> str:
    """A video's key, the longer the higher the level."""
    if level == 0:
        stem = name.stem
        return (name.parent / (stem if stem.strip(".") else name.name)).as_posix()
    return name.as_posix() if level == 1 else _inner(Path(*place.parts[-level:])).as_posix()


def _inner(name: Path) -> PurePosixPath:
    """The name without what leads upwards or nowhere, and as short as file systems take it with a suffix."""
    parts = [part for part in name.parts if part not in ("..", name.anchor)]
    if len(os.fsencode(name)) > _LONG_PATH:
        parts = parts[-1:]
    return PurePosixPath(*map(_short, parts)) if parts else PurePosixPath("video")


def _short(part: str) -> str:
    """A part of a path; where that is too long, its beginning and a digest of all of it."""
    whole = os.fsencode(part)
    if len(whole) <= _LONG_NAME:
        return part
    return f"{whole[:150].decode('utf-8', 'ignore')}-{hashlib.sha256(whole).hexdigest()[:16]}"
