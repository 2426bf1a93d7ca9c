"""From files and folders on the command line to the videos they stand for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from capvid.errors import CapvidError

_EXTENSIONS = ".3g2 .3gp .asf .avi .divx .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .vob"
EXTENSIONS = frozenset([*_EXTENSIONS.split(), ".webm", ".wmv"])


@dataclass(frozen=True)
class VideoInput:
    """One video to work on.

    Attributes:
        path: where it is.
        key: a relative path, unique among the inputs, to name its outputs by; always with ``/``.
    """

    path: Path
    key: str


def find_videos(inputs: Sequence[Path | str], *, recursive: bool = True) -> list[VideoInput]:
    """Find the videos that files and folders stand for, each once.

    Files are taken as they are, also those that do not exist or have another extension: what is wrong with
    them shows when they are opened. Folders are searched for known extensions, in the order of names; hidden
    files and folders are passed over, and symbolic links to folders followed once. A zip file stands for its
    folders of pictures, each the frames of a video.

    Raises:
        CapvidError: a folder holds no video, or a zip file no folder of pictures.
    """
    found: dict[Path, tuple[Path, Path]] = {}  # by real path: path, and name relative to the input
    for given in map(Path, inputs):
        if given.suffix.lower() == ".zip" and given.is_file():
            for folder in _folders_of_pictures(given):
                found.setdefault(_real(folder), (folder, folder.relative_to(given)))
            continue
        if not given.is_dir():
            found.setdefault(_real(given), (given, Path(given.name)))
            continue
        videos = list(_videos_below(given, recursive=recursive, seen=set()))
        if not videos:
            where = "this folder" if recursive else "this folder itself"
            raise CapvidError(f"{given}: no videos in {where}", remedy="give a folder with video files")
        for video in videos:
            found.setdefault(_real(video), (video, video.relative_to(given)))
    return [
        VideoInput(path, key) for (path, _), key in zip(found.values(), _keys(found.values()), strict=True)
    ]


def _folders_of_pictures(archive: Path) -> list[Path]:
    from capvid.video.pictures import SUFFIXES, picture_folders

    folders = picture_folders(archive)
    if not folders:
        raise CapvidError(
            f"{archive}: no folders of pictures in this zip file",
            remedy=f"put the frames of each video ({', '.join(SUFFIXES)}) into a folder of its own",
        )
    return folders


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()


def _videos_below(folder: Path, *, recursive: bool, seen: set[Path]) -> Iterator[Path]:
    seen.add(_real(folder))
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise CapvidError(f"{folder}: cannot be listed ({error.strerror})") from error
    for entry in entries:
        path = folder / entry.name
        if entry.name.startswith("."):
            continue
        if _is_folder(entry):
            if recursive and _real(path) not in seen:
                yield from _videos_below(path, recursive=recursive, seen=seen)
        elif path.suffix.lower() in EXTENSIONS:
            yield path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle; opening it will say so
        return False


def _keys(pairs: Collection[tuple[Path, Path]]) -> list[str]:
    """Shortest names that tell the videos apart.

    The stem, relative to the folder given; where two share it, the extension too; where they still share
    it, the path from further up; a number as a last resort.
    """
    candidates = [
        [
            relative.with_suffix("").as_posix(),
            relative.as_posix(),
            *("/".join(_real(path).parts[-n:]) for n in range(2, len(_real(path).parts))),
        ]
        for path, relative in pairs
    ]
    level = [0] * len(pairs)
    while True:
        keys = [names[at] for names, at in zip(candidates, level, strict=True)]
        shared = {key for key, count in Counter(keys).items() if count > 1}
        raised = [n for n, key in enumerate(keys) if key in shared and level[n] + 1 < len(candidates[n])]
        if not raised:
            break
        for n in raised:
            level[n] += 1
    used: Counter[str] = Counter()
    for n, key in enumerate(keys):
        used[key] += 1
        if used[key] > 1:
            keys[n] = f"{key}-{used[key]}"
    return keys
