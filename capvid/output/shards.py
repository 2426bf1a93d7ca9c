"""Results of very many videos in few files: shards, in a folder of this machine or at an address.

A shard appears whole or not at all, and is named by the videos in it: written again, by a worker that was
started anew, it takes its own place. A run that is repeated reads which videos are there and does the rest.
Beside the shards is what all of them depend on, in ``capvid-shards.json``.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from capvid.digests import Digests, identity
from capvid.errors import DataError, UsageError
from capvid.escaping import json_text
from capvid.isolation import input_error
from capvid.output.rows import Row
from capvid.parsing import parse_json
from capvid.storage import Storage

HEAD = "capvid-shards.json"
VERSION = 1
INDEX = "jsonl"  # extension of a small file beside a shard that says what is in it
_READERS = 16  # shards that are read at once


@dataclass(frozen=True)
class Written:
    """What a shard says of one video: which, and whether it failed."""

    video: str
    ok: bool

    @classmethod
    def of(cls, record: Any) -> Written:
        """Read a record of a shard.

        Raises:
            ValueError: it is not one.
        """
        match record:
            case {"video": str(video), "status": str(status)}:
                return cls(video, status == "ok")
        raise ValueError("not a record of a video")


class ShardFormat(ABC):
    """How rows become the bytes of a shard, and what is read back of them."""

    extension: ClassVar[str]

    @abstractmethod
    def encode(self, rows: Sequence[Row]) -> bytes:
        """Give the shard's bytes."""

    @abstractmethod
    def videos(self, storage: Storage, name: str) -> list[Written]:
        """Read which videos are in a shard."""

    @abstractmethod
    def without_failed(self, data: bytes) -> bytes:
        """Give the bytes of a shard without the videos that failed."""


class Indexed(ShardFormat):
    """One whose shards each have a file beside them that says which videos are in it."""

    @abstractmethod
    def index_of(self, data: bytes) -> bytes:
        """Give the bytes of the file beside a shard of these bytes."""


class JsonLines(ShardFormat):
    """A record on each line."""

    extension = "jsonl"

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Give the lines."""
        return b"".join(_line(row.record) for row in rows)

    def videos(self, storage: Storage, name: str) -> list[Written]:
        """Read the lines."""
        return [Written.of(record) for record in _records(storage.place(name), storage.read(name))]

    def without_failed(self, data: bytes) -> bytes:
        """Leave out lines."""
        return b"".join(_line(r) for r in _records("shard", data) if r["status"] == "ok")


class ShardFolder:
    """The shards of one run, and of those that it goes on with.

    Args:
        folder: a path or an address.
        kind: what is in the shards, ``captions`` or ``features``.
        form: how.
        head: what all rows depend on: model, settings and so on, as JSON has it.
    """

    def __init__(self, folder: str, *, kind: str, form: ShardFormat, head: Mapping[str, Any]) -> None:
        self.storage = Storage(folder)
        self.kind, self.form = kind, form
        whole = {"version": VERSION, "kind": kind, "format": form.extension, **head}
        self.head = json.loads(json.dumps(whole))  # as it is read back
        self._name = re.compile(rf"{kind}-[0-9a-f]{{16}}\.{form.extension}")

    def begin(self, *, overwrite: bool) -> None:
        """See that the folder is of such a run, or make it one.

        Raises:
            UsageError: it holds shards of another model, other settings or another format.
            StorageError: it cannot be read or written.
        """
        there = self._read_head()
        if there is not None and there != self.head and not overwrite:
            keys = there.keys() | self.head.keys()
            differing = sorted(key for key in keys if there.get(key) != self.head.get(key))
            raise UsageError(
                f"{self.storage}: holds shards that were made otherwise ({', '.join(differing)})",
                remedy="choose another folder, or --overwrite",
            )
        if overwrite:
            for name in self.storage.names():
                if re.fullmatch(r"(captions|features)-[0-9a-f]{16}\.[a-z.]+", name):
                    self.storage.remove(name)
        if there != self.head:
            self.storage.write(HEAD, json.dumps(self.head, indent=1, sort_keys=True).encode() + b"\n")

    def check(self) -> None:
        """See from another process, perhaps on another machine, that this is the folder that was begun.

        Raises:
            UsageError: it is not.
        """
        if self._read_head() != self.head:
            import platform

            raise UsageError(
                f"{self.storage}: is not the same folder on {platform.node()}",
                remedy="give an address, or a folder that all machines share",
            )

    def _read_head(self) -> Any:
        try:
            head = parse_json(self.storage.read(HEAD))
            head.keys()
            return head
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError) as error:
            raise DataError(
                f"{self.storage.place(HEAD)}: is damaged", remedy="delete it with the shards beside it"
            ) from error

    def shards(self) -> list[str]:
        """Names of the shards that are there."""
        return [name for name in self.storage.names() if self._name.fullmatch(name)]

    def done(self, *, retry_failed: bool = False) -> Digests:
        """Which videos are done; with ``retry_failed``, those that failed leave their shards, and are not."""
        found = Digests()
        for name, written in self._read_all():
            failed = [video for video in written if not video.ok]
            if retry_failed and failed:
                self._drop_failed(name, every=len(failed) == len(written))
            for video in written:
                if video.ok or not retry_failed:
                    found.add(identity(video.video))
        return found

    def _read_all(self) -> Iterator[tuple[str, list[Written]]]:
        names = self.shards()
        with ThreadPoolExecutor(_READERS) as pool:
            for first in range(0, len(names), _READERS):  # so that few are in memory
                some = names[first : first + _READERS]
                yield from zip(some, pool.map(self._videos, some), strict=True)

    def _videos(self, name: str) -> list[Written]:
        try:
            return self.form.videos(self.storage, name)
        except FileNotFoundError:  # another run removed it just now
            return []

    def _drop_failed(self, name: str, *, every: bool) -> None:
        if isinstance(self.form, Indexed):  # gone first: it must not name what is not there
            self.storage.remove(f"{name}.{INDEX}")
        if every:
            self.storage.remove(name)
            return
        with suppress(FileNotFoundError):
            data = self.storage.read(name)
            try:
                data = self.form.without_failed(data)
            except ValueError as error:
                raise _not_a_shard(self.storage.place(name)) from error
            self._put(name, data)

    def _put(self, name: str, data: bytes) -> None:
        self.storage.write(name, data)
        if isinstance(self.form, Indexed):
            self.storage.write(f"{name}.{INDEX}", self.form.index_of(data))

    def checked(self, row: Row) -> Row:
        """Return the row, or its error if it cannot be encoded: it would cost all rows of its shard."""
        try:
            self.form.encode([row])
            return row
        except Exception as cause:
            return row.failed(input_error(row.video, cause))

    def write(self, rows: Sequence[Row]) -> str:
        """Write a shard and give its name.

        Raises:
            StorageError: it cannot be written.
        """
        digests = sorted(identity(row.video) for row in rows)
        digest = hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()
        name = f"{self.kind}-{digest}.{self.form.extension}"
        self._put(name, self.form.encode(rows))
        return name


def _line(record: Mapping[str, Any]) -> bytes:
    return json_text(record).encode("utf-8") + b"\n"


def _records(name: str, data: bytes) -> list[dict[str, Any]]:
    """The records of a shard of JSON lines.

    Raises:
        DataError: it is none.
    """
    try:
        found = [parse_json(line) for line in data.splitlines()]
        for record in found:
            Written.of(record)
    except ValueError as error:
        raise _not_a_shard(name) from error
    return found


def _not_a_shard(place: str) -> DataError:
    return DataError(f"{place}: not a shard of capvid", remedy="move it elsewhere")
