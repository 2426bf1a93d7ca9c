"""JSON and TOML from untrusted sources, with a limit on nesting."""

from __future__ import annotations

import json
import sys
from typing import Any

from capvid.limits import limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: not JSON, or nested more deeply than :attr:`~capvid.limits.Limits.nesting`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_nesting(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: not TOML, or nested more deeply than :attr:`~capvid.limits.Limits.nesting`.
    """
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_nesting(values)
    return values


def _check_nesting(value: Any) -> None:
    """Raise ValueError where a value is nested too deeply, without recursing into it."""
    level = [value] if isinstance(value, dict | list) else []
    depth = 0
    while level:
        depth += 1
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if level and depth >= limits().nesting:
            raise ValueError("nested too deeply")
