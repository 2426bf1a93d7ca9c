"""Deterministic mutations of the bytes of files and of the values in JSON, TOML, safetensors and tar."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The bytes of a file, those of a second file of the same kind, and the source of randomness.
Mutation = Callable[[bytes, bytes, random.Random], bytes]

_INTEGERS = (0, 1, 0x7F, 0xFF, 0xFFFF, -1, -(2**31), 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63))
_DEEP = "\ue000deep"  # stands for a value that is too deep for the serialisers
_DEPTH = 20_000
_VALUES: tuple[Any, ...] = (
    None,
    True,
    [],
    {},
    "",
    "x",
    " ",
    0,
    1,
    -1,
    -5,
    0.5,
    2**31,
    2**63,
    10**30,
    10**400,
    1e-320,
    1e308,
    -1e308,
    math.nan,
    math.inf,
    -math.inf,
    "\ud800",
    "a\nb",
    "\0",
    "\x1b[31m",
    "\u202e",
    "../../x",
    "/dev/null",
    "1/99999999999999999999",
    "x" * 100_000,
    [None],
    [[]],
    [1, "x"],
    {"x": None},
    _DEEP,
)


def mutate_bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Apply one to four random changes to the bytes of a file, most of them near its start or end."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _BYTE_CHANGES[rng.randrange(len(_BYTE_CHANGES))](result, other, rng)
    return bytes(result)


def _position(size: int, rng: random.Random) -> int:
    """Return an offset; headers and indexes lie at the ends of files, so half of the offsets do too."""
    end = min(size, 256)
    choice = rng.randrange(4)
    if choice == 0:
        return rng.randrange(end + 1)
    return size - rng.randrange(end + 1) if choice == 1 else rng.randrange(size + 1)


def _flip(data: bytearray, other: bytes, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 8, 64))):
        if data:
            data[min(_position(len(data), rng), len(data) - 1)] ^= 1 << rng.randrange(8)


def _truncate(data: bytearray, other: bytes, rng: random.Random) -> None:
    del data[_position(len(data), rng) :]


def _remove(data: bytearray, other: bytes, rng: random.Random) -> None:
    start = _position(len(data), rng)
    del data[start : start + rng.choice((1, 4, 16, 512, len(data) // 4))]


def _duplicate(data: bytearray, other: bytes, rng: random.Random) -> None:
    start = _position(len(data), rng)
    chunk = data[start : start + rng.choice((1, 4, 16, 512, len(data) // 4))]
    data[start:start] = chunk * rng.choice((1, 2, 50))


def _set_integer(data: bytearray, other: bytes, rng: random.Random) -> None:
    size = rng.choice((1, 2, 4, 4, 8))
    start = _position(max(len(data) - size, 0), rng)
    value = rng.choice(_INTEGERS) % (1 << 8 * size)
    data[start : start + size] = value.to_bytes(size, rng.choice(("little", "big")))


def _splice(data: bytearray, other: bytes, rng: random.Random) -> None:
    data[_position(len(data), rng) :] = other[_position(len(other), rng) :]


_BYTE_CHANGES = (
    _flip,
    _flip,
    _set_integer,
    _set_integer,
    _set_integer,
    _truncate,
    _remove,
    _duplicate,
    _splice,
)


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """Return a copy of nested dictionaries and lists in which one or two nodes are changed.

    A node is replaced by a value of another type or range, removed, duplicated, renamed, or swapped with
    another one.
    """
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2))):
        nodes = _nodes(tree)
        if not nodes or rng.randrange(40) == 0:
            return copy.deepcopy(rng.choice(_VALUES))
        parent, key = rng.choice(nodes)
        change = rng.randrange(10)
        if change < 6:
            parent[key] = copy.deepcopy(rng.choice(_VALUES))
        elif change == 6:
            del parent[key]
        elif change == 7:
            other_parent, other_key = rng.choice(nodes)
            parent[key] = copy.deepcopy(other_parent[other_key])
        elif isinstance(parent, dict):
            name = rng.choice(("", "x", "\ud800", "a\nb", f"{key} "))
            parent[name] = copy.deepcopy(parent[key]) if change == 8 else parent.pop(key)
        else:
            parent[key:key] = copy.deepcopy([parent[key]]) * rng.choice((1, 2, 100))
    return tree


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """List the (parent, key) pairs of a tree; those of long lists are thinned out to keep scalars likely."""
    nodes: list[tuple[Any, Any]] = []
    level = [tree]
    while level:
        parent = level.pop()
        keys = parent if isinstance(parent, dict) else range(min(len(parent), 8))
        nodes += [(parent, key) for key in keys]
        level += [parent[key] for key in keys if isinstance(parent[key], dict | list)]
    return nodes


def dump_json(tree: Any) -> bytes:
    """Serialise a mutated tree as JSON in which lone surrogates are escaped."""
    text = json.dumps(tree)
    return text.replace(json.dumps(_DEEP), "[" * _DEPTH + "]" * _DEPTH).encode()


def mutate_json(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate a JSON document, three times in four through its tree."""
    if rng.randrange(4) == 0:
        return mutate_bytes(data, other, rng)
    return dump_json(mutate_tree(json.loads(data), rng))


def mutate_lines(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate one line of a JSON Lines document through its tree, or the bytes."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    if rng.randrange(3) == 0 or not lines[at].strip():
        return mutate_bytes(data, other, rng)
    lines[at] = dump_json(mutate_tree(json.loads(lines[at]), rng))
    return b"\n".join(lines)


def mutate_toml(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate a TOML document, three times in four through its tree."""
    tree = mutate_tree(tomllib.loads(data.decode()), rng) if rng.randrange(4) else None
    if not isinstance(tree, dict):
        return mutate_bytes(data, other, rng)
    return "\n".join(f"{json.dumps(key)} = {_toml(value)}" for key, value in tree.items()).encode()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value == _DEEP:
        return "[" * _DEPTH + "]" * _DEPTH
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return "{}" if value is None else json.dumps(value)


def mutate_safetensors(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate a safetensors file: the bytes, its header, or the JSON inside the header's metadata."""
    if rng.randrange(4) == 0:
        return mutate_bytes(data, other, rng)
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__") or {}
    inner = [key for key, text in metadata.items() if text.startswith("{")]
    if inner and rng.randrange(2):
        key = rng.choice(inner)
        metadata[key] = dump_json(mutate_tree(json.loads(metadata[key]), rng)).decode()
    else:
        header = mutate_tree(header, rng)
    content = dump_json(header)
    return struct.pack("<Q", len(content)) + content + data[8 + length :]


def mutate_tar(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Mutate a tar archive: the bytes, or a field of a member's header with the checksum recomputed."""
    starts = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    if rng.randrange(3) == 0 or not starts:
        return mutate_bytes(data, other, rng)
    result, start = bytearray(data), rng.choice(starts)
    fields = {"name": (0, 100), "size": (124, 12), "type": (156, 1), "link": (157, 100), "prefix": (345, 155)}
    offset, size = fields[rng.choice(list(fields))]
    value = rng.choice(
        (b"", b"../../x", b"/", b"x" * size, b"77777777777", b"-1", b"\x80" + b"\xff" * 11, b"a\nb")
    )
    if size == 1:
        value = rng.choice(b"012345673xgLKSVD").to_bytes(1, "little")
    result[start + offset : start + offset + size] = value[:size].ljust(size, b"\0")
    result[start + 148 : start + 156] = b" " * 8
    result[start + 148 : start + 156] = b"%06o\0 " % sum(result[start : start + 512])
    return bytes(result)
