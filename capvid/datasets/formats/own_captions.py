"""What ``capvid caption`` wrote, as training data: tables, records, ``metadata.jsonl`` and folders of texts.

The best caption of a video counts, or of each of its segments. The id of a video is its path without suffix,
below the folder that all videos of the file have in common: the name that ``capvid extract`` gives to its
features. Failed videos are left out.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from capvid.datasets.annotation_files import check_caption, read_lines
from capvid.datasets.dataset import (
    DATASET_FORMATS,
    CaptionedVideo,
    LocatedVideos,
    Location,
    RowError,
    Rows,
    Segment,
)
from capvid.errors import DataError
from capvid.utils.escaping import unguarded_cell

_VIDEO = ("video", "file_name", "path", "id")
_CAPTION = ("caption", "text")


@dataclass
class OwnCaptions:
    """Captions of a file by video, in its order.

    Attributes:
        path: the file.
        best: whether only the first caption of each segment counts.
        captions: location of the first row of each video, and start, end and text of its segments.
        failed: number of videos that failed.
        dropped: number of captions that are not the best of their segment.
    """

    path: Path
    best: bool = True
    captions: dict[str, tuple[Location, list[tuple[Any, Any, str]]]] = field(default_factory=dict)
    failed: int = 0
    dropped: int = 0

    def add(self, location: Location, video: str, start: Any, end: Any, text: Any) -> None:
        """Add a caption; raise RowError if it is none."""
        segments = self.captions.setdefault(video, (location, []))[1]
        if self.best and start in [segment[0] for segment in segments]:
            self.dropped += 1
        else:
            segments.append((start, end, check_caption(text)))

    def videos(self, rows: Rows) -> LocatedVideos:
        """Yield the videos, and note what was left out."""
        names = _ids(list(self.captions))
        for (location, segments), name in zip(self.captions.values(), names, strict=True):
            with rows.at(location):
                if len(segments) > 1 and self.best:
                    times = tuple(_segment(start, end) for start, end, _ in segments)
                    texts = tuple(text for *_, text in segments)
                    yield location, CaptionedVideo(name, "train", (), times, (texts,))
                elif segments:
                    yield location, CaptionedVideo(name, "train", tuple(text for *_, text in segments))
        if self.failed:
            rows.notes.append(f"{self.path}: {self.failed} videos that failed are left out")
        if self.dropped:
            rows.notes.append(f"{self.path}: {self.dropped} captions are not the best of theirs, left out")


def is_table(line: str, delimiter: str) -> bool:
    """Return whether a line is the header of a table with a column of videos and one of captions."""
    names = line.lower().split(delimiter)
    return any(name in names for name in _VIDEO) and any(name in names for name in _CAPTION)


def read_table(
    path: Path, lines: Sequence[tuple[Location, str]], rows: Rows, delimiter: str
) -> LocatedVideos:
    """Read a table with a header; cells of a tab-separated one have no quotes."""
    texts = (line for _, line in lines)
    if delimiter == "\t":
        table = csv.DictReader(texts, delimiter=delimiter, quoting=csv.QUOTE_NONE)
    else:
        table = csv.DictReader(texts, delimiter=delimiter, strict=True)
    names = {name.strip().lower(): name for name in table.fieldnames or ()}
    video_column, caption_column = (
        next((names[name] for name in columns if name in names), "") for columns in (_VIDEO, _CAPTION)
    )
    own = OwnCaptions(path, best="start" in names)
    while True:
        location = lines[min(table.line_num, len(lines) - 1)][0]
        try:
            row = next(table, None)
        except csv.Error as error:
            raise DataError(
                f"{location}: not a row of a table ({error})", remedy="correct its quotes"
            ) from None
        if row is None:
            break
        with rows.at(location):
            video = row.get(video_column)
            if not video or not video.strip():
                raise RowError("no video", "name it in each row")
            if row.get("status") == "error":
                own.failed += 1
                continue
            text = unguarded_cell(row.get(caption_column) or "")
            own.add(location, unguarded_cell(video), row.get("start"), row.get("end"), text)
    yield from own.videos(rows)


@DATASET_FORMATS.register("csv", target="FILE", help="table with the columns video and caption; all train")
def read_csv(path: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read a table of capvid, or another with such columns.

    Raises:
        DataError: there is no such column.
    """
    lines = list(read_lines(path, rows))
    delimiter = max(",;", key=lines[0][1].count) if lines else ","
    if lines and not is_table(lines[0][1], delimiter):
        problem = f"{lines[0][0]}: no header with the columns video and caption"
        raise DataError(problem, remedy="add it, or use jsonl or tsv")
    yield from read_table(path, lines, rows, delimiter)


