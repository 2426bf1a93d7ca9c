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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar

from capvid.datasets.annotation_files import JsonReader, read_text
from capvid.datasets.dataset import Location, RowError, Rows, check_unicode
from capvid.errors import DataError
from capvid.utils.escaping import unguarded_cell
from capvid.utils.files import MANIFEST

IDS = ("image_id", "video_id", "video", "id", "file_name")
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv")
_CAPTION_COLUMNS = ("caption", "sentence", "text")
_REMEDY = (
    'give records of capvid caption, [{"image_id": ..., "caption": ...}], {id: caption}, or a table with the '
    "columns video and caption"
)


T = TypeVar("T")  # a sentence, or a sentence with a segment


@dataclass
class Predictions(Generic[T]):
    """Predictions of one file or folder.

    Attributes:
        sentences: sentences of the paragraph, or the caption as a list of one sentence, by id.
        failed: ids of videos whose captioning failed.
        dropped: number of captions dropped because a better one of the same video comes first.
    """

    sentences: dict[str, list[T]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    dropped: int = 0


def read_predictions(path: Path, *, paragraphs: bool = False) -> Predictions[str]:
    """Read a file of predictions, or all such files in a folder.

    Args:
        path: a file, plain or gzip, or the folder given to ``capvid caption --output-dir``.
        paragraphs: whether each video has a paragraph instead of a caption.

    Raises:
        DataError: a file is unreadable or of another format; the message names file and line.
    """
    reader = _Reader(paragraphs)
    for file in prediction_files(path):
        if path.is_dir() and file.suffix.lower() == ".txt":
            reader.read_lines(file, file.relative_to(path).with_suffix("").as_posix())
        else:
            reader.read(file)
    if not reader.predictions.sentences and not reader.predictions.failed:
        raise DataError(f"{path}: no predictions", remedy=_REMEDY)
    return reader.predictions


def prediction_files(path: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Return the files with predictions in a folder, or the path if it is not one.

    If there are no others, texts count: those of capvid, whose manifest is in the folder, and those beside
    videos.

    Raises:
        DataError: there are none.
    """
    if not path.is_dir():
        return [path]
    every = [file for file in sorted(path.rglob("*")) if file.is_file()]
    files = [file for file in every if file.suffix.lower() in suffixes and file.name != MANIFEST]
    if not files and suffixes == SUFFIXES:
        videos = {file.with_suffix("") for file in every if file.suffix.lower() != ".txt"}
        files = [file for file in every if file.suffix.lower() == ".txt"]
        if path / MANIFEST not in every:
            files = [file for file in files if file.with_suffix("") in videos]
    if not files:
        raise DataError(f"{path}: no predictions in this folder", remedy="give files of capvid caption")
    return files


class RecordReader:
    """Reads the records of JSON files, one per video."""

    def __init__(self) -> None:
        self._locations: dict[str, Location] = {}
        self._rows = Rows(skip_bad=False)

    def records(self, stream: JsonReader) -> Iterator[tuple[Location, str, Any]]:
        """Yield location, id and content of each video.

        The file has records in a list or one after the other, or an object by id, which may be the member
        ``results`` (ActivityNet) or ``database`` (YouCookII) of another.

        Raises:
            DataError: the file is not JSON, an id is missing or occurs twice, or a RowError is raised on a
                content.
        """
        for line, name, row in _split_records(stream):
            with self._rows.at(Location(stream.path, line)):
                if name is None:
                    if not isinstance(row, dict):
                        raise RowError(f"not a record: {reprlib.repr(row)}", _REMEDY)
                    name = next((row[key] for key in IDS if row.get(key) is not None), None)
                    if name is None:
                        raise RowError(f"no id: none of {', '.join(IDS)}", _REMEDY)
            video = self.register(stream.path, line, name)
            yield Location(stream.path, line, f"record {reprlib.repr(video)}"), video, row

    def register(self, path: Path, line: int, name: Any) -> str:
        """Return the id as text and store its location; repeated ids are errors."""
        location = Location(path, line)
        with self._rows.at(location):
            video = as_id(name)
            if video in self._locations:
                raise RowError(
                    f"the id {reprlib.repr(video)} occurs twice (first at {self._locations[video]})",
                    "give each video one prediction",
                )
            self._locations[video] = location
        return video


def _split_records(stream: JsonReader) -> Iterator[tuple[int, Any, Any]]:
    """Yield line, id and content of each video; the id of a record, which is inside, is None."""
    if stream.peek() == "[":
        for line in stream.items():
            yield line, None, stream.value()
    elif isinstance(first := stream.peek_value(), dict) and is_record(first):
        while stream.peek():
            yield stream.line, None, stream.value()
    else:
        header = []  # members that describe the file if the videos are in another member, videos otherwise
        nested = False
        for line, name in stream.members():
            if name in ("results", "database") and stream.peek() == "{":
                nested = True
                for inner_line, video in stream.members():
                    yield inner_line, video, stream.value()
            elif name in ("version", "external_data", "params"):
                header.append((line, name, stream.value()))
            else:
                yield line, name, stream.value()
        yield from [] if nested else header
    stream.end()


def is_failed(row: Any) -> bool:
    """Return whether a record is that of a video that could not be captioned."""
    return isinstance(row, dict) and row.get("status") == "error"


class _Reader(RecordReader):
    """Adds the predictions of files to ``predictions``."""

    def __init__(self, paragraphs: bool) -> None:
        super().__init__()
        self.paragraphs = paragraphs
        self.predictions: Predictions[str] = Predictions()

    def read(self, path: Path) -> None:
        text = read_text(path)
        if text.lstrip()[:1] not in ("{", "["):
            self._read_table(path, text.split("\n"))
            return
        for location, video, row in self.records(JsonReader(path, text)):
            if is_failed(row):
                self.predictions.failed.append(video)
                continue
            value, captions = self._content(row) if isinstance(row, dict) else (row, ())
            self._add(location, video, value, captions)

    def read_lines(self, path: Path, video: str) -> None:
        """Read the text of a video; each line is a caption, the first the best."""
        first, *others = read_text(path).splitlines() or [""]
        self._add(Location(path, 1), self.register(path, 1, video), first, [first, *others])

    def _content(self, row: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
        """Return the best caption of a record, and all its captions."""
        if self.paragraphs:
            for key in ("segments", "sentences"):
                if row.get(key):
                    return row[key], ()
        captions = row.get("captions")
        if isinstance(captions, list) and captions:
            return captions[:1], captions
        keys = (*_CAPTION_COLUMNS, "segments")
        return next((row[key] for key in keys if key in row), None), ()

    def _read_table(self, path: Path, lines: list[str]) -> None:
        first = next((number for number, line in enumerate(lines) if line.strip()), None)
        if first is None:
            return
        tabs = "\t" in lines[first]
        delimiter = "\t" if tabs else max(",;", key=lines[first].count)
        cells = lines[first].split("\t") if tabs else []
        with suppress(csv.Error):  # not a row of a table
            cells = cells or next(csv.reader([lines[first].rstrip("\r")], delimiter=delimiter), [])
        header = [cell.strip().lower() for cell in cells]  # names of the columns
        video_column = next((header.index(name) for name in IDS if name in header), None)
        caption_column = next((header.index(name) for name in _CAPTION_COLUMNS if name in header), None)
        remark_column = header.index("status") if "status" in header else None
        if video_column is not None and caption_column is not None:
            first += 1
        elif tabs:
            video_column, caption_column, remark_column = 0, 1, 2
        else:
            problem = f"{path}, line {first + 1}: not a known format of predictions"
            raise DataError(problem, remedy=_REMEDY)
        start_column = header.index("start") if self.paragraphs and "start" in header else None
        last_video = last_start = None
        for line, cells in _table_rows(path, lines, first, delimiter):
            with self._rows.at(Location(path, line)):
                if len(cells) <= max(video_column, caption_column, start_column or 0):
                    raise RowError(f"{len(cells)} columns", "write a video and a caption on each line")
            video, caption = cells[video_column].strip(), cells[caption_column].strip()
            start = None if start_column is None else cells[start_column]
            # a video that failed in tables of capvid, and in its lines of path, caption and remark
            if remark_column and not caption and "".join(cells[remark_column:]).startswith("error"):
                self.predictions.failed.append(self.register(path, line, video))
                continue
            if "logprob" not in header or video != last_video:
                self._add(Location(path, line), self.register(path, line, video), caption)
            elif start == last_start:
                self.predictions.dropped += 1
            else:  # the next segment of a paragraph
                self.predictions.sentences[as_id(video)].append(caption)
            last_video, last_start = video, start

    def _add(self, location: Location, video: str, value: Any, captions: Sequence[Any] = ()) -> None:
        """Check and store the prediction of a video."""
        with self._rows.at(location):
            sentences = [as_text(item) for item in (value if isinstance(value, list) else [value])]
            if not self.paragraphs and len(sentences) != 1:
                raise RowError(
                    f"{len(sentences)} captions for one video", "give one caption, or score with --paragraph"
                )
            self.predictions.sentences[video] = sentences
            self.predictions.dropped += max(0, len(captions) - 1)


def as_id(value: Any) -> str:
    """Return an id as text, so that 7 and "7" are one id; raise RowError if it is neither, or empty."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise RowError(f"an id that is not text or a number: {reprlib.repr(value)}", "give each video an id")
    return check_unicode(str(value).strip())


def as_text(value: Any) -> str:
    """Return the text of a caption, or of an object with one."""
    if isinstance(value, dict):
        value = next((value[key] for key in _CAPTION_COLUMNS if key in value), None)
    if not isinstance(value, str):
        raise RowError(
            f"a caption that is not text: {reprlib.repr(value)}",
            "write a text, or leave the record out and choose --missing empty or skip",
        )
    return check_unicode(value)


def is_record(row: dict[str, Any]) -> bool:
    """Return whether an object is the record of one video, not an object of captions by id."""
    return any(key in row and not isinstance(row[key], (list, dict)) for key in IDS) and any(
        key in row for key in ("caption", "captions", "segments", "sentences", "sentence", "text", "status")
    )


def _table_rows(
    path: Path, lines: Sequence[str], first: int, delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows from ``lines[first]`` on with line numbers; tab-separated tables have no quotes."""
    if delimiter == "\t":
        for number, line in enumerate(lines[first:], first + 1):
            if line.strip():
                yield number, [unguarded_cell(cell) for cell in line.rstrip("\r").split("\t")]
        return
    reader = csv.reader((f"{line}\n" for line in lines[first:]), strict=True, delimiter=delimiter)
    while True:
        number = first + reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {number}: not a row of a table ({error})", remedy="correct its quotes"
            ) from None
        if cells is None:
            return
        if cells:
            yield number, [unguarded_cell(cell) for cell in cells]


_ACTIVITYNET_ID = re.compile("v_.{11}")  # the 11 characters of a YouTube id


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
    aliases = aliases or {}
    videos_by_name: dict[str, list[str]] = {}
    for video in known:
        path = PurePosixPath(video)
        for name in {path.name, path.stem}:
            videos_by_name.setdefault(name, []).append(video)
    matches = Matches()
    ambiguous: set[str] = set()
    matches.extra = list(predicted)
    for shorten in (str, _without_suffix, _stem):
        claims: dict[str, list[str]] = {}  # ids by the only video that they match
        unmatched = []
        for name in matches.extra:
            short = shorten(name)
            candidates = (
                [short] if short in known else [aliases[short]] if aliases.get(short) in known else []
            )
            if not candidates and shorten is _stem:
                candidates = videos_by_name.get(short, [])
            if len(candidates) == 1 and candidates[0] not in matches.videos:
                claims.setdefault(candidates[0], []).append(name)
            else:
                unmatched.append(name)
                if len(candidates) > 1:
                    ambiguous.add(name)
        for video, names in claims.items():
            if len(names) == 1:
                matches.videos[video] = names[0]
            else:
                unmatched += names
                ambiguous.update(names)
        matches.extra = unmatched
    matches.ambiguous = [name for name in matches.extra if name in ambiguous]
    return matches


def _without_suffix(name: str) -> str:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.with_suffix("").as_posix() if path.name else name


def _stem(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).stem


def is_activitynet(videos: Iterable[str]) -> bool:
    """Return whether ids have the form of ActivityNet: ``v_`` and the 11 characters of a YouTube id."""
    return any(_ACTIVITYNET_ID.fullmatch(video) for video in videos)


def activitynet_id(name: str) -> str:
    """Return the id with ``v_`` before it."""
    return f"v_{name}" if len(name) == 11 else name
