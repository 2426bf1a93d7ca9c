"""Which prediction belongs to which video of the references."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

_YOUTUBE = 11  # characters of an id there
_ACTIVITYNET = re.compile(f"v_.{{{_YOUTUBE}}}")


@dataclass
class Matches:
    """What was found.

    Attributes:
        videos: for videos of the references the id of their prediction.
        extra: ids of predictions that belong to none.
        ambiguous: those of them whose name fits a video that another's fits as well, or several videos.
    """

    videos: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)


def match_ids(
    predicted: Iterable[str], videos: Iterable[str], aliases: Mapping[str, str] | None = None
) -> Matches:
    """Match ids of predictions, which may be paths of videos, with those of references.

    An id that is the same comes first, then the path without its suffix, then the name of the file without
    folder and suffix if it fits one video only and is that of one prediction only.

    Args:
        predicted: ids of predictions.
        videos: ids of the references.
        aliases: ids of the references by other names of theirs.
    """
    known = dict.fromkeys(videos)
    other = aliases or {}
    by_name: dict[str, list[str]] = {}
    for video in known:
        path = PurePosixPath(video)
        for name in {path.name, path.stem}:
            by_name.setdefault(name, []).append(video)
    found = Matches()
    ambiguous: set[str] = set()
    left = list(predicted)
    for name_of in (_same, _without_suffix, _stem):
        claims: dict[str, list[str]] = {}
        rest = []
        for name in left:
            own = name_of(name)
            fits = [own] if own in known else [other[own]] if other.get(own) in known else []
            if not fits and name_of is _stem:
                fits = by_name.get(own, [])
            if len(fits) == 1 and fits[0] not in found.videos:
                claims.setdefault(fits[0], []).append(name)
            else:
                rest.append(name)
                ambiguous.update([name] if len(fits) > 1 else [])
        for video, names in claims.items():
            if len(names) == 1:
                found.videos[video] = names[0]
            else:
                rest += names
                ambiguous.update(names)
        left = rest
    found.extra = left
    found.ambiguous = [name for name in left if name in ambiguous]
    return found


def _same(name: str) -> str:
    return name


def _without_suffix(name: str) -> str:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.with_suffix("").as_posix() if path.name else name


def _stem(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).stem


def is_activitynet(videos: Iterable[str]) -> bool:
    """Whether ids are those of ActivityNet: ``v_`` and the eleven characters of a YouTube id."""
    return any(_ACTIVITYNET.fullmatch(video) for video in videos)


def activitynet_id(name: str) -> str:
    """The id with ``v_`` before it if it lacks that."""
    return f"v_{name}" if len(name) == _YOUTUBE else name
