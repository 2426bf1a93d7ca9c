"""Parsing and validation of JSON, TOML and dataclass fields from untrusted sources."""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any

from capvid.errors import UsageError
from capvid.utils.limits import limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: not JSON, or nested more deeply than :attr:`~capvid.utils.limits.Limits.nesting`.
    """
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: not TOML, or nested more deeply than :attr:`~capvid.utils.limits.Limits.nesting`.
    """
    values: dict[str, Any] = _parse(tomllib.loads, text)
    return values


def _parse(loads: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        document = loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_nesting(document)
    return document


def check_nesting(document: Any) -> None:
    """Raise ValueError if a parsed document is nested too deeply, without recursing into it."""
    level, depth, max_depth = [document], 0, limits().nesting
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        if depth > max(1, max_depth):
            raise ValueError("nested too deeply")
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]


LARGEST = 1_000_000  # of integers without other bounds

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "tuple[str, ...]": "a list of strings",
}


def bounded(default: Any = MISSING, *, least: float = 1, most: float = LARGEST) -> Any:
    """Declare a numeric field that takes values from ``least`` to ``most``."""
    return field(default=default, metadata={"least": least, "most": most})


def choice(default: str, *others: str) -> Any:
    """Declare a field that takes one of a few words."""
    return field(default=default, metadata={"choices": (default, *others)})


def checked_fields(
    cls: type, values: Mapping[str, Any], *, prefix: str = "", what: str = "option"
) -> dict[str, Any]:
    """Return ``values`` as the fields of the dataclass ``cls`` take them.

    Args:
        cls: dataclass of numbers, words, switches and lists of words, each of which may be optional.
        values: values by field name.
        prefix: text before a name in messages, such as ``training.``.
        what: what messages call a field.

    Raises:
        UsageError: a name is unknown, or a value has the wrong type or is out of range.
    """
    known = {option.name: option for option in fields(cls)}
    for name in values:
        if name not in known:
            raise UsageError(
                f"{prefix}{name}: no such {what}", remedy=f"known are {', '.join(sorted(known))}"
            )
    return {name: _checked(known[name], value, f"{prefix}{name}") for name, value in values.items()}


def short(value: Any) -> str:
    """Return a value for a message, abbreviated, with the names that JSON and TOML have for constants."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 10**30:
        return "an integer of more than 30 digits"
    return ascii(value) if isinstance(value, int | float) else reprlib.repr(value)


def _checked(option: Field[Any], value: Any, name: str) -> Any:
    kind = getattr(option.type, "__name__", str(option.type))  # a class without postponed annotations
    if value is None and kind.endswith(" | None"):
        return None
    kind = kind.removesuffix(" | None")
    if kind == "float" and type(value) is int and abs(value) < 2**1000:
        value = float(value)
    if kind == "tuple[str, ...]" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = tuple(value)
    choices = option.metadata.get("choices")
    if choices:
        expected, fits = f"one of {', '.join(choices)}", isinstance(value, str) and value in choices
    elif kind in ("int", "float"):
        # 1 (0 for numbers that default to it, or are not integers) to LARGEST, unless declared
        least = option.metadata.get("least", 0 if kind == "float" or option.default == 0 else 1)
        most = option.metadata.get("most", math.inf if kind == "float" else LARGEST)
        bounds = [str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (least, most)]
        expected = f"{_KINDS[kind]} of at least {least:g}"
        if most < math.inf:
            expected = f"{_KINDS[kind]} between {bounds[0]} and {bounds[1]}"
        fits = type(value).__name__ == kind and least <= value <= most and value < math.inf
    else:
        expected, fits = _KINDS[kind], type(value).__name__ == kind.partition("[")[0]
    if not fits:
        raise UsageError(f"{name} must be {expected}, got {short(value)}")
    return value
