"""JSON files with a list of videos (or pictures) and another of captions that name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from capvid.data.captions import CaptionedVideo
from capvid.data.reading import JsonFile, Place, RowError, Rows, check_caption, member


@dataclass(frozen=True)
class Lists:
    """How the two lists and their fields are called."""

    videos: str
    id: str
    captions: str
    refers: str


@dataclass
class _Group:
    place: Place
    name: str
    split: str
    captions: list[str] = field(default_factory=list)
    seen: bool = False


def read_grouped(
    file: JsonFile, lists: Lists, rows: Rows, name_and_split: Callable[[Any], tuple[str, str]]
) -> Iterator[tuple[Place, CaptionedVideo]]:
    """Put the captions to their videos; a video without any is a bad row.

    Raises:
        DataError: the file lacks a list, or has a row that cannot be used and bad rows are not skipped.
    """
    groups: dict[Any, _Group] = {}
    refused: set[Any] = set()
    for place, row in file.items(lists.videos):
        with rows.at(place):
            key = member(row, lists.id, (str, int), "id")
            refused.add(key)
            name, split = name_and_split(row)
            if key in groups:
                raise RowError(f"the id {key} comes twice", "give each video one record")
            groups[key] = _Group(place, name, split)
    for place, row in file.items(lists.captions):
        with rows.at(place):
            key = member(row, lists.refers, (str, int), "id")
            if key not in groups and key in refused:
                continue  # the video's own row says why
            if key not in groups:
                raise RowError(
                    f"no record in {lists.videos} has the id {key}", "add it, or remove the caption"
                )
            groups[key].seen = True
            groups[key].captions.append(check_caption(row.get("caption")))
    for group in groups.values():
        with rows.at(group.place):
            if not group.seen:
                raise RowError(f"{group.name} has no captions", "add some, or remove the record")
            if group.captions:
                yield group.place, CaptionedVideo(group.name, group.split, tuple(group.captions))
