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
class Segment:
    """Part of a video, from ``start`` up to ``end``, in ``unit``: numbers of its frames, or seconds."""

    start: float
    end: float
    unit: str = "frames"


@dataclass(frozen=True)
class CaptionedVideo:
    """One video of a data set.

    Attributes:
        id: its name, the same as in the features.
        split: train, val or test.
        captions: sentences as they were written, each about the whole video.
        segments: parts of the video in the order of time, for paragraphs.
        paragraphs: each a sentence for every segment.
    """

    id: str
    split: str
    captions: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()
    paragraphs: tuple[tuple[str, ...], ...] = ()


def load_captions(specs: Sequence[str]) -> list[CaptionedVideo]:
    """Read data sets given as ``jsonl:FILE``, ``tsv:FILE`` or ``FILE`` (JSONL); several extend one another.

    A JSONL file has ``{"id": ..., "split": ..., "captions": [...]}`` on each line, or, in place of the
    captions, ``"segments": [{"start": 0, "end": 4}, ...], "paragraphs": [[sentence, ...], ...]`` with a
    sentence for every segment; segments are numbers of frames unless ``"unit": "seconds"`` says otherwise. A
    TSV file has an id, a tabulator and a caption on each line, an id as often as it has captions, all of the
    train split.

    Raises:
        DataError: a file is missing or empty, a row cannot be used, or an id comes twice.
        UsageError: a kind of data set that is not known.
    """
    videos: dict[str, CaptionedVideo] = {}
    for spec in specs:
        kind, path = _kind_and_path(spec)
        for place, video in _READERS[kind](path):
            if video.id in videos:
                raise DataError(
                    f"{place}: the video {video.id} comes twice", remedy="give each video one row"
                )
            videos[video.id] = video
    return list(videos.values())


def _kind_and_path(spec: str) -> tuple[str, Path]:
    kind, colon, rest = spec.partition(":")
    if Path(spec).exists() or not colon:
        return "jsonl", Path(spec)
    if kind in _READERS:
        return kind, Path(rest)
    if kind.isalnum() and len(kind) > 1:
        kinds = " or ".join(f"{name}:FILE" for name in _READERS)
        raise UsageError(f"{spec}: no such kind of data set", remedy=f"use {kinds}")
    return "jsonl", Path(spec)


def _lines(path: Path, form: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise DataError(f"{path}: no such captions file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: not readable as text ({error})", remedy=f"give a {form} file in UTF-8"
        ) from error


def _read_tsv(path: Path) -> list[tuple[str, CaptionedVideo]]:
    captions: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for number, line in enumerate(_lines(path, "TSV"), 1):
        if not line.strip():
            continue
        name, tab, caption = line.rstrip("\r").partition("\t")
        place = f"{path}, line {number}"
        if not name or not tab:
            raise DataError(f"{place}: no id and caption", remedy="write an id, a tabulator and a caption")
        places.setdefault(name, place)
        captions.setdefault(name, []).append(caption)
    if not captions:
        raise DataError(f"{path}: no captions in this file")
    return [(places[name], CaptionedVideo(name, "train", tuple(texts))) for name, texts in captions.items()]


def _read_jsonl(path: Path) -> list[tuple[str, CaptionedVideo]]:
    lines = _lines(path, "JSONL")
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
    split = row.get("split", "train")
    if split not in SPLITS:
        raise DataError(f"{place}: split {split!r} is not one of {', '.join(SPLITS)}", remedy=shape)
    captions: Any = row.get("captions", [] if "paragraphs" in row else None)
    if not _texts(captions) or not (captions or "paragraphs" in row):
        raise DataError(f"{place}: no list of captions", remedy=shape)
    if "paragraphs" not in row:
        return CaptionedVideo(row["id"], split, tuple(captions))
    segments = _segments(row, place)
    paragraphs = row["paragraphs"]
    if (
        not isinstance(paragraphs, list)
        or not paragraphs
        or not all(_texts(sentences) and len(sentences) == len(segments) for sentences in paragraphs)
    ):
        raise DataError(
            f"{place}: no list of paragraphs with a sentence for each of the {len(segments)} segments",
            remedy='write "paragraphs": [["sentence of segment 1", "of segment 2"], ...]',
        )
    return CaptionedVideo(row["id"], split, tuple(captions), segments, tuple(map(tuple, paragraphs)))


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _segments(row: dict[str, Any], place: str) -> tuple[Segment, ...]:
    """The segments of a row; each begins before it ends, and none before the one before it."""
    unit = row.get("unit", "frames")
    try:
        segments = tuple(Segment(float(item["start"]), float(item["end"]), unit) for item in row["segments"])
    except (KeyError, TypeError, ValueError):
        segments = ()
    starts = [segment.start for segment in segments]
    if (
        not segments
        or unit not in ("frames", "seconds")
        or starts != sorted(starts)
        or any(not 0 <= segment.start < segment.end for segment in segments)
        or (unit == "frames" and any(segment.start % 1 or segment.end % 1 for segment in segments))
    ):
        raise DataError(
            f"{place}: no list of segments in the order of time",
            remedy='write "segments": [{"start": 0, "end": 4}, ...], with "unit": "seconds" if they are',
        )
    return segments


_READERS = {"jsonl": _read_jsonl, "tsv": _read_tsv}
