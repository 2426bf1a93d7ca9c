"""Results of many videos in few files: shards, in a local folder or at an address, and their formats.

A shard is written atomically and named after its videos, so that a worker that starts again replaces its own
shard. A repeated run reads which videos are done and does the others. ``capvid-shards.json`` beside the
shards records everything that all of them depend on. Captions are stored as JSON lines, WebDataset or
Parquet, features as WebDataset or Parquet:

- A WebDataset tar file holds the record of each video as ``KEY.json`` and, unless it failed, its feature file
  as ``KEY.safetensors``, or its caption as ``KEY.txt`` beside the video itself if that came from an archive,
  with the other members of its sample; those with the names of capvid's become ``KEY.original.json`` and
  ``KEY.original.txt``.
- In Parquet, each video is a row: captions, segments and words are nested columns, and each stream of
  features is one list of numbers with its shape.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from capvid.errors import CapvidError, DataError, UsageError, input_error
from capvid.features.extraction import ExtractionResult
from capvid.features.feature_file import Features, features_to_bytes
from capvid.output.results import CaptionResult, error_record, make_record
from capvid.utils.escaping import json_text, utf8_text
from capvid.utils.files import open_regular
from capvid.utils.registry import Registry
from capvid.utils.storage import Blob, Storage, VideoPath, fetch, filesystem, protocol_of, with_retries
from capvid.utils.validation import limits, parse_json
from capvid.video.input_lists import Digests, pyarrow_parquet
from capvid.video.input_set import identity, sample_name

HEAD = "capvid-shards.json"
VERSION = 1
INDEX = "jsonl"  # extension of the index beside a shard
_SHARD = re.compile(r"(captions|features)-[0-9a-f]{16}\.[a-z.]+")  # a shard or its index
_CONCURRENT_READS = 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """Outcome of one video.

    Attributes:
        video: path or address as text.
        key: name of the video in shards that need one.
        features: None for captions and failed videos.
        error: error message, on one line.
        error_kind: kind of the error.
        lost: number of frames that could not be decoded.
        low_confidence: whether a caption has a low confidence.
        text: best caption of the video.
        media: extensions and bytes of the video's file and the rest of its sample, if they are stored.
        trace: formatted traceback of the bug behind an internal error.
    """

    video: str
    record: Mapping[str, Any]
    key: str = ""
    features: Features | None = None
    error: str | None = None
    error_kind: str = ""
    lost: int = 0
    low_confidence: bool = False
    text: str = ""
    media: tuple[tuple[str, bytes], ...] = ()
    trace: str = ""

    @property
    def path(self) -> str:
        """Path or address as text."""
        return self.video

    @classmethod
    def of(cls, result: CaptionResult | ExtractionResult, record: Mapping[str, Any], **values: Any) -> Row:
        """Return the row of a result with this record."""
        row = cls(video=record["video"], record=record, lost=result.lost, **values)
        if (error := result.error) is None:
            return row
        return replace(row, error=str(error), error_kind=error.kind, trace=error.trace)

    def failed(self, error: CapvidError) -> Row:
        """Return the row of the same video with an error instead of captions or features."""
        record = {key: value for key, value in self.record.items() if key != "segments"}
        record |= {"status": "error", "duration": None, "error": error_record(error)}
        if "captions" in record:
            record |= {"captions": [], "low_confidence": False}
        failed = self.without_data()
        values: dict[str, Any] = {"error": str(error), "error_kind": error.kind, "trace": error.trace}
        return replace(failed, record=record, low_confidence=False, **values)

    def without_data(self) -> Row:
        """Return what is known of the video when the row has been written."""
        return replace(self, record={}, features=None, text="", media=())


def caption_row(
    result: CaptionResult, settings: Mapping[str, Any], *, attention: bool = False, media: bool = False
) -> Row:
    """Return the row of one result.

    Args:
        result: the result.
        settings: as for :func:`~capvid.output.results.make_record`.
        attention: as for :func:`~capvid.output.results.make_record`.
        media: whether to store the video as well if it came from an archive.

    Raises:
        StorageError: the video cannot be read again.
    """
    row = Row.of(
        result,
        make_record(result, settings, attention=attention),
        key=result.name,
        low_confidence=result.low_confidence,
        text=utf8_text(result.captions[0].text) if result.captions else "",
    )
    path = result.path
    if not media or result.error is not None or not isinstance(path, Blob) or not path.member:
        return row
    files: dict[str, bytes] = {}
    for blob in (path, *path.siblings):
        extension = path.suffix[1:] if blob is path else sample_name(blob.member)[1]
        extension = re.sub(r"[^\w.+-]", "_", extension.lower())
        while extension in files or extension in ("json", "txt"):  # the latter are capvid's own
            extension = f"original.{extension}"
        data = io.BytesIO()
        fetch(blob, data, max_bytes=limits().feature_bytes)
        files[extension] = data.getvalue()
    return replace(row, media=tuple(files.items()))


def features_row(result: ExtractionResult) -> Row:
    """Return the row of the features of one video."""
    features = result.features
    record = {
        "video": utf8_text(result.path),
        "status": "ok" if features is not None else "error",
        "duration": None if features is None else features.seconds,
        "error": error_record(result.error),
    }
    return Row.of(result, record, key=result.name, features=features)


Entry = tuple[str, bool]  # a video in a shard, and whether it succeeded


def _entry(record: Any) -> Entry:
    """Read a record of a shard; raise ValueError if it is none."""
    match record:
        case {"video": str(video), "status": str(status)}:
            return video, status == "ok"
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


# by "captions/parquet"
SHARD_FORMATS: Registry[type[ShardFormat]] = Registry("shard format", "capvid.output")


def not_a_shard(path: str) -> DataError:
    """Return the error of a file that has the name of a shard only."""
    return DataError(f"{path}: not a shard of capvid", remedy="move it elsewhere")


@SHARD_FORMATS.register("captions/jsonl")
class JsonLines(ShardFormat):
    """One JSON record per line."""

    extension = "jsonl"

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Return the lines."""
        return b"".join(json_text(row.record).encode("utf-8") + b"\n" for row in rows)

    def entries(self, storage: Storage, name: str) -> list[Entry]:
        """Read the lines."""
        return [_entry(parse_json(line)) for line in storage.read(name).splitlines()]

    def without_failed(self, data: bytes) -> bytes:
        """Leave out lines."""
        return b"".join(line + b"\n" for line in data.splitlines() if _entry(parse_json(line))[1])


