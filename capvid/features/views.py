"""Names of augmented views: the features of view 1 of the video ``KEY`` are those of ``KEY@1``, and so on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

Views = Mapping[str, Sequence[str]]  # keys of the features of a video's views, by its id
NO_VIEWS: Views = MappingProxyType({})


def view_key(key: str, number: int) -> str:
    """Give the key of a video's view."""
    return f"{key}@{number}"


def viewed(key: str) -> str | None:
    """Give the key of the video that ``key``, by its name, is a view of; ``None`` if of none."""
    video, _, number = key.rpartition("@")
    whole = number.isascii() and number.isdigit() and not number.startswith("0")
    return video if video and whole else None


def views_of(videos: Collection[str], held: Iterable[str]) -> dict[str, list[str]]:
    """Find the views of videos among the keys that there are features of.

    What is itself one of the videos is no view of another.

    Args:
        videos: the ids of all videos of the data.
        held: keys of features.

    Returns:
        the keys of its views in the order of their numbers, by the id of each video that has some.
    """
    own, found = set(videos), dict[str, list[str]]()
    for key in held:
        video = viewed(key)
        if video in own and key not in own:
            found.setdefault(video, []).append(key)
    return {video: sorted(keys, key=lambda key: int(key.rpartition("@")[2])) for video, keys in found.items()}
