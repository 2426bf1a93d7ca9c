"""Readers of annotation files: text, and JSON with line numbers."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from capvid.datasets.dataset import CaptionedVideo, LocatedVideos, Location, RowError, Rows, check_unicode
from capvid.errors import DataError
from capvid.utils.files import read_regular
from capvid.utils.validation import check_nesting, limits

MAX_CAPTION_WORDS = 1000  # far beyond the longest published caption
_MAX_CAPTION_CHARACTERS = 20_000
_GZIP = b"\x1f\x8b"
_SPACE = re.compile(r"[ \t\n\r]*")


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
                problem = f"{folder}: {form} is in {below[0].parent.name} and in {below[1].parent.name}"
                raise DataError(problem, remedy="give the folder of one of them")
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
        raise DataError(f"{folder}: no {listed}, here or one folder down", remedy="give their folder")
    return files


def read_bytes(path: Path) -> bytes:
    """Read a file as UTF-8 without a byte order mark, decompressed if it is gzip, converted if it is UTF-16.

    Raises:
        DataError: the file is missing, unreadable, damaged, or larger than the limit.
    """
    max_bytes = limits().text_bytes
    try:
        data = read_regular(path, max_bytes=max_bytes)
        if data.startswith(_GZIP):
            unpacked = bytearray()
            with gzip.open(BytesIO(data)) as file:
                while block := file.read(1 << 20):  # one large read would reserve all its memory at once
                    unpacked += block
                    if len(unpacked) > max_bytes:
                        raise OSError(f"unpacks to more than the limit of {max_bytes} bytes")
            data = bytes(unpacked)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{path}: not readable ({why})", remedy="replace it with an intact copy") from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            return data.decode("utf-16").encode("utf-8")
        except UnicodeError as error:
            problem = f"{path}: not UTF-16 text, as which it begins ({error})"
            raise DataError(problem, remedy="save the file as UTF-8") from error
    return data.removeprefix(codecs.BOM_UTF8)


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


class JsonReader:
    """Pull parser that knows the line of each JSON value of a text.

    Args:
        path: path of the file, for errors.
        text: its content.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._text = text
        self._position = 0
        self._max_depth = limits().nesting
        self._line, self._counted_to = 1, 0  # the line number at a position, and that position

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
    """A JSON file that yields its records with their lines; its syntax is checked on opening.

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
            problem = f"{self.path}: no {what} {'.'.join(steps) or 'of records'}"
            raise DataError(problem, remedy="give the file as it was published")
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


def lookup(row: Any, key: str, names: Mapping[str, str], default: str | None = None) -> str:
    """Return the value of ``names`` for the name ``row[key]``, such as a split.

    Raises:
        RowError: the row has another name there.
    """
    name = row.get(key, default) if isinstance(row, dict) else None
    if not isinstance(name, str) or name not in names:
        raise RowError(f"{key} {reprlib.repr(name)} is not one of {', '.join(names)}", "give one of them")
    return names[name]


def first_ids(ids: Sequence[str], count: int = 5) -> str:
    """Return the first ids and the number of others, for a message."""
    more = f" and {len(ids) - count} more" if len(ids) > count else ""
    return ", ".join(ids[:count]) + more


def check_caption(text: Any) -> str:
    """Return a caption unchanged; raise RowError if it is not text, empty, or too long."""
    if not isinstance(text, str):
        raise RowError(f"a caption that is not text: {reprlib.repr(text)}", "write captions as strings")
    if not text.strip():
        raise RowError("an empty caption", "write a sentence or remove the row")
    count = len(text.split())
    if count > MAX_CAPTION_WORDS or len(text) > _MAX_CAPTION_CHARACTERS:
        raise RowError(
            f"a caption of {count} words and {len(text)} characters",
            f"split or remove it; the limit is {MAX_CAPTION_WORDS} words",
        )
    return check_unicode(text)


def read_grouped(
    path: Path,
    rows: Rows,
    name_and_split: Callable[[Any], tuple[str, str]],
    *,
    videos: str,
    id_key: str,
    captions: str,
    reference_key: str,
) -> LocatedVideos:
    """Yield the videos of a JSON file with a list of videos and a list of captions that refer to them.

    Args:
        path: path of the file.
        rows: collector of bad rows; a video without captions is one.
        name_and_split: function from a record of the list of videos to the name and split of the video.
        videos: name of the list of videos.
        id_key: key of the id in their records.
        captions: name of the list of captions.
        reference_key: key of the id of the video in their records.

    Raises:
        DataError: a list is missing, or there is a bad row and these are not skipped.
    """
    file = JsonFile(path)
    videos_by_id: dict[Any, tuple[Location, str, str]] = {}
    captions_by_id: dict[Any, list[str]] = {}
    listed = set()  # ids of all videos, bad rows included
    for location, row in file.items(videos):
        with rows.at(location):
            key = member(row, id_key, (str, int), "id")
            listed.add(key)
            name, split = name_and_split(row)
            if key in videos_by_id:
                raise RowError(f"the id {key} occurs twice", "give each video one record")
            videos_by_id[key] = (location, name, split)
    for location, row in file.items(captions):
        with rows.at(location):
            key = member(row, reference_key, (str, int), "id")
            if key not in listed:
                raise RowError(f"no record in {videos} has the id {key}", "add it, or remove the caption")
            if key in videos_by_id:  # otherwise the video itself is a bad row already
                # The list is created before the caption is checked: a video with only bad captions has some.
                captions_by_id.setdefault(key, []).append(check_caption(row.get("caption")))
    for key, (location, name, split) in videos_by_id.items():
        with rows.at(location):
            if key not in captions_by_id:
                raise RowError(f"{name} has no captions", "add some, or remove the record")
            if captions_by_id[key]:
                yield location, CaptionedVideo(name, split, tuple(captions_by_id[key]))
