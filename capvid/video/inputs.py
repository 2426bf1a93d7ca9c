"""From files, folders, patterns and lists on the command line to the videos they stand for."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath, PurePosixPath

from capvid.digests import Digests, identity
from capvid.errors import CapvidError
from capvid.storage import VideoPath
from capvid.video.patterns import Failed, real
from capvid.video.search import Search

_LONG_NAME, _LONG_PATH = 240, 2000  # bytes, of 255 and 4096 on most systems


@dataclass(frozen=True)
class VideoInput:
    """One video to work on.

    Attributes:
        path: where it is.
        key: a relative path, unique among the inputs, to name its outputs by; always with ``/``, and never
            with ``..``.
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

    Files are taken as they are, also those that do not exist or have another extension: what is wrong with
    them shows when they are opened. Folders are searched for known extensions, in the order of names; hidden
    files and folders are passed over, and symbolic links to folders followed once. A zip file stands for its
    folders of pictures, each the frames of a video, and a tar file, also one in a folder, for the videos in
    it. Addresses stand for files, folders, patterns and tar archives likewise. A path that does not exist and
    holds ``*``, ``?`` or ``[`` is a pattern; it finds files with known extensions, any others only if it ends
    in theirs.

    The key of a file is its name; below a folder, a zip file or the part of a pattern without wildcards, the
    path from there.

    Args:
        inputs: files, folders and patterns.
        listed: paths of a list, files or folders, taken literally. Their keys are these paths without
            extension, so that they hardly depend on what else is in the list.
        recursive: whether to look into the folders of a folder.
        failed: is told of each input, and each folder below one, that fails; None raises the first.
        timeout: seconds for each request to a server; None waits for ever.

    Raises:
        CapvidError: without ``failed``: a folder or pattern gives no video, a zip file no folder of pictures,
            or a folder cannot be listed.
    """
    found: dict[VideoPath, tuple[VideoPath, PurePosixPath]] = {}
    search = Search(recursive=recursive, failed=failed or _raise, timeout=timeout)
    for path, name in _places(inputs, listed, search):
        found.setdefault(real(path) if isinstance(path, Path) else path, (path, name))
    keys = _keys(found)
    return [VideoInput(path, key) for (path, _), key in zip(found.values(), keys, strict=True)]


def iter_videos(
    inputs: Sequence[Path | str],
    *,
    listed: Iterable[VideoPath | str] = (),
    recursive: bool = True,
    failed: Failed | None = None,
    timeout: float | None = None,
) -> Iterator[VideoInput]:
    """Give the same videos as :func:`find_videos` one after the other, however many there are.

    Each path or address comes once; symbolic links are not followed to see whether two are one file. The key
    is the name without extension, and without dots; with a digest if an earlier video has the same.

    Args:
        inputs: files, folders, patterns, archives and addresses.
        listed: paths and addresses of a list, taken literally.
        recursive: whether to look into the folders of a folder.
        failed: is told of what fails; None raises the first.
        timeout: seconds for each request to a server; None waits for ever.
    """
    seen, keys = Digests(), Digests()
    search = Search(recursive=recursive, failed=failed or _raise, timeout=timeout)
    for path, name in _places(inputs, listed, search):
        digest = identity(path)
        if not seen.add(digest):
            continue
        inner = _inner(name)
        key = (inner.parent / inner.stem.strip(".").replace(".", "_")).as_posix()
        if key == "." or not keys.add(identity(key)):
            key = f"{key}-{digest.hex()[:12]}"
            keys.add(identity(key))
        yield VideoInput(path, key)


def _places(
    inputs: Iterable[Path | str], listed: Iterable[VideoPath | str], search: Search
) -> Iterator[tuple[VideoPath, PurePosixPath]]:
    """Where the videos are that inputs and a list stand for, and what each is called there."""
    yield from chain.from_iterable(map(search.given, inputs))
    yield from chain.from_iterable(map(search.listed, listed))


def _raise(error: CapvidError) -> None:
    raise error


def _keys(found: Mapping[VideoPath, tuple[VideoPath, PurePosixPath]]) -> list[str]:
    """Shortest names that tell the videos apart, given by their real paths.

    The name without its extension; where two share it, the extension too; where they still share it, the path
    from further up; a number as a last resort.
    """
    videos = [
        (place if isinstance(place, Path) else place.inner, _inner(name))
        for place, (_, name) in found.items()
    ]
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


def _key(place: PurePath, name: PurePosixPath, level: int) -> str:
    """A video's key, the longer the higher the level."""
    if level == 0:
        stem = name.stem
        return (name.parent / (stem if stem.strip(".") else name.name)).as_posix()
    return name.as_posix() if level == 1 else _inner(PurePath(*place.parts[-level:])).as_posix()


def _inner(name: PurePath) -> PurePosixPath:
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
