"""Standard streams, and text in columns."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar

from capvid.errors import shorten
from capvid.utils.escaping import terminal

debugging = ContextVar("debugging", default=False)  # whether tracebacks are wanted

_GAP = 2
_MIN_TEXT_WIDTH = 24  # of a column of running text


def prepare_streams() -> None:
    """Open closed streams and set encodings such that any text can be written.

    Paths that are not valid text are written with backslashes. Output that does not go to a terminal is
    UTF-8, as files are, unless ``PYTHONIOENCODING`` says otherwise.
    """
    with suppress(OSError):
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if getattr(sys, name) is not None:
                continue
            try:
                os.fstat(number)
            except OSError:  # no file may get this number; writing to stdout stays an error
                null = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
                if null == number:
                    os.set_inheritable(null, True)  # nor may it be closed in processes that we start
                else:
                    os.dup2(null, number)
                    os.close(null)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            data = stream is sys.stdout and not stream.isatty() and "PYTHONIOENCODING" not in os.environ
            encoding = "utf-8" if data else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def silence_streams() -> None:
    """Redirect broken streams to the null device, so that the interpreter's last flush does not raise."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        if stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


def print_line(text: str | os.PathLike[str] = "", *, err: bool = False) -> None:
    """Print one line on stdout or stderr, with control characters escaped."""
    text = shorten(os.fspath(text)) if err else text  # a foreign value in it may have megabytes
    print(terminal(text), file=sys.stderr if err else sys.stdout, flush=True)


def terminal_width() -> int | None:
    """Return the width in columns of the terminal on stdout; None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def column_lines(head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None) -> list[str]:
    """Format rows as a table below a line of headings.

    The last column is wrapped to the width. If that leaves too little room for it, each row becomes a
    paragraph instead: its first cell on a line, the other cells below, each after its heading.

    Args:
        head: heading of each column.
        rows: one cell per column each.
        width: columns of the terminal; None puts each row on one line, however long it is.
    """
    table = [[terminal(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    start = sum(widths[:-1]) + _GAP * (len(widths) - 1)  # of the last column
    room = widths[-1] if width is None else min(width - start, widths[-1])
    lines = []
    if width is not None and room < min(_MIN_TEXT_WIDTH, widths[-1]):
        indent = "" if width < 2 * _MIN_TEXT_WIDTH else "  "
        for row in table[1:]:
            lines.append(row[0])
            for name, cell in zip(head[1:], row[1:], strict=True):
                lines += [f"  {part}" for part in wrap(f"{name}: {cell}", width - 2, indent=indent)]
        return lines
    for row in table:
        left = "".join(f"{cell:<{size + _GAP}}" for cell, size in zip(row[:-1], widths[:-1], strict=True))
        for part in wrap(row[-1], room):
            lines.append((left + part).rstrip())
            left = " " * start
    return lines


def wrap(text: str, width: int, *, indent: str = "") -> list[str]:
    """Return lines of text of at most ``width`` columns; longer words are not broken."""
    lines = textwrap.wrap(
        text, max(width, 8), break_long_words=False, break_on_hyphens=False, subsequent_indent=indent
    )
    return lines or [""]
