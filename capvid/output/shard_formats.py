"""Shard formats: JSON lines and Parquet for captions, WebDataset and Parquet for features.

A WebDataset tar file holds the record of each video as ``KEY.json`` and, unless it failed, its feature file
as ``KEY.safetensors``. In Parquet, each video is a row: captions, segments and words are nested columns, and
each stream of features is one list of numbers with its shape.
"""

from __future__ import annotations

import io
import json
import tarfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from capvid.features.feature_file import features_from_bytes
from capvid.output.shards import INDEX, SHARD_FORMATS, Entry, Row, ShardFormat, not_a_shard
from capvid.utils.escaping import json_text
from capvid.utils.files import open_regular
from capvid.utils.storage import Storage, filesystem, patiently, protocol_of
from capvid.utils.validation import parse_json
from capvid.video.input_lists import pyarrow_parquet


@SHARD_FORMATS.register("captions/jsonl")
class JsonLines(ShardFormat):
    """One JSON record per line."""

    extension = "jsonl"

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Return the lines."""
        return b"".join(json_text(row.record).encode("utf-8") + b"\n" for row in rows)

    def entries(self, storage: Storage, name: str) -> list[Entry]:
        """Read the lines."""
        return [Entry.of(parse_json(line)) for line in storage.read(name).splitlines()]

    def without_failed(self, data: bytes) -> bytes:
        """Leave out lines."""
        return b"".join(line + b"\n" for line in data.splitlines() if Entry.of(parse_json(line)).ok)


@SHARD_FORMATS.register("features/webdataset")
class WebDataset(ShardFormat):
    """Tar file with two members per video."""

    extension = "tar"

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Return the bytes of the tar file."""
        members = []
        for row in rows:
            members.append((f"{row.key}.json", json_text(row.record).encode("utf-8")))
            if row.features is not None:
                members.append((f"{row.key}.safetensors", row.features))
        return _tar(members)

    def index_of(self, data: bytes) -> bytes:
        """Return the contents of each ``KEY.json`` as a line."""
        return b"".join(content + b"\n" for path, content in _members(data) if path.endswith(".json"))

    def entries(self, storage: Storage, name: str) -> list[Entry]:
        """Read the index, or the tar file if a run was killed between writing the two."""
        try:
            lines = storage.read(f"{name}.{INDEX}")
        except FileNotFoundError:
            lines = self.index_of(storage.read(name))
        return [Entry.of(parse_json(line)) for line in lines.splitlines()]

    def without_failed(self, data: bytes) -> bytes:
        """Leave out the records of videos that failed."""
        return _tar(
            (path, content)
            for path, content in _members(data)
            if not path.endswith(".json") or Entry.of(parse_json(content)).ok
        )


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
                    return [Entry.of(row) for row in table.to_pylist()]
                except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                    # Arrow reports damage as OSError, too, but without a number.
                    if isinstance(error, OSError) and (remote or error.errno is not None):
                        raise
                    raise not_a_shard(path) from error

        return patiently(path, "read", read) if remote else read()

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
        caption = [("text", text), ("logprob", number), ("mean_logprob", number), ("generic", pa.bool_())]
        captions = pa.list_(pa.struct([*caption, ("words", pa.list_(word)), ("times", numbers)]))
        segment = _struct(start=number, end=number, caption=text, captions=captions, memory_change=numbers)
        schema = _struct(
            schema_version=pa.int32(),
            video=text,
            status=text,
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
                features = features_from_bytes(row.features)
                record["header"], record["times"] = features.header.to_json(), features.times
                record["streams"] = [
                    {"shape": list(array.shape), "values": np.asarray(array, np.float32).reshape(-1)}
                    for array in features.streams
                ]
        return pa.Table.from_pylist(records, schema=pa.schema(schema))


def _struct(**fields: Any) -> Any:
    import pyarrow as pa

    return pa.struct(list(fields.items()))
