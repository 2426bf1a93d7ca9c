"""Patterns of paths, for shells that do not expand them: ``clips/**/*.mp4``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from capvid.errors import CapvidError

Failed = Callable[[CapvidError], None]


def is_pattern(path: Path) -> bool:
    """Whether the path holds ``*``, ``?`` or ``[`` and is no file of that very name."""
    return any(map(_is_wild, path.parts)) and not os.path.lexists(path)


def expand(pattern: Path, failed: Failed) -> tuple[Path, list[Path]]:
    """Find what matches a pattern: ``*`` and ``?`` within a name, ``**`` for any number of folders.

    Hidden files and folders are passed over unless the pattern names the dot; ``**`` follows each symbolic
    link to a folder once.

    Args:
        pattern: relative to the current folder, or absolute.
        failed: is told of folders that cannot be listed.

    Returns:
        the folder before the first part with a wildcard, and the paths in the order of their names.
    """
    wild = next(place for place, part in enumerate(pattern.parts) if _is_wild(part))
    base, parts = Path(*pattern.parts[:wild]), pattern.parts[wild:]
    if parts[-1] == "**":
        parts = (*parts, "*")
    return base, sorted(set(_matches(base, parts, failed)), key=lambda path: path.parts)


def walk(folder: Path, failed: Failed, *, recursive: bool = True) -> Iterator[tuple[Path, bool]]:
    """Yield what is below a folder, in the order of names, and of each whether it is a folder.

    Hidden files and folders are passed over, symbolic links to folders followed once.

    Args:
        folder: is not yielded itself.
        failed: is told of folders that cannot be listed.
        recursive: whether to look into the folders below.
    """
    seen = {real(folder)}
    waiting = [iter(_entries(folder, failed))]
    while waiting:  # no recursion: folders may lie deeper in each other than functions may
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
            continue
        if entry.name.startswith("."):
            continue
        path = Path(entry.path)
        if not _is_folder(entry):
            yield path, False
        elif recursive and (place := real(path)) not in seen:
            seen.add(place)
            yield path, True
            waiting.append(iter(_entries(path, failed)))


def real(path: Path) -> Path:
    """Give the path without symbolic links, or without as many as can be resolved."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return Path(os.path.normpath(path.absolute()))


def is_folder(path: Path) -> bool:
    """Whether there is a folder; what cannot be looked at is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether there is a regular file; what cannot be looked at is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _matches(folder: Path, parts: Sequence[str], failed: Failed) -> Iterator[Path]:
    """What is below the folder and matches the parts of a pattern."""
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
    except OSError:  # a link in a circle; opening it will say so
        return False


def _is_wild(part: str) -> bool:
    return any(sign in part for sign in "*?[")
