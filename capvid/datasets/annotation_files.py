"""Annotation files: text and JSON with line numbers, unusable rows, and shapes that datasets share."""

from __future__ import annotations

import gzip
import json
import math
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from capvid.datasets.dataset import CaptionedVideo, Segment
from capvid.errors import DataError
from capvid.utils.files import read_regular
from capvid.utils.validation import check_nesting, limits


def whole_text(text: str) -> str:
    """Give a text back.

    Raises:
        RowError: it holds half a character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"half a character in {reprlib.repr(text)}", "mend its \\u escapes") from None
    return text


LONGEST_CAPTION = 1000  # words, many times the longest of the published ones
_LONGEST_TEXT = 20_000  # characters
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Location:
    """Where a row stands: its file, the line on which it begins, and its name there if it has one."""

    path: Path
    line: int
    record: str = ""

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}" + (f", {self.record}" if self.record else "")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, why, and what to do about it."""

    location: Location
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return " ".join(f"{self.location}: {self.reason}".split())


class RowError(Exception):
    """Says inside :meth:`Rows.at` why the row cannot be used."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Rows:
    """What becomes of rows that cannot be used.

    Args:
        skip_bad: whether they are left out and counted; otherwise the first one is an error.

    Attributes:
        bad: the rows left out so far.
        notes: what else is worth knowing about the files, a line each.
    """

    def __init__(self, *, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.bad: list[BadRow] = []
        self.notes: list[str] = []

    @contextmanager
    def at(self, location: Location) -> Iterator[None]:
        """Read one row in the block.

        Raises:
            DataError: the block raises RowError and bad rows are not skipped.
        """
        try:
            yield
        except RowError as error:
            self.bad.append(BadRow(location, error.reason, error.remedy))
            if not self.skip_bad:
                raise DataError(f"{location}: {error.reason}", remedy=error.remedy) from None


def find_file(folder: Path, *names: str) -> Path | None:
    """Find the first of ``names`` in a folder or one folder down, plain or with ``.gz`` behind the name.

    Raises:
        DataError: there is no such folder, or several of the folders in it hold the file.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder", remedy="give the folder of the annotation files")
    for name in names:
        for form in (name, f"{name}.gz"):
            if (folder / form).is_file():
                return folder / form
            below = sorted(path for path in folder.glob(f"*/{form}") if path.is_file())
            if len(below) > 1:
                raise DataError(
                    f"{folder}: {form} is in {below[0].parent.name} and in {below[1].parent.name}",
                    remedy="give the folder of one of them",
                )
            if below:
                return below[0]
    return None


def find_splits(folder: Path, names: Sequence[tuple[str, str]], rows: Rows) -> list[tuple[str, Path]]:
    """Find the file of every split, given as pairs of split and name; a missing one is noted.

    Raises:
        DataError: there is none of the files.
    """
    files = []
    for split, name in names:
        path = find_file(folder, name)
        if path is None:
            rows.notes.append(f"{folder}: no {name}, so no {split} split from there")
        else:
            files.append((split, path))
    if not files:
        listed = " or ".join(name for _, name in names)
        raise DataError(
            f"{folder}: no {listed}, here or one folder down", remedy="give the folder they are in"
        )
    return files


def read_bytes(path: Path) -> bytes:
    """Read a file, unpacked if it is gzip, without a byte order mark.

    Raises:
        DataError: there is no such file, or it cannot be read or unpacked.
    """
    try:
        data = read_regular(path, max_bytes=limits().text_bytes)
        if data.startswith(_GZIP):
            data = _unpacked(data)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{path}: not readable ({why})", remedy="give a whole, readable file") from error
    return data.removeprefix(_BYTE_ORDER_MARK)


def _unpacked(data: bytes) -> bytes:
    """Unpack gzip data.

    Raises:
        OSError, EOFError, zlib.error: they are damaged, or unpack to more than the limit.
    """
    max_bytes = limits().text_bytes
    unpacked = bytearray()
    with gzip.open(BytesIO(data)) as file:
        while block := file.read(1 << 20):
            unpacked += block
            if len(unpacked) > max_bytes:
                raise OSError(f"unpacks to more than the limit of {max_bytes} bytes")
    return bytes(unpacked)


def read_text(path: Path) -> str:
    """Read a file as UTF-8.

    Raises:
        DataError: it cannot be read; the message names the line of the first byte that is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 text ({error.reason})", remedy="save the file as UTF-8"
        ) from error


def read_lines(path: Path, rows: Rows) -> Iterator[tuple[Location, str]]:
    """Give the lines of a file that are not blank; one that is not UTF-8 is a bad row.

    Raises:
        DataError: the file cannot be read, or a line and bad rows are not skipped.
    """
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        location = Location(path, number)
        with rows.at(location):
            try:
                text = line.decode("utf-8").rstrip("\r")
            except UnicodeDecodeError as error:
                raise RowError(f"not UTF-8 text ({error.reason})", "save the file as UTF-8") from error
            if text.strip():
                yield location, text


class TextLines:
    """Lines of a text; ``number`` is that of the line yielded last, from 1."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for self.number, line in enumerate(self._text.split("\n"), 1):  # noqa: B020
            yield line + "\n"


