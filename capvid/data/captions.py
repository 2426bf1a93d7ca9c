"""Captioned videos from annotation files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capvid.errors import DataError, UsageError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class CaptionedVideo:
    """One video of a data set.

    Attributes:
        id: its name, the same as in the features.
        split: train, val or test.
        captions: sentences as they were written.
    """

    id: str
    split: str
    captions: tuple[str, ...]


def load_captions(specs: Sequence[str]) -> list[CaptionedVideo]:
    """Read data sets given as ``jsonl:FILE`` or ``FILE``; several extend one another.

    Raises:
        DataError: a file is missing or empty, a row cannot be used, or an id comes twice.
        UsageError: a kind of data set that is not known.
    """
    videos: dict[str, CaptionedVideo] = {}
    for spec in specs:
        for place, video in _read_jsonl(_path(spec)):
            if video.id in videos:
                raise DataError(
                    f"{place}: the video {video.id} comes twice", remedy="give each video one row"
                )
            videos[video.id] = video
    return list(videos.values())


def _path(spec: str) -> Path:
    if Path(spec).exists():
        return Path(spec)
    kind, colon, rest = spec.partition(":")
    if colon and kind == "jsonl":
        return Path(rest)
    if colon and kind.isalnum() and len(kind) > 1:
        raise UsageError(f"{spec}: no such kind of data set", remedy="use jsonl:FILE")
    return Path(spec)


def _read_jsonl(path: Path) -> list[tuple[str, CaptionedVideo]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise DataError(f"{path}: no such captions file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: not readable as text ({error})", remedy="give a JSONL file in UTF-8"
        ) from error
    rows = [
        (f"{path}, line {number}", _video(line, f"{path}, line {number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not rows:
        raise DataError(f"{path}: no captions in this file")
    return rows


def _video(line: str, place: str) -> CaptionedVideo:
    shape = 'write {"id": "name", "split": "train", "captions": ["..."]} on each line'
    try:
        row: Any = json.loads(line)
    except ValueError:
        raise DataError(f"{place}: not JSON", remedy=shape) from None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not row["id"]:
        raise DataError(f"{place}: no id", remedy=shape)
    captions = row.get("captions")
    if (
        not isinstance(captions, list)
        or not captions
        or not all(isinstance(caption, str) for caption in captions)
    ):
        raise DataError(f"{place}: no list of captions", remedy=shape)
    split = row.get("split", "train")
    if split not in SPLITS:
        raise DataError(f"{place}: split {split!r} is not one of {', '.join(SPLITS)}", remedy=shape)
    return CaptionedVideo(row["id"], split, tuple(captions))
