"""Own captions: JSONL files with splits, captions or paragraphs, and TSV files with ids and captions."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from capvid.datasets.annotation_files import check_caption, read_lines
from capvid.datasets.dataset import (
    DATASET_FORMATS,
    SPLITS,
    CaptionedVideo,
    LocatedVideos,
    Location,
    RowError,
    Rows,
    Segment,
)
from capvid.datasets.formats.own_captions import OwnCaptions, add_record, is_record, is_table, read_table

_REMARK = re.compile(r"\t(low confidence|error: .*)$")  # after the captions of several videos
_SHAPE = 'write {"id": "name", "split": "train", "captions": ["..."]} on each line'


@DATASET_FORMATS.register("tsv", target="FILE", help="id, tab and caption on each line; all train")
def read_tsv(path: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read lines of id, tab and caption, or a table of capvid; all videos are in the train split."""
    lines = list(read_lines(path, rows))
    if lines and is_table(lines[0][1], "\t"):
        yield from read_table(path, lines, rows, "\t")
        return
    if any(_REMARK.search(line) for _, line in lines):  # of capvid caption for several videos
        own = OwnCaptions(path)
        for location, line in lines:
            with rows.at(location):
                video, _, caption = line.partition("\t")
                if caption.startswith("\terror: "):
                    own.failed += 1
                    continue
                own.add(location, video, 0, None, _REMARK.sub("", caption))
        yield from own.videos(rows)
        return
    for name, (location, captions) in captions_by_id(lines, rows).items():
        yield location, CaptionedVideo(name, "train", tuple(captions))


def captions_by_id(
    lines: Iterable[tuple[Location, str]], rows: Rows
) -> dict[str, tuple[Location, list[str]]]:
    """Return the captions of lines of id, tab and caption by id, with the location of the first of each."""
    rows_by_id: dict[str, tuple[Location, list[str]]] = {}
    for location, line in lines:
        with rows.at(location):
            name, tab, caption = line.partition("\t")
            if not name.strip() or not tab:
                raise RowError("no id and caption", "write an id, a tab and a caption")
            rows_by_id.setdefault(name, (location, []))[1].append(check_caption(caption))
    return {name: row for name, row in rows_by_id.items() if row[1]}


@DATASET_FORMATS.register(
    "jsonl", target="FILE", help="id, split and captions, or segments and paragraphs, on each line"
)
def read_jsonl(path: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read one video per line, or the records and ``metadata.jsonl`` that capvid writes."""
    own = OwnCaptions(path)
    for location, line in read_lines(path, rows):
        with rows.at(location):
            row = _parse_json(line)
            if is_record(row):
                add_record(own, location, row)
            else:
                yield location, _parse_video(row)
    yield from own.videos(rows)


def _parse_json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        if line.strip() in ("[", "{"):
            problem = "a JSON document, not an object on each line"
            raise RowError(problem, "write records of capvid with --format jsonl") from None
        raise RowError("not JSON", _SHAPE) from None


def _parse_video(row: Any) -> CaptionedVideo:
    name = row.get("id") if isinstance(row, dict) else None
    name = str(name) if type(name) is int else name
    if not isinstance(name, str) or not name.strip():
        raise RowError("no id", _SHAPE)
    split = row.get("split", "train")
    if split not in SPLITS:
        raise RowError(f"split {reprlib.repr(split)} is not one of {', '.join(SPLITS)}", _SHAPE)
    captions = row.get("captions", [] if "paragraphs" in row else None)
    if not isinstance(captions, list) or not (captions or "paragraphs" in row):
        raise RowError("no list of captions", _SHAPE)
    checked = tuple(map(check_caption, captions))
    if "paragraphs" not in row:
        return CaptionedVideo(name, split, checked)
    segments, paragraphs = _segments(row), row["paragraphs"]
    if (
        not isinstance(paragraphs, list)
        or not paragraphs
        or not all(isinstance(texts, list) and len(texts) == len(segments) for texts in paragraphs)
    ):
        raise RowError(
            f"no list of paragraphs with a sentence for each of the {len(segments)} segments",
            'write "paragraphs": [["sentence of segment 1", "of segment 2"], ...]',
        )
    sentences = tuple(tuple(map(check_caption, texts)) for texts in paragraphs)
    return CaptionedVideo(name, split, checked, segments, sentences)


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
            "no list of segments in order of their start",
            'write "segments": [{"start": 0, "end": 4}, ...], with "unit": "seconds" if they are',
        )
    return segments
