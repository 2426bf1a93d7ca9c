"""Checks of untrusted input: limits on sizes, parsing of JSON and TOML, fields of dataclasses.

Files and servers are not trusted about sizes: whatever a header announces is compared with the limits before
memory is allocated. Each limit can be changed in the environment (``CAPVID_LIMIT_FRAME_PIXELS=1e9``) or in
the ``[limits]`` table of the configuration file (``frame-pixels = 1e9``). Worker processes inherit it.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from capvid.errors import UsageError
from capvid.utils.registry import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PREFIX = "CAPVID_LIMIT_"
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits in force.

    Attributes:
        frame_pixels: pixels of one video frame or image. 8K video has 33 million.
        video_frames: frames of one video, counted by its packets.
        member_bytes: uncompressed bytes of one image in an archive.
        remote_bytes: bytes of one object fetched from a URL.
        list_bytes: bytes of a list of inputs fetched from a URL or read from stdin.
        header_bytes: bytes of an index or header that is read as a whole (the ``moov`` box of an MP4).
        feature_bytes: bytes of one feature file, shard or manifest, or of the frames of one video that a chat
            model captions.
        model_bytes: bytes of the weights of one captioner or backbone.
        text_bytes: bytes of a configuration, data set, list of predictions or other text read whole,
            uncompressed.
        nesting: depth of nested arrays and objects in JSON and TOML.
        worker_bytes: address space of a decoding process; 0 sets no limit.
    """

    frame_pixels: int = 8192 * 8192
    video_frames: int = 20_000_000
    member_bytes: int = 256 * MIB
    remote_bytes: int = 64 * GIB
    list_bytes: int = 1 * GIB
    header_bytes: int = 256 * MIB
    feature_bytes: int = 4 * GIB
    model_bytes: int = 64 * GIB
    text_bytes: int = 512 * MIB
    nesting: int = 100
    worker_bytes: int = 8 * GIB


def limits() -> Limits:
    """Return the limits in force: the defaults, changed by the environment.

    Raises:
        UsageError: a variable does not hold a positive number.
    """
    values = {}
    for name in Limits.__dataclass_fields__:
        variable = _PREFIX + name.upper()
        if os.environ.get(variable):
            values[name] = _number(variable, os.environ[variable])
    return Limits(**values)


def set_limits(values: Mapping[str, object]) -> None:
    """Set limits for this process and those it starts; variables that are already set take precedence.

    Args:
        values: limits by field name, as in a configuration file; dashes count as underscores.

    Raises:
        UsageError: a name is unknown, or a value is not a positive number.
    """
    names = list(Limits.__dataclass_fields__)
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in names:
            known = [known.replace("_", "-") for known in names]
            remedy = did_you_mean(key, known) or f"known limits are {', '.join(known)}"
            raise UsageError(f"limits.{key}: no such limit", remedy=remedy)
        _number(f"limits.{key}", value)
        variable = _PREFIX + name.upper()
        if not os.environ.get(variable):
            os.environ[variable] = str(value)


def _number(name: str, value: object) -> int:
    try:
        number = int(float(str(value)))
        if number >= 0:
            return number
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{name} must be a positive number, got {value}")


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: not JSON, or nested more deeply than :attr:`~capvid.utils.validation.Limits.nesting`.
    """
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: not TOML, or nested more deeply than :attr:`~capvid.utils.validation.Limits.nesting`.
    """
    values: dict[str, Any] = _parse(tomllib.loads, text)
    return values


def _parse(loads: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        document = loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_nesting(document, limits().nesting)
    return document


def check_nesting(document: Any, max_depth: int) -> None:
    """Raise ValueError if a parsed document is nested too deeply, without recursing into it."""
    level, depth = [document], 0
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


def bounded(default: Any = MISSING, *, minimum: float = 1, maximum: float = LARGEST) -> Any:
    """Declare a numeric field that takes values from ``minimum`` to ``maximum``."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def choice(default: str, *others: str) -> Any:
    """Declare a field that takes one of a few words."""
    return field(default=default, metadata={"choices": (default, *others)})


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Declare an option.

    Args:
        default: value if the option is not given.
        help: help text.
        metadata: bounds ``minimum`` and ``maximum``, ``flags`` of the command line where they do not follow
            from the name, ``metavar`` and ``shown``, the default in words.
    """
    return field(default=default, metadata={"help": help, **metadata})


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
            remedy = did_you_mean(name, known) or f"known are {', '.join(sorted(known))}"
            raise UsageError(f"{prefix}{name}: no such {what}", remedy=remedy)
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
        minimum = option.metadata.get("minimum", 0 if kind == "float" or option.default == 0 else 1)
        maximum = option.metadata.get("maximum", math.inf if kind == "float" else LARGEST)
        bounds = [str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (minimum, maximum)]
        expected = f"{_KINDS[kind]} of at least {minimum:g}"
        if maximum < math.inf:
            expected = f"{_KINDS[kind]} between {bounds[0]} and {bounds[1]}"
        fits = type(value).__name__ == kind and minimum <= value <= maximum and value < math.inf
    else:
        expected, fits = _KINDS[kind], type(value).__name__ == kind.partition("[")[0]
    if not fits:
        raise UsageError(f"{name} must be {expected}, got {short(value)}")
    return value