def is_record(row: Any) -> bool:
    """Return whether a JSON value is a record of capvid, or a line of ``metadata.jsonl``."""
    if not isinstance(row, dict) or "id" in row:
        return False
    return ("video" in row and "captions" in row) or "file_name" in row


def add_record(own: OwnCaptions, location: Location, row: Mapping[str, Any]) -> None:
    """Add the captions of a record; raise RowError if it has none."""
    video = row.get("video", row.get("file_name"))
    if not isinstance(video, str) or not video.strip():
        raise RowError("no video", "name it in each row")
    if row.get("status") == "error":
        own.failed += 1
        return
    segments: Iterable[Any] = row.get("segments") or [{**row, "start": 0, "end": row.get("duration")}]
    for segment in segments if isinstance(segments, list) else [None]:
        if not isinstance(segment, dict):
            raise RowError("a segment that is not an object", "correct it")
        captions = segment.get("captions", [segment])
        best = captions[0] if isinstance(captions, list) and captions else None
        own.dropped += len(captions) - 1 if isinstance(best, dict) else 0
        text = best.get("text") if isinstance(best, dict) else None
        own.add(location, video, segment.get("start"), segment.get("end"), text)


@DATASET_FORMATS.register("texts", target="DIR", help="text files, beside videos or in folders; all train")
def read_texts(folder: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read a folder of ``NAME.txt``, each with the captions of a video on its lines.

    Raises:
        DataError: there is none.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder", remedy="give the folder of the texts")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    paths = [path for path in files if path.suffix == ".txt"]
    if not paths:
        other = next((path for path in files if path.suffix in (".json", ".jsonl", ".csv", ".tsv")), None)
        found = f", but {other.relative_to(folder)}" if other else ""
        remedy = "use --format txt for folders, and -o captions.jsonl for records"
        raise DataError(f"{folder}: no .txt in this folder{found}", remedy=remedy)
    for path in paths:
        captions, first = [], Location(path, 1)
        for location, line in read_lines(path, rows):
            with rows.at(location):
                captions.append(check_caption(line))
        with rows.at(first):
            if not captions:
                raise RowError("no caption", "write one, or remove the file")
            yield (
                first,
                CaptionedVideo(path.relative_to(folder).as_posix()[: -len(".txt")], "train", tuple(captions)),
            )


def _ids(videos: Sequence[str]) -> list[str]:
    """Return the paths below their common folder, without suffix unless two would be equal."""
    paths = [PurePosixPath(video.replace("\\", "/")) for video in videos]
    try:
        common = os.path.commonpath([path.parent for path in paths]) if paths else ""
        paths = [path.relative_to(common) if common else path for path in paths]
    except ValueError:  # some are absolute, others not
        paths = [path.relative_to(path.anchor) for path in paths]
    short = [path.with_suffix("").as_posix() if path.name else path.as_posix() for path in paths]
    uses = Counter(short)
    return [name if uses[name] == 1 else path.as_posix() for name, path in zip(short, paths, strict=True)]


def _segment(start: Any, end: Any) -> Segment:
    """Return a segment in seconds; raise RowError if these are no times."""
    try:
        segment = Segment(float(start), float(end), "seconds")
    except (TypeError, ValueError, OverflowError):
        segment = Segment(0, 0)
    if not 0 <= segment.start < segment.end < float("inf"):
        raise RowError("a segment without start and end", "caption videos, or features with times")
    return segment
