"""Readers of annotation files: text and JSON with line numbers, bad rows, and layouts that datasets share."""

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


def check_unicode(text: str) -> str:
    """Return ``text`` unchanged.

    Raises:
        RowError: it has a lone surrogate, which cannot be encoded.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"half a character in {reprlib.repr(text)}", "mend its \\u escapes") from None
    return text


LONGEST_CAPTION = 1000  # words; far beyond the longest published caption
_LONGEST_TEXT = 20_000  # characters
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Location:
    """Position of a row: its file, first line and, if it has one, name."""

    path: Path
    line: int
    record: str = ""

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}" + (f", {self.record}" if self.record else "")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, with the reason and a remedy."""

    location: Location
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return " ".join(f"{self.location}: {self.reason}".split())


class RowError(Exception):
    """Raised inside :meth:`Rows.at` for a row that cannot be used."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Rows:
    """Collector of bad rows and of notes about the files.

    Args:
        skip_bad: whether to skip bad rows; otherwise the first one raises an error.

    Attributes:
        bad: bad rows so far.
        notes: further remarks about the files, one line each.
    """

    def __init__(self, *, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.bad: list[BadRow] = []
        self.notes: list[str] = []

    @contextmanager
    def at(self, location: Location) -> Iterator[None]:
        """Record a RowError of the block as a bad row.

        Raises:
            DataError: a bad row, unless they are skipped.
        """
        try:
            yield
        except RowError as error:
            self.bad.append(BadRow(location, error.reason, error.remedy))
            if not self.skip_bad:
                raise DataError(f"{location}: {error.reason}", remedy=error.remedy) from None


def find_file(folder: Path, *names: str) -> Path | None:
    """Return the first of ``names`` in a folder or its subfolders, plain or with ``.gz`` appended.

    Raises:
        DataError: no such folder, or several subfolders hold the file.
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
    """Return the file of every split that exists, from pairs of split and name; note missing files.

    Raises:
        DataError: none of the files exists.
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
    """Read a file, decompressed if it is gzip, without a byte order mark.

    Raises:
        DataError: the file is missing, unreadable or damaged.
    """
    try:
        data = read_regular(path, max_bytes=limits().text_bytes)
        if data.startswith(_GZIP):
            data = _decompress(data)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{path}: not readable ({why})", remedy="give a whole, readable file") from error
    return data.removeprefix(_BYTE_ORDER_MARK)


def _decompress(data: bytes) -> bytes:
    """Decompress gzip data.

    Raises:
        OSError, EOFError, zlib.error: the data are damaged, or exceed the limit.
    """
    max_bytes = limits().text_bytes
    text = bytearray()
    with gzip.open(BytesIO(data)) as file:
        while block := file.read(1 << 20):
            text += block
            if len(text) > max_bytes:
                raise OSError(f"unpacks to more than the limit of {max_bytes} bytes")
    return bytes(text)


def read_text(path: Path) -> str:
    """Read a file as UTF-8.

    Raises:
        DataError: the file is unreadable or not UTF-8; the message names the line.
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
    """Yield the lines of a file that are not blank; a line that is not UTF-8 is a bad row.

    Raises:
        DataError: the file is unreadable, or has a bad row and these are not skipped.
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
    """Lines of a text; ``number`` counts the lines yielded so far."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for self.number, line in enumerate(self._text.split("\n"), 1):  # noqa: B020
            yield line + "\n"


class JsonReader:
    """Pull parser that knows the line of each JSON value of a text.

    Args:
        path: path of the file, for errors.
        text: its content; None reads the file.
    """

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self._text = read_text(path) if text is None else text
        self._position = 0
        self._max_depth = limits().nesting
        self._line, self._counted_to = 1, 0  # line number of the position up to which lines were counted

    @property
    def line(self) -> int:
        """Line of the next value, or of the end of the text."""
        self.peek()
        self._line += self._text.count("\n", self._counted_to, self._position)
        self._counted_to = self._position
        return self._line

    def peek(self) -> str:
        """Return the next character after spaces without consuming it; an empty string at the end."""
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
        """Consume and return the next value.

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
        """Yield the line of each item of the next list; the caller consumes each with :meth:`value`."""
        return (line for line, _ in self._children("[", "]"))

    def members(self) -> Iterator[tuple[int, str]]:
        """Yield line and name of each member of the next object; the caller consumes the values."""
        return self._children("{", "}")

    def end(self) -> None:
        """Raise DataError unless the text ends here."""
        if self.peek():
            raise self._error(self._position, "data after the end of the document")

    def _children(self, opening: str, closing: str) -> Iterator[tuple[int, str]]:
        self._expect(opening)
        if self.peek() == closing:
            self._position += 1
            return
        while True:
            name = ""
            if opening == "{":
                if self.peek() != '"':
                    raise self._error(self._position, "expected a name in double quotes")
                name = self.value()
                self._expect(":")
            yield self.line, name
            if self.peek() == closing:
                self._position += 1
                return
            self._expect(",")

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._error(self._position, f"expected {character!r}")
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
    """A JSON file that yields its records with their lines.

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
        """Yield the records of the list ``name``.

        Raises:
            DataError: the file has no such list.
        """
        reader = self._at("[", name)
        for count, line in enumerate(reader.items(), 1):
            yield Location(self.path, line, f"record {count} of {name}"), reader.value()

    def members(self, *steps: str) -> Iterator[tuple[Location, str, Any]]:
        """Yield the members of the object at the key path ``steps``, repeated names included.

        Raises:
            DataError: the file has no such object.
        """
        reader = self._at("{", *steps)
        for line, name in reader.members():
            yield Location(self.path, line, f"record {reprlib.repr(name)}"), name, reader.value()

    def _at(self, opening: str, *steps: str) -> JsonReader:
        """Return a reader at the start of the list or object at the key path ``steps``."""
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
    """Return ``row[key]``, a non-empty value of the type ``kind``.

    Raises:
        RowError: the row is no object, or has no such value; ``what`` names it in the message.
    """
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or value in ("", [], {}):
        actual = "is missing" if value is None else f"is {reprlib.repr(value)}"
        raise RowError(f"no {what}: {key!r} {actual}", f"give every record {key!r}")
    return value


def check_caption(text: Any) -> str:
    """Return a caption unchanged.

    Raises:
        RowError: it is not text, empty, or too long.
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
    """Return a time in seconds as a float.

    Raises:
        RowError: ``value`` is not a finite number.
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
    """Names of the list of videos and its ids, and of the list of captions and its references to them."""

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
    """Yield videos with the captions that refer to them; a video without any is a bad row.

    Raises:
        DataError: a list is missing, or there is a bad row and these are not skipped.
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
                continue  # the video itself is a bad row already
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
    """Read a JSON object of videos by id, each with ``timestamps`` and ``sentences``.

    Raises:
        DataError: the file has another layout, or a bad row and these are not skipped.
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
    """Return a video with its segments and their sentences, in the order of annotation.

    The published reference paragraphs have this order, not that of time. The times of a segment that ends
    before it begins are swapped; an empty one begins one frame earlier. Their videos are added to ``mended``.

    Raises:
        RowError: an invalid time or sentence, or their numbers differ.
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
    """Note how many segments were mended, and in which videos."""
    if mended:
        names = ", ".join(mended[:5]) + (", ..." if len(mended) > 5 else "")
        rows.notes.append(
            f"{path}: {len(mended)} segments did not end after their start and were mended ({names})"
        )
