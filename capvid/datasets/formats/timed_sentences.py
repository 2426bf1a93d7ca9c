"""ActivityNet Captions and YouCookII: paragraphs of sentences, each about a segment in seconds.

``train.json`` of ActivityNet has 10,009 videos. The others come from ``captioning_val_1.json`` (ae-val, 2460)
and ``captioning_test_1.json`` (ae-test, 2457), the halves of the validation videos in the MART paper; without
both files, all 4917 videos of ``val_1.json`` are the val split. A second annotator described most of these
videos with other segments, in ``val_2.json``, or as complete paragraphs in ``captioning_val_2_para.json`` and
``captioning_test_2_para.json``. These paragraphs are further references.

The MART authors' repository names the files ``anet_entities_*`` for ``captioning_*``, and those of YouCookII
``yc2_*_anet_format.json``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from capvid.datasets.annotation_files import (
    JsonFile,
    check_caption,
    find_file,
    find_splits,
    first_ids,
    lookup,
    member,
)
from capvid.datasets.dataset import (
    DATASET_FORMATS,
    CaptionedVideo,
    LocatedVideos,
    Location,
    RowError,
    Rows,
    Segment,
)

FILES = (("train", "train.json"), ("val", "captioning_val_1.json"), ("test", "captioning_test_1.json"))
AUTHORS_FILES = tuple((split, name.replace("captioning", "anet_entities")) for split, name in FILES)
UNDIVIDED_FILES = (("train", "train.json"), ("val", "val_1.json"))
SECOND_FILE = "val_2.json"
SECOND_PARAGRAPHS = ("captioning_val_2_para.json", "captioning_test_2_para.json")

YOUCOOK2_FILE = "youcookii_annotations_trainval.json"
YOUCOOK2_FILES = (("train", "captioning_train.json"), ("val", "captioning_val.json"))
YOUCOOK2_AUTHORS_FILES = (("train", "yc2_train_anet_format.json"), ("val", "yc2_val_anet_format.json"))
_YOUCOOK2_SPLITS = {"training": "train", "validation": "val", "testing": "test"}

FRAME = 0.5  # seconds between the frames of the MART paper's features
_MAX_SECONDS = 1e12


@DATASET_FORMATS.register("activitynet", target="DIR", help="ActivityNet Captions as published")
def read_activitynet(folder: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read the videos of all splits; the paragraphs of the second annotator come last."""
    files = _present(folder, FILES, AUTHORS_FILES)
    if not any(find_file(folder, name) for _, name in files[1:]) and find_file(folder, "val_1.json"):
        files = UNDIVIDED_FILES
        names = " and ".join(name for _, name in FILES[1:])
        rows.notes.append(f"{folder}: no {names}, so all of val_1.json is the val split")
    second: dict[str, tuple[str, ...]] | None = None
    for split, path in find_splits(folder, files, rows):
        if split != "train" and second is None:
            second = _second_paragraphs(folder, rows)
        for location, video in _read_timed(path, split, rows):
            if split != "train" and second and video.id in second:
                video = replace(video, paragraphs=(*video.paragraphs, second[video.id]))
            yield location, video


