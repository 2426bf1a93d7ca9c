"""Dataclass fields with bounds, and values from files and options checked against them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any

from capvid.errors import UsageError

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
    names = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return names[value]
    if isinstance(value, int) and abs(value) > 10**30:
        return "an integer of more than 30 digits"
    return ascii(value) if isinstance(value, int | float) else reprlib.repr(value)


def _checked(option: Field[Any], value: Any, name: str) -> Any:
    kind = str(option.type)
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
        least, most = _bounds(option, kind)
        expected = f"{_KINDS[kind]} of at least {least:g}"
        if most < math.inf:
            expected = f"{_KINDS[kind]} between {_plain(least)} and {_plain(most)}"
        fits = type(value).__name__ == kind and least <= value <= most and value < math.inf
    else:
        expected, fits = _KINDS[kind], type(value).__name__ == kind.partition("[")[0]
    if not fits:
        raise UsageError(f"{name} must be {expected}, got {short(value)}")
    return value


def _bounds(option: Field[Any], kind: str) -> tuple[float, float]:
    """Return the bounds of a number: those declared, else 1 (0 where that is the default) to ``LARGEST``."""
    least = 0 if kind == "float" or option.default == 0 else 1
    most = math.inf if kind == "float" else LARGEST
    return option.metadata.get("least", least), option.metadata.get("most", most)


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
