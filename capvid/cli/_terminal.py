"""Standard streams and text in columns."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar

from capvid.utils.escaping import terminal


def prepare() -> None:
    """Make the streams such that anything can be written, and that no file takes the place of a closed one.

    A path that is no valid text is written with backslashes. What does not go to a terminal is UTF-8, as
    files are, unless ``PYTHONIOENCODING`` says otherwise.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            data = stream is sys.stdout and not stream.isatty() and "PYTHONIOENCODING" not in os.environ
            encoding = "utf-8" if data else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _open_closed() -> None:
    """Open streams that were closed: stderr takes what nobody reads, writing to stdout stays an error."""
    with suppress(OSError):
        for number, (name, flags) in enumerate(
            [("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)]
        ):
            if getattr(sys, name) is None:
                _fill(number, flags)
                mode = "r" if name == "stdin" else "w"
                setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _fill(number: int, flags: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, flags)
        if null == number:
            os.set_inheritable(null, True)  # nor may it be closed in processes that we start
        else:
            os.dup2(null, number)
            os.close(null)


def print_line(text: str | os.PathLike[str] = "", *, err: bool = False) -> None:
    """Print one line on stdout or stderr, with control characters escaped."""
    print(terminal(text), file=sys.stderr if err else sys.stdout, flush=True)


def stdout_error() -> OSError | None:
    """Say what is wrong with stdout, if what was written cannot get there."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def silence() -> None:
    """Let the interpreter's last flush of a stream that is broken go nowhere instead of raising."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        if stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


_GAP = 2
_NARROWEST = 24  # that a column of running text may become


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def column_lines(head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None) -> list[str]:
    """Set out rows under their heads.

    The last column is wrapped where it has to be. Where that leaves too little room for it, each row becomes
    a paragraph: its first cell on a line, and the others below it, each after its head.

    Args:
        head: of each column.
        rows: as many cells each.
        width: columns of the terminal; None puts each row on one line, however long it is.
    """
    table = [[terminal(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    before = sum(widths[:-1]) + _GAP * (len(widths) - 1)
    room = widths[-1] if width is None else min(width - before, widths[-1])
    if room < min(_NARROWEST, widths[-1]):
        return _paragraphs(head, table[1:], width or 0)
    lines = []
    for row in table:
        start = "".join(f"{cell:<{size + _GAP}}" for cell, size in zip(row[:-1], widths[:-1], strict=True))
        for part in wrapped(row[-1], room):
            lines.append((start + part).rstrip())
            start = " " * before
    return lines


def _paragraphs(head: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> list[str]:
    lines = []
    for row in rows:
        lines.append(row[0])
        for name, cell in zip(head[1:], row[1:], strict=True):
            indent = "  " if width < 2 * _NARROWEST else "    "
            text = f"{name}: {cell}"
            lines += [f"  {part}" for part in wrapped(text, width - 2, indent=indent[2:])]
    return lines


def wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    """Give lines of text of at most ``width``; a word that is too long for one stays whole."""
    lines = textwrap.wrap(
        text, max(width, 8), break_long_words=False, break_on_hyphens=False, subsequent_indent=indent
    )
    return lines or [""]


debugging = ContextVar("debugging", default=False)  # whether tracebacks are wanted
