"""Readers of predictions: the output of ``capvid caption``, and the result files of common evaluations.

The format of a file is detected from its first characters:

- records of ``capvid caption``: one, a list of them, or one per line; failed ones have no caption;
- COCO results: a list of ``{"image_id": ..., "caption": ...}`` (also ``video_id``, ``video`` or ``id``);
- an object of captions, or of lists of sentences, by id, possibly in ``"results"`` (ActivityNet);
- CSV or TSV with the columns video, caption and optionally logprob; TSV also without a header.
"""

from __future__ import annotations

import csv
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from capvid.datasets.annotation_files import (
    JsonReader,
    Location,
    RowError,
    Rows,
    TextLines,
    check_unicode,
    read_text,
)
from capvid.errors import DataError
from capvid.utils.escaping import unguarded_cell
from capvid.utils.files import MANIFEST

IDS = ("image_id", "video_id", "video", "id")
COLUMNS = ("video", "caption", "logprob")
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv")
_FORMS = (
    'give records of capvid caption, [{"image_id": ..., "caption": ...}], {id: caption}, or a table with the '
    "columns video and caption"
)


@dataclass
class Predictions:
    """Predictions of one file or folder.

    Attributes:
        sentences: caption, or sentences of the paragraph, by id.
        failed: ids of videos whose captioning failed.
        further: number of captions dropped because a better one of the same video comes first.
    """

    sentences: dict[str, list[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    further: int = 0


def read_predictions(path: Path, *, paragraphs: bool = False) -> Predictions:
    """Read a file of predictions, or all such files in a folder.

    Args:
        path: a file, plain or gzip, or the folder given to ``capvid caption --output-dir``.
        paragraphs: whether each video has a paragraph instead of a caption.

    Returns:
        The predictions; a caption is a list of one sentence.

    Raises:
        DataError: a file is unreadable or of another format; the message names file and line.
    """
    reader = _Reader(paragraphs)
    if path.is_dir():
        files = [one for one in sorted(path.rglob("*")) if one.name != MANIFEST and one.is_file()]
        files = [one for one in files if one.suffix.lower() in SUFFIXES]
        if not files:
            raise DataError(f"{path}: no predictions in this folder", remedy="give files of capvid caption")
    else:
        files = [path]
    for one in files:
        reader.read(one)
    if not reader.predictions.sentences and not reader.predictions.failed:
        raise DataError(f"{path}: no predictions", remedy=_FORMS)
    return reader.predictions


class _Reader:
    """Adds the predictions of files to ``predictions``."""

    def __init__(self, paragraphs: bool) -> None:
        self.paragraphs = paragraphs
        self.predictions = Predictions()
        self._locations: dict[str, tuple[Path, int]] = {}
        self._rows = Rows(skip_bad=False)

    def read(self, path: Path) -> None:
        text = read_text(path)
        if text.lstrip()[:1] in ("{", "["):
            self._read_json(JsonReader(path, text))
        else:
            self._read_table(path, TextLines(text))

    def _read_json(self, stream: JsonReader) -> None:
        if stream.peek() == "[":
            for line in stream.items():
                self._take_record(stream, line)
            stream.end()
            return
        first = stream.peek_value()
        if isinstance(first, dict) and _is_record(first):
            while stream.peek():
                self._take_record(stream, stream.line)
            return
        self._read_object(stream)
        stream.end()

    def _read_object(self, stream: JsonReader) -> None:
        """Read an object of captions by id, or one with such an object in ``results``."""
        about = []  # members that describe the file, not a video
        inside = False
        for line, name in stream.members():
            if name == "results" and stream.peek() == "{":
                inside = True
                for inner, video in stream.members():
                    self._take(stream.path, inner, video, stream.value())
            elif name in ("version", "external_data"):
                about.append((line, name, stream.value()))
            else:
                self._take(stream.path, line, name, stream.value())
        for line, name, value in [] if inside else about:
            self._take(stream.path, line, name, value)

    def _take_record(self, stream: JsonReader, line: int) -> None:
        row = stream.value()
        with self._rows.at(Location(stream.path, line)):
            if not isinstance(row, dict):
                raise RowError(f"not a record: {reprlib.repr(row)}", _FORMS)
            name = next((row[key] for key in IDS if row.get(key) is not None), None)
            if name is None:
                raise RowError(f"no id: none of {', '.join(IDS)}", _FORMS)
        if row.get("status") == "error":
            self._claim(stream.path, line, name)
            self.predictions.failed.append(str(name))
            return
        self._take(stream.path, line, name, *self._content(row))

    def _content(self, row: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
        """Return the best caption of a record, and all its captions."""
        if self.paragraphs:
            for key in ("segments", "sentences"):
                if row.get(key):
                    return row[key], ()
        captions = row.get("captions")
        if isinstance(captions, list) and captions:
            return captions[:1], captions
        return row.get("caption", row.get("sentence", row.get("segments"))), ()

    def _read_table(self, path: Path, lines: TextLines) -> None:
        source = iter(lines)
        first = next((line for line in source if line.strip()), "")
        tabs = "\t" in first
        head = _head(first, tabs=tabs)
        columns = _columns(head)
        if columns is None:
            if not tabs:
                if first:
                    raise DataError(f"{path}, line {lines.number}: no form of predictions", remedy=_FORMS)
                return
            columns, source = (0, 1), chain([first], source)
        before = begun = None
        start = head.index("start") if self.paragraphs and "start" in head else None
        for line, cells in _rows(source, lines, path, tabs=tabs):
            with self._rows.at(Location(path, line)):
                if len(cells) <= max(*columns, start or 0):
                    raise RowError(f"{len(cells)} columns", "write a video and a caption on each line")
            video, caption = (cells[column].strip() for column in columns)
            segment = None if start is None else cells[start]
            if "logprob" in head and video == before:
                if segment == begun:
                    self.predictions.further += 1
                else:  # the next segment of a paragraph
                    self.predictions.sentences[as_id(video)].append(caption)
            else:
                self._take(path, line, video, caption)
            before, begun = video, segment

    def _take(self, path: Path, line: int, name: Any, value: Any, captions: Sequence[Any] = ()) -> None:
        """Check and store the prediction of a video."""
        video = self._claim(path, line, name)
        with self._rows.at(Location(path, line, f"record {reprlib.repr(video)}")):
            sentences = [_text(one) for one in (value if isinstance(value, list) else [value])]
            if not self.paragraphs and len(sentences) != 1:
                raise RowError(
                    f"{len(sentences)} captions for one video", "give one caption, or score with --paragraph"
                )
            self.predictions.sentences[video] = sentences
            self.predictions.further += max(0, len(captions) - 1)

    def _claim(self, path: Path, line: int, name: Any) -> str:
        """Return the id as text and store its location; repeated ids are errors."""
        with self._rows.at(Location(path, line)):
            video = as_id(name)
            if video in self._locations:
                other = self._locations[video]
                raise RowError(
                    f"the id {reprlib.repr(video)} comes twice (first at {other[0]}, line {other[1]})",
                    "give each video one prediction",
                )
            self._locations[video] = (path, line)
        return video


def as_id(value: Any) -> str:
    """Return an id as text: 7 and "7" are the same id.

    Raises:
        RowError: it is neither text nor an integer, or empty.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise RowError(f"an id that is not text or a number: {reprlib.repr(value)}", "give each video an id")
    return check_unicode(str(value).strip())


def _text(value: Any) -> str:
    """Return the text of a caption, or of an object with one."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("caption", "sentence", "text") if key in value), None)
    if not isinstance(value, str):
        raise RowError(
            f"a caption that is not text: {reprlib.repr(value)}",
            "write a text, or leave the record out and choose --missing empty or skip",
        )
    return check_unicode(value)


def _is_record(row: dict[str, Any]) -> bool:
    """Return whether an object is the record of one video, not an object of captions by id."""
    return any(key in row and not isinstance(row[key], (list, dict)) for key in IDS) and any(
        key in row for key in ("caption", "captions", "segments", "sentences", "sentence", "status")
    )


def _head(line: str, *, tabs: bool) -> list[str]:
    """Return the column names if a line is a header."""
    try:
        cells = line.split("\t") if tabs else next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []
    return [cell.strip().lower() for cell in cells]


def _columns(head: Sequence[str]) -> tuple[int, int] | None:
    """Return the indices of the video and caption columns."""
    video = next((head.index(name) for name in IDS if name in head), None)
    caption = next((head.index(name) for name in ("caption", "sentence", "text") if name in head), None)
    return None if video is None or caption is None else (video, caption)


def _rows(
    source: Iterable[str], lines: TextLines, path: Path, *, tabs: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a table with their line numbers; tab-separated tables have no quotes."""
    if tabs:
        for line in source:
            if line.strip():
                yield lines.number, [unguarded_cell(cell) for cell in line.rstrip("\r\n").split("\t")]
        return
    reader = csv.reader(source, strict=True)
    while True:
        start = lines.number + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {start}: not a row of a table ({error})", remedy="mend its quotes"
            ) from None
        if cells is None:
            return
        if cells:
            yield start, [unguarded_cell(cell) for cell in cells]


_YOUTUBE = 11  # characters of an id there
_ACTIVITYNET = re.compile(f"v_.{{{_YOUTUBE}}}")


@dataclass
class Matches:
    """Predictions matched with references.

    Attributes:
        videos: id of the prediction by video of the references.
        extra: ids of predictions without a video.
        ambiguous: extra ids whose name matches several videos, or a video that another id matches too.
    """

    videos: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)


def match_ids(
    predicted: Iterable[str], videos: Iterable[str], aliases: Mapping[str, str] | None = None
) -> Matches:
    """Match ids of predictions, which may be paths of videos, with ids of references.

    The id itself is tried first, then the path without its suffix, then the file name without folder and
    suffix if the match is unique on both sides.

    Args:
        predicted: ids of predictions.
        videos: ids of references.
        aliases: ids of references by alternative names.
    """
    known = dict.fromkeys(videos)
    other = aliases or {}
    by_name: dict[str, list[str]] = {}
    for video in known:
        path = PurePosixPath(video)
        for name in {path.name, path.stem}:
            by_name.setdefault(name, []).append(video)
    matches = Matches()
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
            if len(fits) == 1 and fits[0] not in matches.videos:
                claims.setdefault(fits[0], []).append(name)
            else:
                rest.append(name)
                ambiguous.update([name] if len(fits) > 1 else [])
        for video, names in claims.items():
            if len(names) == 1:
                matches.videos[video] = names[0]
            else:
                rest += names
                ambiguous.update(names)
        left = rest
    matches.extra = left
    matches.ambiguous = [name for name in left if name in ambiguous]
    return matches


def _same(name: str) -> str:
    return name


def _without_suffix(name: str) -> str:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.with_suffix("").as_posix() if path.name else name


def _stem(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).stem


def is_activitynet(videos: Iterable[str]) -> bool:
    """Return whether ids have the form of ActivityNet: ``v_`` and the 11 characters of a YouTube id."""
    return any(_ACTIVITYNET.fullmatch(video) for video in videos)


def activitynet_id(name: str) -> str:
    """Return the id with ``v_`` before it."""
    return f"v_{name}" if len(name) == _YOUTUBE else name
