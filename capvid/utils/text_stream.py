"""Text and JSON read piece by piece, so that a file may be larger than memory."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from capvid.errors import DataError
from capvid.utils.files import open_regular
from capvid.utils.limits import limits

_BLOCK = 1 << 20
_LOOK = 1 << 24  # characters at most that are looked at before they are taken
_LONGEST_VALUE = 1 << 27  # characters of one JSON value, or of one line of a table
_TOKEN = 16  # characters; what is wrong farther from the end is not cut off
_OPEN_STRING = "Unterminated string"
_GZIP = b"\x1f\x8b"
_SPACE = re.compile(r"[ \t\n\r]*")
_OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_CUT_OFF = "it may have been cut off: make or get the file again"


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading, unpacked if it is gzip.

    Raises:
        DataError: it cannot be read or unpacked; also when that shows in the block.
    """
    try:
        with cast(BufferedReader, open_regular(path)) as raw:
            if raw.peek(2).startswith(_GZIP):
                with gzip.open(raw) as unpacked, BufferedReader(unpacked) as buffered:
                    yield cast(BufferedReader, buffered)
            else:
                yield raw
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{path}: not readable ({why})", remedy="give a whole, readable file") from error


def looks_like_json(stream: BufferedReader) -> bool:
    """Whether an open file begins as a list or object in JSON does."""
    start = stream.peek(_BLOCK).removeprefix(codecs.BOM_UTF8).lstrip()
    return start[:1] in (b"{", b"[")


def text_blocks(path: Path, stream: BinaryIO) -> Iterator[str]:
    """Give the text of an open file block by block, without a byte order mark.

    Raises:
        DataError: it is not UTF-8; the message names the line.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line, first, size = 1, True, 0
    while True:
        block = stream.read(_BLOCK)
        wrong = block.startswith(_OTHER_MARKS) if first else False
        first = False
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line += bytes(error.object).count(b"\n", 0, error.start)
            raise DataError(
                f"{path}, line {1 if wrong else line}: not UTF-8 text"
                + (", but UTF-16 or UTF-32" if wrong else f" ({error.reason})"),
                remedy="save the file as UTF-8",
            ) from error
        size += len(block)
        if size > limits().text_bytes:
            raise DataError(
                f"{path}: larger than the limit of {limits().text_bytes} bytes",
                remedy="see the limits in the configuration",
            )
        yield text
        if not block:
            return
        line += text.count("\n")


class TextLines:
    """The lines of a text file, for the csv module and for loops.

    Attributes:
        number: of the line that was given last, from 1.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._blocks = text_blocks(path, stream)
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        rest: list[str] = []
        for block in self._blocks:
            if len(rest) * _BLOCK > _LONGEST_VALUE:
                raise DataError(
                    f"{self._path}, line {self.number + 1}: longer than {_LONGEST_VALUE} characters",
                    remedy="give a text file",
                )
            *whole, end = block.split("\n")
            for line in whole:
                self.number += 1
                yield "".join((*rest, line, "\n"))
                rest = []
            rest.append(end)
        if any(rest):
            self.number += 1
            yield "".join(rest)


class JsonError(DataError):
    """Text that is not JSON, or only the beginning of it."""


class JsonStream:
    """JSON values from a file, one after the other; what has been taken is forgotten.

    Args:
        path: named in errors.
        stream: the open file.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._blocks = text_blocks(path, stream)
        self._text = ""
        self._at = 0
        self._line, self._counted = 1, 0  # the line at a place in the text held
        self._column = 1  # of the first character of the text held
        self._whole = False  # whether the text held reaches to the end of the file

    @property
    def line(self) -> int:
        """The line of the next value, or of the end."""
        self.peek()
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def peek(self) -> str:
        """Give the next character that is no space without taking it; nothing at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def look(self) -> Any:
        """Give the next value without taking it; None if it is not JSON or too long to be looked at."""
        self.peek()
        try:
            return self._decoded(limit=_LOOK)[0]
        except JsonError:
            return None

    def value(self) -> Any:
        """Take the next value.

        Raises:
            DataError: it is not JSON; the message names line and column.
        """
        self.peek()
        value, self._at = self._decoded()
        return value

    def items(self) -> Iterator[int]:
        """Go through the list that comes next: the line of each item, which is to be taken each time.

        Raises:
            DataError: it is not JSON.
        """
        yield from (line for line, _ in self._children("[", "]"))

    def members(self) -> Iterator[tuple[int, str]]:
        """Go through the object that comes next: line and name of each value, which is to be taken each time.

        Raises:
            DataError: it is not JSON.
        """
        yield from self._children("{", "}")

    def skip(self) -> None:
        """Take the next value, which may be long, piece by piece."""
        opening = self.peek()
        if opening not in ("{", "["):
            self.value()
            return
        for _ in self._children(opening, "}" if opening == "{" else "]"):
            self.value()

    def end(self) -> None:
        """See that nothing comes any more.

        Raises:
            DataError: something does.
        """
        if self.peek():
            raise self._error(self._at, "more after the end of the document")

    def _children(self, opening: str, closing: str) -> Iterator[tuple[int, str]]:
        self._expect(opening)
        if self.peek() == closing:
            self._at += 1
            return
        while True:
            name = ""
            if opening == "{":
                if self.peek() != '"':
                    raise self._error(self._at, "a name in double quotes was expected")
                name = self.value()
                self._expect(":")
            yield self.line, name
            if self.peek() == closing:
                self._at += 1
                return
            self._expect(",")

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._error(self._at, f"{character!r} was expected")
        self._at += 1

    def _decoded(self, limit: float = float("inf")) -> tuple[Any, int]:
        """The value that begins here, and where it ends."""
        size = _BLOCK
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._whole or self._text[end - 1] in '}]"':
                    return value, end
            except json.JSONDecodeError as error:
                cut = error.pos > len(self._text) - _TOKEN or error.msg.startswith(_OPEN_STRING)
                if self._whole or not cut or len(self._text) - self._at > limit:
                    raise self._error(error.pos, error.msg) from None
            except (ValueError, RecursionError) as error:
                raise self._error(self._at, str(error)) from None
            if len(self._text) - self._at > _LONGEST_VALUE:
                raise self._error(self._at, f"a value of more than {_LONGEST_VALUE} characters")
            # each try reads as much again as the one before, so that long values take linear time
            start = len(self._text)
            while len(self._text) - start < size and self._more():
                pass
            size *= 2

    def _more(self) -> bool:
        """Read on, forgetting what has been taken; whether there was more."""
        if self._whole:
            return False
        block = next(self._blocks, None)
        if block is None:
            self._whole = True
            return False
        start = self._text.rfind("\n", 0, self._at)
        self._column = self._at - start if start >= 0 else self._column + self._at
        self._line += self._text.count("\n", self._counted, self._at)
        self._text = self._text[self._at :] + block
        self._at = self._counted = 0
        return True

    def _error(self, position: int, why: str) -> DataError:
        line = self._line + self._text.count("\n", self._counted, position)
        start = self._text.rfind("\n", 0, position)
        column = position - start if start >= 0 else self._column + position
        place = f"{self.path}, line {line}, column {column}"
        if self._whole and (position >= len(self._text.rstrip()) or why.startswith(_OPEN_STRING)):
            return JsonError(f"{place}: the JSON ends too early ({why})", remedy=_CUT_OFF)
        return JsonError(f"{place}: not JSON ({why})", remedy="mend it there, or write the file again")


_DECODER = json.JSONDecoder()