def _present(folder: Path, *named: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the first pairs of split and file of which a file after the first exists; else the first."""
    return next((f for f in named if any(find_file(folder, name) for _, name in f[1:])), named[0])


def _second_paragraphs(folder: Path, rows: Rows) -> dict[str, tuple[str, ...]]:
    """Return the paragraphs of the second annotator by video id."""
    paragraphs: dict[str, tuple[str, ...]] = {}

    def add(location: Location, name: str, sentences: Iterable[Any]) -> None:
        with rows.at(location):
            paragraph = tuple(map(check_caption, sentences))
            if name in paragraphs:
                raise RowError(f"the video {name} occurs twice", "give each video one record")
            paragraphs[name] = paragraph

    if path := find_file(folder, SECOND_FILE):
        for location, video in _read_timed(path, "val", rows):
            add(location, video.id, video.paragraphs[0])
        return paragraphs
    names = [(name, name.replace("captioning", "anet_entities")) for name in SECOND_PARAGRAPHS]
    paths = [path for pair in names if (path := find_file(folder, *pair))]
    if not paths:
        rows.notes.append(f"{folder}: no {SECOND_FILE}, so one reference for each video")
    for path in paths:
        for location, name, text in JsonFile(path).members():
            add(location, name, [text])
    return paragraphs


@DATASET_FORMATS.register("youcook2", target="DIR", help="YouCookII as published")
def read_youcook2(folder: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read the videos of both splits of YouCookII, each with one paragraph.

    Without ``youcookii_annotations_trainval.json``, ``captioning_train.json`` and ``captioning_val.json`` are
    read: 1333 videos for training and 457 for validation.
    """

    def parse(row: Any) -> tuple[str, list[Any], list[Any]]:
        split = lookup(row, "subset", _YOUCOOK2_SPLITS)
        annotations = member(row, "annotations", list, "list of annotations")
        times = [member(annotation, "segment", list, "segment") for annotation in annotations]
        return split, times, [annotation.get("sentence") for annotation in annotations]

    if path := find_file(folder, YOUCOOK2_FILE):
        yield from _timed_videos(path, JsonFile(path).members("database"), parse, rows)
        return
    for split, path in find_splits(folder, _present(folder, YOUCOOK2_FILES, YOUCOOK2_AUTHORS_FILES), rows):
        yield from _read_timed(path, split, rows)


def _read_timed(path: Path, split: str, rows: Rows) -> LocatedVideos:
    """Read a JSON object of videos by id, each with ``timestamps`` and ``sentences``."""

    def parse(row: Any) -> tuple[str, list[Any], list[Any]]:
        times = member(row, "timestamps", list, "list of times")
        return split, times, member(row, "sentences", list, "list of sentences")

    return _timed_videos(path, JsonFile(path).members(), parse, rows)


def _timed_videos(
    path: Path,
    records: Iterable[tuple[Location, str, Any]],
    parse: Callable[[Any], tuple[str, list[Any], list[Any]]],
    rows: Rows,
) -> LocatedVideos:
    """Yield the videos of records, with segments and sentences in the order of annotation.

    The published reference paragraphs have this order, not that of time. The times of a segment that ends
    before it begins are swapped; an empty one begins one frame earlier. Both are noted.

    Args:
        path: path of the file, for notes.
        records: location, id and content of each record.
        parse: function from the content to split, times and sentences.
        rows: collector of bad rows and notes.
    """
    corrected: list[str] = []  # video of each corrected segment
    for location, name, row in records:
        with rows.at(location):
            split, times, sentences = parse(row)
            if not name.strip():
                raise RowError("no id", "give each video one")
            segments = []
            for first, last in parse_times(times, sentences):
                start, end = sorted((first, last))
                if start < 0 or end <= 0:
                    raise RowError(f"a segment from {start:g} to {end:g} seconds", "give times from 0 on")
                if first >= last:
                    corrected.append(name)
                segments.append(Segment(start if start < end else max(0.0, start - FRAME), end, "seconds"))
            paragraph = tuple(map(check_caption, sentences))
            yield location, CaptionedVideo(name, split, (), tuple(segments), (paragraph,))
    if corrected:
        problem = f"{len(corrected)} segments did not end after their start"
        rows.notes.append(f"{path}: {problem} and were corrected ({first_ids(corrected)})")


def parse_times(times: Sequence[Any], sentences: Sequence[Any]) -> list[tuple[float, float]]:
    """Return start and end in seconds of the segment of each sentence; raise RowError if one is wrong."""
    if len(times) != len(sentences):
        counts = f"{len(times)} segments and {len(sentences)} sentences"
        raise RowError(counts, "give a sentence for every segment")
    for pair in times:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"a segment that is not [start, end]: {reprlib.repr(pair)}", "give both times")
    return [(_seconds(start), _seconds(end)) for start, end in times]


def _seconds(value: Any) -> float:
    """Return a number of seconds as a float."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MAX_SECONDS:
        return float(value)
    raise RowError(f"{reprlib.repr(value)} is not a time in seconds", "give times as numbers")
