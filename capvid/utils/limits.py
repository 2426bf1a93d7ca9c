"""Limits on what an input may demand of this machine.

Files and servers are not trusted about sizes: whatever a header announces is compared with these limits
before memory is allocated. Each limit can be changed in the environment (``CAPVID_LIMIT_FRAME_PIXELS=1e9``)
or in the ``[limits]`` table of the configuration file (``frame-pixels = 1e9``). Worker processes inherit it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from capvid.errors import UsageError
from capvid.utils.registry import did_you_mean

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
        feature_bytes: bytes of one feature file.
        model_bytes: bytes of the weights of one captioner or backbone.
        text_bytes: bytes of a configuration, manifest line, caption list, shard or other file read whole.
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
    text_bytes: int = 4 * GIB
    nesting: int = 100
    worker_bytes: int = 8 * GIB


def limits() -> Limits:
    """Return the limits in force: the defaults, changed by the environment.

    Raises:
        UsageError: a variable does not hold a positive number.
    """
    values = {}
    for field in fields(Limits):
        variable = _PREFIX + field.name.upper()
        if os.environ.get(variable):
            values[field.name] = _number(variable, os.environ[variable])
    return Limits(**values)


def set_limits(values: Mapping[str, object]) -> None:
    """Set limits for this process and those it starts; variables that are already set take precedence.

    Args:
        values: limits by field name, as in a configuration file; dashes count as underscores.

    Raises:
        UsageError: a name is unknown, or a value is not a positive number.
    """
    names = [field.name for field in fields(Limits)]
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