class JsonReader:
    """The JSON values of a text, one after the other, with their lines.

    Args:
        path: file named in errors.
        text: its text, read unless given.
    """

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self._text = read_text(path) if text is None else text
        self._position = 0
        self._max_depth = limits().nesting
        self._line, self._counted = 1, 0  # line number of the position up to which lines were counted

    @property
    def line(self) -> int:
        """Line of the next value, or of the end."""
        self.peek()
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def peek(self) -> str:
        """Return the next character that is no space without consuming it; nothing at the end."""
        match = _SPACE.match(self._text, self._position)
        assert match is not None
        self._position = match.end()
        return self._text[self._position : self._position + 1]

    def peek_value(self) -> Any:
        """Return the next value without consuming it; None if it is not JSON."""
        self.peek()
        start = self._position
        try:
            return self.value()
        except DataError:
            return None
        finally:
            self._position = start

    def value(self) -> Any:
        """Consume the next value.

        Raises:
            DataError: it is not JSON; the message names line and column.
        """
        self.peek()
        try:
            value, end = _DECODER.raw_decode(self._text, self._position)
            check_nesting(value, self._max_depth)
        except json.JSONDecodeError as error:
            raise self._error(error.pos, error.msg) from None
        except (ValueError, RecursionError) as error:
            raise self._error(self._position, str(error)) from None
        self._position = end
        return value

    def items(self) -> Iterator[int]:
        """Yield the line of each item of the list that comes next; consume each with :meth:`value`."""
        return (line for line, _ in self._children("[", "]"))

    def members(self) -> Iterator[tuple[int, str]]:
        """Yield line and name of each member of the object that comes next; consume each as in a list."""
        return self._children("{", "}")

    def end(self) -> None:
        """Raise DataError unless the text ends here."""
        if self.peek():
            raise self._error(self._position, "more after the end of the document")

    def _children(self, opening: str, closing: str) -> Iterator[tuple[int, str]]:
        self._expect(opening)
        if self.peek() == closing:
            self._position += 1
            return
        while True:
            name = ""
            if opening == "{":
                if self.peek() != '"':
                    raise self._error(self._position, "a name in double quotes was expected")
                name = self.value()
                self._expect(":")
            yield self.line, name
            if self.peek() == closing:
                self._position += 1
                return
            self._expect(",")

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._error(self._position, f"{character!r} was expected")
        self._position += 1

    def _error(self, position: int, reason: str) -> DataError:
        line = self._text.count("\n", 0, position) + 1
        column = position - self._text.rfind("\n", 0, position)
        where = f"{self.path}, line {line}, column {column}"
        if position >= len(self._text.rstrip()) or reason.startswith("Unterminated string"):
            return DataError(
                f"{where}: not JSON: it ends too early ({reason})",
                remedy="it may have been cut off: make or get the file again",
            )
        return DataError(f"{where}: not JSON ({reason})", remedy="correct it there, or write the file again")


_DECODER = json.JSONDecoder()


class JsonFile:
    """A JSON file whose records know their lines.

    Raises:
        DataError: the file is not JSON; the message names line and column.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = read_text(path)
        reader = JsonReader(path, self._text)
        reader.value()
        reader.end()

    def items(self, name: str) -> Iterator[tuple[Location, Any]]:
        """Yield the records of the list called ``name``.

        Raises:
            DataError: there is no such list.
        """
        reader = self._at("[", name)
        for count, line in enumerate(reader.items(), 1):
            yield Location(self.path, line, f"record {count} of {name}"), reader.value()

    def members(self, *steps: str) -> Iterator[tuple[Location, str, Any]]:
        """Yield the records of the object at the end of ``steps`` with their names; one may come twice.

        Raises:
            DataError: there is no such object.
        """
        reader = self._at("{", *steps)
        for line, name in reader.members():
            yield Location(self.path, line, f"record {reprlib.repr(name)}"), name, reader.value()

    def _at(self, opening: str, *steps: str) -> JsonReader:
        """Return a reader at the start of the list or object at the end of ``steps``."""
        reader = JsonReader(self.path, self._text)
        complete = True
        for step in steps:
            complete = reader.peek() == "{"
            for _, name in reader.members() if complete else ():
                if complete := name == step:
                    break
                reader.value()
        if not complete or reader.peek() != opening:
            what = "list" if opening == "[" else "object"
            raise DataError(
                f"{self.path}: no {what} {'.'.join(steps) or 'of records'}",
                remedy="give the file as it was published",
            )
        return reader


def member(row: Any, key: str, kind: type | tuple[type, ...], what: str) -> Any:
    """Give ``row[key]`` if the row is an object and that is a ``kind`` and not empty.

    Raises:
        RowError: it is not; ``what`` says what was expected.
    """
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or value in ("", [], {}):
        actual = "is missing" if value is None else f"is {reprlib.repr(value)}"
        raise RowError(f"no {what}: {key!r} {actual}", f"give every record {key!r}")
    return value


def check_caption(text: Any) -> str:
    """Give a caption back as it is.

    Raises:
        RowError: it is not a text, has nothing in it, or is too long to be a caption.
    """
    if not isinstance(text, str):
        raise RowError(f"a caption that is not text: {reprlib.repr(text)}", "write captions as strings")
    if not text.strip():
        raise RowError("an empty caption", "write a sentence or remove the row")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(
            f"a caption with half a character: {reprlib.repr(text)}", "mend its \\u escapes"
        ) from None
    count = len(text.split())
    if count > LONGEST_CAPTION or len(text) > _LONGEST_TEXT:
        raise RowError(
            f"a caption of {count} words and {len(text)} characters",
            f"split or remove it; up to {LONGEST_CAPTION} words are taken",
        )
    return text


def number(value: Any) -> float:
    """Give a finite number as a float.

    Raises:
        RowError: it is anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            if math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
    raise RowError(f"{reprlib.repr(value)} is not a time in seconds", "give times as numbers")


