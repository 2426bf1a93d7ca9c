"""Rows of text in columns, for terminals of any width and for pipes; nothing is ever cut off."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from capvid.escaping import terminal

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