@SHARD_FORMATS.register("captions/webdataset")
@SHARD_FORMATS.register("features/webdataset")
class WebDataset(ShardFormat):
    """Tar file with the record of each video and, unless it failed, its features, or its caption."""

    extension = "tar"

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Return the bytes of the tar file."""
        members = []
        for row in rows:
            members.append((f"{row.key}.json", json_text(row.record).encode("utf-8")))
            if row.features is not None:
                members.append((f"{row.key}.safetensors", features_to_bytes(row.features)))
            elif row.error is None:
                members.append((f"{row.key}.txt", row.text.encode("utf-8")))
            members += [(f"{row.key}.{extension}", data) for extension, data in row.media]
        return _tar(members)

    def index_of(self, data: bytes) -> bytes:
        """Return the contents of each ``KEY.json`` as a line."""
        return b"".join(content + b"\n" for path, content in _members(data) if _holds_record(path))

    def entries(self, storage: Storage, name: str) -> list[Entry]:
        """Read the index, or the tar file if a run was killed between writing the two."""
        try:
            lines = storage.read(f"{name}.{INDEX}")
        except FileNotFoundError:
            lines = self.index_of(storage.read(name))
        return [_entry(parse_json(line)) for line in lines.splitlines()]

    def without_failed(self, data: bytes) -> bytes:
        """Leave out the records of videos that failed."""
        return _tar(
            (path, content)
            for path, content in _members(data)
            if not _holds_record(path) or _entry(parse_json(content))[1]
        )


def _holds_record(path: str) -> bool:
    """Whether a member is the ``KEY.json`` of a sample, and not its ``KEY.original.json``."""
    return sample_name(path)[1] == "json"


def _tar(members: Iterable[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the members of a tar file.

    Raises:
        ValueError: it is damaged, or a member is sparse, whose few bytes could stand for terabytes.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                if member.issparse():
                    raise ValueError(f"{member.name} is sparse")
                file = tar.extractfile(member)
                if file is not None:
                    yield member.name, file.read()
    except (tarfile.TarError, KeyError, OverflowError, OSError) as error:
        raise ValueError(f"damaged tar file: {error}") from error


class Parquet(ShardFormat):
    """Parquet file with one row per video."""

    extension = "parquet"

    def __init__(self) -> None:
        pyarrow_parquet()

    @abstractmethod
    def table(self, rows: Sequence[Row]) -> Any:
        """Return rows as an Arrow table."""

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Return the bytes of the file."""
        return self._write(self.table(rows))

    def entries(self, storage: Storage, name: str) -> list[Entry]:
        """Read two columns, and no more than that of a file at an address."""
        import pyarrow as pa

        path, remote = storage.place(name), storage.local is None

        def read() -> list[Entry]:
            with filesystem(protocol_of(path)).open(path, "rb") if remote else open_regular(path) as file:
                try:
                    table = pyarrow_parquet().ParquetFile(file).read(columns=["video", "status"])
                    return [_entry(row) for row in table.to_pylist()]
                except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                    # Arrow reports damage as OSError, too, but without a number.
                    if isinstance(error, OSError) and (remote or error.errno is not None):
                        raise
                    raise not_a_shard(path) from error

        return with_retries(path, "read", read) if remote else read()

    def without_failed(self, data: bytes) -> bytes:
        """Leave out rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            table = pyarrow_parquet().read_table(pa.BufferReader(data))
            return self._write(table.filter(pc.equal(table["status"], "ok")))
        except (KeyError, OSError, pa.ArrowException) as error:
            raise ValueError(str(error)) from error

    def _write(self, table: Any) -> bytes:
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        pyarrow_parquet().write_table(table, sink, compression="zstd")
        data: bytes = sink.getvalue().to_pybytes()
        return data


@SHARD_FORMATS.register("captions/parquet")
class ParquetCaptions(Parquet):
    """JSON records as nested columns; settings stay JSON text."""

    def table(self, rows: Sequence[Row]) -> Any:
        """Return records as an Arrow table."""
        import pyarrow as pa

        text, number, numbers = pa.string(), pa.float64(), pa.list_(pa.float64())
        word = _struct(word=text, logprob=number, attention=numbers)
        caption = [("text", text), ("logprob", number), ("mean_logprob", number), ("confidence", number)]
        captions = pa.list_(pa.struct([*caption, ("words", pa.list_(word)), ("times", numbers)]))
        segment = _struct(start=number, end=number, caption=text, captions=captions, memory_change=numbers)
        schema = _struct(
            schema_version=pa.int32(),
            video=text,
            status=text,
            low_confidence=pa.bool_(),
            model=_struct(name=text, revision=text),
            settings=text,
            duration=number,
            captions=captions,
            segments=pa.list_(segment),
            error=_struct(kind=text, message=text, remedy=text),
        )
        records = [{**row.record, "settings": json.dumps(row.record["settings"])} for row in rows]
        return pa.Table.from_pylist(records, schema=pa.schema(schema))


@SHARD_FORMATS.register("features/parquet")
class ParquetFeatures(Parquet):
    """Feature headers as JSON text, streams as flat lists of numbers with their shapes."""

    def table(self, rows: Sequence[Row]) -> Any:
        """Return records and features as an Arrow table."""
        import pyarrow as pa

        text = pa.string()
        stream = _struct(shape=pa.list_(pa.int64()), values=pa.list_(pa.float32()))
        schema = _struct(
            video=text,
            status=text,
            duration=pa.float64(),
            header=text,
            times=pa.list_(pa.float64()),
            streams=pa.list_(stream),
            error=_struct(kind=text, message=text, remedy=text),
        )
        records = [dict(row.record) for row in rows]
        for record, row in zip(records, rows, strict=True):
            if row.features is not None:
                record["header"], record["times"] = row.features.header.to_json(), row.features.times
                record["streams"] = [
                    {"shape": list(array.shape), "values": np.asarray(array, np.float32).reshape(-1)}
                    for array in row.features.streams
                ]
        return pa.Table.from_pylist(records, schema=pa.schema(schema))


def _struct(**fields: Any) -> Any:
    import pyarrow as pa

    return pa.struct(list(fields.items()))


def shard_paths(folder: str) -> list[str]:
    """Return the paths or addresses of the files in a folder that a run into it may replace or remove.

    Raises:
        StorageError: the folder cannot be listed.
    """
    storage = Storage(folder)
    return [storage.place(name) for name in (HEAD, *filter(_SHARD.fullmatch, storage.names()))]


def read_head(storage: Storage) -> dict[str, Any] | None:
    """Return what all shards in a folder depend on, such as the model; None if no run was begun there.

    Raises:
        DataError: the file is damaged.
        StorageError: it cannot be read.
    """
    try:
        head = parse_json(storage.read(HEAD))
        head.keys()
        return dict(head)
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        problem = f"{storage.place(HEAD)}: is damaged"
        raise DataError(problem, remedy="delete it with the shards beside it") from error


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

    def check_head(self, *, overwrite: bool) -> bool:
        """Return whether the folder has the head of this run; with ``overwrite``, it may have any.

        Raises:
            UsageError: it holds shards of another model, other settings or another format.
            StorageError: it cannot be read.
        """
        head = read_head(self.storage)
        if head is not None and head != self.head and not overwrite:
            keys = head.keys() | self.head.keys()
            differing = sorted(key for key in keys if head.get(key) != self.head.get(key))
            problem = f"{self.storage}: holds shards that were made otherwise ({', '.join(differing)})"
            raise UsageError(problem, remedy="choose another folder, or --overwrite")
        return bool(head == self.head)

    def begin(self, *, overwrite: bool) -> None:
        """Check that the folder belongs to such a run, or prepare it.

        Args:
            overwrite: whether to remove all shards in the folder.

        Raises:
            UsageError: it holds shards of another model, other settings or another format.
            StorageError: it cannot be read or written.
        """
        is_begun = self.check_head(overwrite=overwrite)
        if overwrite:
            for name in self.storage.names():
                if _SHARD.fullmatch(name):
                    self.storage.remove(name)
        if not is_begun:
            self.storage.write(HEAD, json.dumps(self.head, indent=1, sort_keys=True).encode() + b"\n")

    def check(self) -> None:
        """Check from another process, perhaps on another machine, that this is the folder that was begun.

        Raises:
            UsageError: it is another folder.
        """
        if read_head(self.storage) != self.head:
            problem = f"{self.storage}: is not the same folder on {platform.node()}"
            raise UsageError(problem, remedy="give an address, or a folder that all machines share")

    def holds(self, path: VideoPath) -> bool:
        """Whether a video is in a shard of this folder, from which it must not be captioned again."""
        if not isinstance(path, Blob) or not path.member:
            return False
        parent, _, name = path.url.rpartition("/")
        if not _SHARD.fullmatch(name):
            return False
        if self.storage.local is None:
            return parent == self.storage.url.rstrip("/")
        return os.path.realpath(parent or ".") == os.path.realpath(self.storage.local)

    def shards(self) -> list[str]:
        """Return the names of the shards in the folder."""
        return [name for name in self.storage.names() if self._name.fullmatch(name)]

    def done(self, *, retry_failed: bool = False, dry_run: bool = False) -> Digests:
        """Return the digests of the videos that are done.

        Args:
            retry_failed: whether to remove failed videos from their shards instead of counting them as done.
            dry_run: whether to leave them there nevertheless.
        """
        digests, names = Digests(), self.shards()
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            # Group by group, so that few shards are in memory at once.
            for start in range(0, len(names), _CONCURRENT_READS):
                group = names[start : start + _CONCURRENT_READS]
                for name, entries in zip(group, pool.map(self._entries, group), strict=True):
                    succeeded = [video for video, ok in entries if ok]
                    videos = [video for video, _ in entries]
                    if retry_failed and len(succeeded) < len(videos):
                        if not dry_run:
                            self._drop_failed(name, every=not succeeded)
                        videos = succeeded
                    for video in videos:
                        digests.add(identity(video))
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