@dataclass(frozen=True)
class Lists:
    """How the two lists and their fields are called."""

    videos: str
    id: str
    captions: str
    refers: str


@dataclass
class _Group:
    location: Location
    name: str
    split: str
    captions: list[str] = field(default_factory=list)
    has_captions: bool = False


def read_grouped(
    file: JsonFile, lists: Lists, rows: Rows, name_and_split: Callable[[Any], tuple[str, str]]
) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Put the captions to their videos; a video without any is a bad row.

    Raises:
        DataError: the file lacks a list, or has a row that cannot be used and bad rows are not skipped.
    """
    groups: dict[Any, _Group] = {}
    refused: set[Any] = set()
    for location, row in file.items(lists.videos):
        with rows.at(location):
            key = member(row, lists.id, (str, int), "id")
            refused.add(key)
            name, split = name_and_split(row)
            if key in groups:
                raise RowError(f"the id {key} comes twice", "give each video one record")
            groups[key] = _Group(location, name, split)
    for location, row in file.items(lists.captions):
        with rows.at(location):
            key = member(row, lists.refers, (str, int), "id")
            if key not in groups and key in refused:
                continue  # the video's own row says why
            if key not in groups:
                raise RowError(
                    f"no record in {lists.videos} has the id {key}", "add it, or remove the caption"
                )
            groups[key].has_captions = True
            groups[key].captions.append(check_caption(row.get("caption")))
    for group in groups.values():
        with rows.at(group.location):
            if not group.has_captions:
                raise RowError(f"{group.name} has no captions", "add some, or remove the record")
            if group.captions:
                yield group.location, CaptionedVideo(group.name, group.split, tuple(group.captions))


FRAME = 0.5  # seconds between the frames of the MART paper's features


def read_timed(path: Path, split: str, rows: Rows) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read a JSON object of videos by their ids, each with ``timestamps`` and ``sentences``.

    Raises:
        DataError: the file is not of that form, or a row is not and bad rows are not skipped.
    """
    mended: list[str] = []
    for location, name, row in JsonFile(path).members():
        with rows.at(location):
            times = member(row, "timestamps", list, "list of times")
            sentences = member(row, "sentences", list, "list of sentences")
            yield location, timed_video(name, split, times, sentences, mended)
    note_mended(path, mended, rows)


def timed_video(
    name: str, split: str, times: Sequence[Any], sentences: Sequence[Any], mended: list[str]
) -> CaptionedVideo:
    """Make a video of its segments and the sentence about each, in the order in which they were annotated.

    That order, and not that of time, is the one of the published reference paragraphs. A segment that ends
    before it begins is turned round; an empty one begins one frame earlier. Their videos go to ``mended``.

    Raises:
        RowError: a time or sentence is not one, or there are not as many of them.
    """
    if not name.strip():
        raise RowError("no id", "give each video one")
    if len(times) != len(sentences):
        raise RowError(
            f"{len(times)} segments and {len(sentences)} sentences", "give a sentence for every segment"
        )
    segments = []
    for pair in times:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"a segment that is not [start, end]: {reprlib.repr(pair)}", "give both times")
        start, end = sorted(map(number, pair))
        if start < 0 or end <= 0:
            raise RowError(f"a segment from {start:g} to {end:g} seconds", "give times from 0 on")
        if number(pair[0]) >= number(pair[1]):
            mended.append(name)
        segments.append(Segment(start if start < end else max(0.0, start - FRAME), end, "seconds"))
    return CaptionedVideo(name, split, (), tuple(segments), (tuple(map(check_caption, sentences)),))


def note_mended(path: Path, mended: Sequence[str], rows: Rows) -> None:
    """Note in how many segments, and in which videos, the end did not come after the start."""
    if mended:
        names = ", ".join(mended[:5]) + (", ..." if len(mended) > 5 else "")
        rows.notes.append(
            f"{path}: {len(mended)} segments that do not end after they begin, mended ({names})"
        )
