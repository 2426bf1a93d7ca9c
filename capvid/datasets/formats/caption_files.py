"""Own captions: JSONL files with splits, captions or paragraphs, and TSV files with ids and captions."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from capvid.datasets.annotation_files import Location, RowError, Rows, check_caption, read_lines
from capvid.datasets.dataset import SPLITS, CaptionedVideo, Segment, dataset_format

_SHAPE = 'write {"id": "name", "split": "train", "captions": ["..."]} on each line'


@dataset_format("tsv", "FILE", "id, tab and caption on each line; all train")
def read_tsv(path: Path, rows: Rows, options: Mapping[str, str]) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read lines of id, tab and caption; all videos are in the train split.

    Raises:
        DataError: the file is unreadable, or has a bad row and these are not skipped.
    """
    for name, (location, captions) in captions_by_id(path, rows).items():
        yield location, CaptionedVideo(name, "train", tuple(captions))


def captions_by_id(path: Path, rows: Rows) -> dict[str, tuple[Location, list[str]]]:
    """Return the captions of a TSV file by id, with the location of the first row of each.

    Raises:
        DataError: the file is unreadable, or has a bad row and these are not skipped.
    """
    captions_by_name: dict[str, tuple[Location, list[str]]] = {}
    for location, line in read_lines(path, rows):
        with rows.at(location):
            name, tab, caption = line.partition("\t")
            if not name.strip() or not tab:
                raise RowError("no id and caption", "write an id, a tabulator and a caption")
            captions_by_name.setdefault(name, (location, []))[1].append(check_caption(caption))
    return {name: (location, captions) for name, (location, captions) in captions_by_name.items() if captions}


@dataset_format("jsonl", "FILE", "id, split and captions, or segments and paragraphs, on each line")
def read_jsonl(
    path: Path, rows: Rows, options: Mapping[str, str]
) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read one video per line.

    Raises:
        DataError: the file is unreadable, or has a bad row and these are not skipped.
    """
    for location, line in read_lines(path, rows):
        with rows.at(location):
            yield location, _video(line)


def _video(line: str) -> CaptionedVideo:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise RowError("not JSON", _SHAPE) from None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not row["id"].strip():
        raise RowError("no id", _SHAPE)
    split = row.get("split", "train")
    if split not in SPLITS:
        raise RowError(f"split {reprlib.repr(split)} is not one of {', '.join(SPLITS)}", _SHAPE)
    captions = row.get("captions", [] if "paragraphs" in row else None)
    if not isinstance(captions, list) or not (captions or "paragraphs" in row):
        raise RowError("no list of captions", _SHAPE)
    kept = tuple(map(check_caption, captions))
    if "paragraphs" not in row:
        return CaptionedVideo(row["id"], split, kept)
    segments = _segments(row)
    return CaptionedVideo(row["id"], split, kept, segments, _paragraphs(row["paragraphs"], len(segments)))


def _paragraphs(value: Any, count: int) -> tuple[tuple[str, ...], ...]:
    """Return the paragraphs of a row, each with ``count`` sentences."""
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(sentences, list) and len(sentences) == count for sentences in value)
    ):
        raise RowError(
            f"no list of paragraphs with a sentence for each of the {count} segments",
            'write "paragraphs": [["sentence of segment 1", "of segment 2"], ...]',
        )
    return tuple(tuple(map(check_caption, sentences)) for sentences in value)


def _segments(row: dict[str, Any]) -> tuple[Segment, ...]:
    """Return the segments of a row, which must not be empty and must be in order of their start."""
    unit = row.get("unit", "frames")
    try:
        segments = tuple(Segment(float(item["start"]), float(item["end"]), unit) for item in row["segments"])
    except (KeyError, TypeError, ValueError, OverflowError):
        segments = ()
    starts = [segment.start for segment in segments]
    if (
        not segments
        or unit not in ("frames", "seconds")
        or starts != sorted(starts)
        or any(not 0 <= segment.start < segment.end < float("inf") for segment in segments)
        or (unit == "frames" and any(segment.start % 1 or segment.end % 1 for segment in segments))
    ):
        raise RowError(
            "no list of segments in the order of time",
            'write "segments": [{"start": 0, "end": 4}, ...], with "unit": "seconds" if they are',
        )
    return segments
