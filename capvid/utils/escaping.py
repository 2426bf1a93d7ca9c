"""Escaping of text that leaves the program, one function per destination.

File names, vocabularies and messages of other libraries may hold line breaks, terminal control sequences,
bidirectional overrides and lone surrogates. None of it may damage an output format or control a terminal.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

_LINE_BREAKS_AND_BIDI = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_UNPRINTABLE = re.compile(f"[\x00-\x1f\x7f-\x9f{_LINE_BREAKS_AND_BIDI}]")
_UNPRINTABLE_IN_JSON = re.compile(f"[\x7f-\x9f{_LINE_BREAKS_AND_BIDI}]")  # json.dumps escapes the others
_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # all but those that stand for bytes of a file name
_NAMED_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")  # the last four are the full-width signs
_GUARDED_FORMULA = re.compile(rf"'(?={_FORMULA.pattern})")
_SRT_MARKUP = str.maketrans("<>{}", "\u2039\u203a()")


def utf8_text(text: str | os.PathLike[str]) -> str:
    r"""Return a path or text without lone surrogates, so that it can be encoded as UTF-8.

    Bytes of a file name that are not UTF-8 become ``\xff``, other surrogates ``\ud800``; distinct names stay
    distinct.
    """
    escaped = _SURROGATES.sub(lambda match: f"\\u{ord(match[0]):04x}", os.fspath(text))
    return escaped.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def terminal(text: str | os.PathLike[str]) -> str:
    r"""Escape a single line for a terminal or text file: ``\n``, ``\x1b``, ``\u202e``."""

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        return _NAMED_ESCAPES.get(match[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")

    return _UNPRINTABLE.sub(escape, utf8_text(text))


def table_cell(text: str | os.PathLike[str]) -> str:
    """Escape a text cell for CSV or TSV: no line breaks or tabs, and nothing a spreadsheet would evaluate.

    A cell that would begin a formula gets an apostrophe in front. Numbers need no escaping.
    """
    cell = terminal(text)
    return f"'{cell}" if _FORMULA.match(cell) else cell


def unguarded_cell(cell: str) -> str:
    """Remove the apostrophe that :func:`table_cell` puts before a formula sign."""
    return _GUARDED_FORMULA.sub("", cell, count=1)


def srt_text(text: str) -> str:
    """Escape the text of a SubRip cue.

    SubRip has no escapes, so the characters of its tags and of ``-->`` are replaced by similar ones.
    """
    return terminal(text).translate(_SRT_MARKUP)


def vtt_text(text: str) -> str:
    """Escape the text of a WebVTT cue."""
    return terminal(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def json_value(value: Any) -> Any:
    """Return a JSON value whose strings are valid UTF-8 and whose NaN and infinite numbers are null."""
    if isinstance(value, str):
        return utf8_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {
            utf8_text(key) if isinstance(key, str) else key: json_value(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Write a value as JSON: always valid UTF-8, never NaN, and without indent always one line."""
    try:
        text = json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False)
        text.encode("utf-8")
    except ValueError:  # NaN, or a lone surrogate
        text = json.dumps(json_value(value), ensure_ascii=False, indent=indent, allow_nan=False)
    return _UNPRINTABLE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
