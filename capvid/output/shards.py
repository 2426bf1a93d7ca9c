"""Results of many videos in few files: shards, in a local folder or at an address.

A shard is written atomically and named after its videos, so that a worker that starts again replaces its own
shard. A repeated run reads which videos are done and does the others. ``capvid-shards.json`` beside the
shards records everything that all of them depend on.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from capvid.errors import CapvidError, DataError, UsageError, input_error
from capvid.features.feature_file import features_to_bytes
from capvid.output.results import error_record, make_record
from capvid.utils.digests import Digests, identity, shown
from capvid.utils.registry import Registry
from capvid.utils.storage import Storage
from capvid.utils.validation import parse_json

if TYPE_CHECKING:
    from capvid.features.extraction import ExtractionResult
    from capvid.output.results import CaptionResult


HEAD = "capvid-shards.json"
VERSION = 1
INDEX = "jsonl"  # extension of the index beside a shard
_CONCURRENT_READS = 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """Outcome of one video.

    Attributes:
        video: path or address as text.
        key: name of the video in shards that need one.
        features: bytes of the feature file; None for captions and failed videos.
        error: error message, on one line.
        lost: number of frames that could not be decoded.
        generic: whether a caption is probably generic.
        trace: formatted traceback of the bug behind an internal error.
    """

    video: str
    record: Mapping[str, Any]
    key: str = ""
    features: bytes | None = None
    error: str | None = None
    lost: int = 0
    generic: bool = False
    trace: str = ""

    @classmethod
    def of(cls, result: CaptionResult | ExtractionResult, record: Mapping[str, Any], **values: Any) -> Row:
        """Return the row of a result with this record."""
        error, trace = (str(result.error), result.error.trace) if result.error else (None, "")
        return cls(video=record["video"], record=record, error=error, lost=result.lost, trace=trace, **values)

    def failed(self, error: CapvidError) -> Row:
        """Return the row of the same video with an error instead of captions or features."""
        record = {key: value for key, value in self.record.items() if key != "segments"}
        record |= {"status": "error", "duration": None, "error": error_record(error)}
        if "captions" in record:
            record["captions"] = []
        return replace(self, record=record, features=None, error=str(error), generic=False, trace=error.trace)


def caption_row(result: CaptionResult, settings: Mapping[str, Any], *, attention: bool = False) -> Row:
    """Return the row of one result; arguments as for :func:`~capvid.output.results.make_record`."""
    generic = any(segment.captions[0].generic for segment in result.segments)
    return Row.of(result, make_record(result, settings, attention=attention), generic=generic)


def features_row(result: ExtractionResult) -> Row:
    """Return the row of the features of one video."""
    features = result.features
    record = {
        "video": shown(result.path),
        "status": "ok" if features is not None else "error",
        "duration": None if features is None else features.seconds,
        "error": error_record(result.error),
    }
    data = None if features is None else features_to_bytes(features)
    return Row.of(result, record, key=result.name, features=data)


class Entry(NamedTuple):
    """A video in a shard, and whether it succeeded."""

    video: str
    ok: bool

    @classmethod
    def of(cls, record: Any) -> Entry:
        """Read a record of a shard; raise ValueError if it is none."""
        match record:
            case {"video": str(video), "status": str(status)}:
                return cls(video, status == "ok")
        raise ValueError("not a record of a video")


class ShardFormat(ABC):
    """Format of shards: rows to bytes and back. Reading raises ValueError for what is not a shard.

    Attributes:
        extension: extension of the files.
    """

    extension: ClassVar[str]

    @abstractmethod
    def encode(self, rows: Sequence[Row]) -> bytes:
        """Return the bytes of a shard."""

    @abstractmethod
    def entries(self, storage: Storage, name: str) -> list[Entry]:
        """Read which videos a shard holds."""

    @abstractmethod
    def without_failed(self, data: bytes) -> bytes:
        """Return the bytes of a shard without the videos that failed."""

    def index_of(self, data: bytes) -> bytes | None:
        """Return the index to write beside a shard, its records as JSON lines; None for no index."""
        return None


SHARD_FORMATS: Registry[type[ShardFormat]] = Registry(
    "shard format", "capvid.output"
)  # by "captions/parquet"


def not_a_shard(path: str) -> DataError:
    """Return the error of a file that has the name of a shard only."""
    return DataError(f"{path}: not a shard of capvid", remedy="move it elsewhere")


class ShardFolder:
    """The shards of one run, and of earlier runs that it continues.

    Args:
        folder: path or address.
        kind: contents of the shards, ``captions`` or ``features``.
        form: format of the shards.
        head: everything that all rows depend on, such as model and settings, as JSON values.
    """

    def __init__(self, folder: str, *, kind: str, form: ShardFormat, head: Mapping[str, Any]) -> None:
        self.storage = Storage(folder)
        self.kind, self.form = kind, form
        values = {"version": VERSION, "kind": kind, "format": form.extension, **head}
        self.head = json.loads(json.dumps(values))  # as it is read back
        self._name = re.compile(rf"{kind}-[0-9a-f]{{16}}\.{form.extension}")

    def begin(self, *, overwrite: bool) -> None:
        """Check that the folder belongs to such a run, or prepare it.

        Args:
            overwrite: whether to remove all shards in the folder.

        Raises:
            UsageError: it holds shards of another model, other settings or another format.
            StorageError: it cannot be read or written.
        """
        head = self._read_head()
        if head is not None and head != self.head and not overwrite:
            keys = head.keys() | self.head.keys()
            differing = sorted(key for key in keys if head.get(key) != self.head.get(key))
            raise UsageError(
                f"{self.storage}: holds shards that were made otherwise ({', '.join(differing)})",
                remedy="choose another folder, or --overwrite",
            )
        if overwrite:
            for name in self.storage.names():
                if re.fullmatch(r"(captions|features)-[0-9a-f]{16}\.[a-z.]+", name):
                    self.storage.remove(name)
        if head != self.head:
            self.storage.write(HEAD, json.dumps(self.head, indent=1, sort_keys=True).encode() + b"\n")

    def check(self) -> None:
        """Check from another process, perhaps on another machine, that this is the folder that was begun.

        Raises:
            UsageError: it is another folder.
        """
        if self._read_head() != self.head:
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
        """Return the names of the shards in the folder."""
        return [name for name in self.storage.names() if self._name.fullmatch(name)]

    def done(self, *, retry_failed: bool = False) -> Digests:
        """Return the digests of the videos that are done.

        Args:
            retry_failed: whether to remove failed videos from their shards instead of counting them as done.
        """
        digests, names = Digests(), self.shards()
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            # Group by group, so that few shards are in memory at once.
            for start in range(0, len(names), _CONCURRENT_READS):
                group = names[start : start + _CONCURRENT_READS]
                for name, entries in zip(group, pool.map(self._entries, group), strict=True):
                    ok = [entry for entry in entries if entry.ok]
                    if retry_failed and len(ok) < len(entries):
                        self._drop_failed(name, every=not ok)
                        entries = ok
                    for entry in entries:
                        digests.add(identity(entry.video))
        return digests

    def _entries(self, name: str) -> list[Entry]:
        try:
            return self.form.entries(self.storage, name)
        except FileNotFoundError:  # another run removed it just now
            return []
        except ValueError as error:
            raise not_a_shard(self.storage.place(name)) from error

    def _drop_failed(self, name: str, *, every: bool) -> None:
        self.storage.remove(f"{name}.{INDEX}")  # first: an index must not name videos that are gone
        if every:
            self.storage.remove(name)
            return
        try:
            self._put(name, self.form.without_failed(self.storage.read(name)))
        except FileNotFoundError:  # another run removed it just now
            return
        except ValueError as error:
            raise not_a_shard(self.storage.place(name)) from error

    def checked(self, row: Row) -> Row:
        """Return the row, or its error if it cannot be encoded, which would cost all rows of its shard."""
        try:
            self.form.encode([row])
            return row
        except Exception as cause:
            return row.failed(input_error(row.video, cause))

    def write(self, rows: Sequence[Row]) -> str:
        """Write a shard and return its name.

        Raises:
            StorageError: it cannot be written.
        """
        digests = sorted(identity(row.video) for row in rows)
        digest = hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()
        name = f"{self.kind}-{digest}.{self.form.extension}"
        self._put(name, self.form.encode(rows))
        return name

    def _put(self, name: str, data: bytes) -> None:
        self.storage.write(name, data)
        index = self.form.index_of(data)
        if index is not None:
            self.storage.write(f"{name}.{INDEX}", index)
