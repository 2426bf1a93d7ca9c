"""Shards of features: WebDataset's tar files, or Parquet.

In a tar file each video has ``KEY.json``, which says what became of it, and, unless it failed,
``KEY.safetensors``, the file of features that ``capvid extract`` writes; unpacked, these are such files. In
Parquet each video is a row, with the header as JSON and every stream as one list of numbers with its shape.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from capvid.digests import shown
from capvid.errors import DataError, FeatureFileError
from capvid.escaping import json_text
from capvid.features.extract import ExtractionResult
from capvid.features.file import Features, features_from_bytes, features_to_bytes
from capvid.output.parquet import encoded, error_type, only_ok, written
from capvid.output.records import error_record
from capvid.output.rows import Row
from capvid.output.shards import INDEX, Indexed, ShardFormat, Written
from capvid.parsing import parse_json
from capvid.storage import Storage
from capvid.video.lists import pyarrow_parquet


def features_row(result: ExtractionResult) -> Row:
    """What became of a video, as a row of a shard."""
    features, error = result.features, result.error
    record: dict[str, Any] = {
        "video": shown(result.path),
        "status": "ok" if features is not None else "error",
        "duration": None if features is None else features.seconds,
        "error": error_record(error),
    }
    return Row(
        video=record["video"],
        key=result.name,
        record=record,
        features=None if features is None else features_to_bytes(features),
        error=None if error is None else str(error),
        lost=result.lost,
        trace="" if error is None else error.trace,
    )


class WebDataset(Indexed):
    """A tar file with two members for each video."""

    extension = "tar"

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Give the tar file's bytes."""
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for row in rows:
                _add(tar, f"{row.key}.json", json_text(row.record).encode("utf-8"))
                if row.features is not None:
                    _add(tar, f"{row.key}.safetensors", row.features)
        return file.getvalue()

    def index_of(self, data: bytes) -> bytes:
        """Give a line for each video: what ``KEY.json`` says."""
        return b"".join(content + b"\n" for path, content in _members(data) if path.endswith(".json"))

    def videos(self, storage: Storage, name: str) -> list[Written]:
        """Read the file beside it, or the tar file, where a run ended between the two."""
        try:
            try:
                lines = storage.read(f"{name}.{INDEX}")
            except FileNotFoundError:
                lines = self.index_of(storage.read(name))
            return [Written.of(parse_json(line)) for line in lines.splitlines()]
        except ValueError as error:
            raise DataError(
                f"{storage.place(name)}: not a shard of capvid", remedy="move it elsewhere"
            ) from error

    def without_failed(self, data: bytes) -> bytes:
        """Leave out what is said of videos that failed."""
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, content in _members(data):
                if not path.endswith(".json") or Written.of(parse_json(content)).ok:
                    _add(tar, path, content)
        return file.getvalue()


class ParquetFeatures(ShardFormat):
    """A row for each video."""

    extension = "parquet"

    def __init__(self) -> None:
        pyarrow_parquet()

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Give the file's bytes."""
        import pyarrow as pa

        stream = pa.struct([("shape", pa.list_(pa.int64())), ("values", pa.list_(pa.float32()))])
        columns = [("video", pa.string()), ("status", pa.string()), ("duration", pa.float64())]
        columns += [("header", pa.string()), ("times", pa.list_(pa.float64()))]
        columns += [("streams", pa.list_(stream)), ("error", error_type())]
        table = pa.Table.from_pylist([_columns(row) for row in rows], schema=pa.schema(columns))
        return encoded(table)

    def videos(self, storage: Storage, name: str) -> list[Written]:
        """Read two columns."""
        return written(storage, name)

    def without_failed(self, data: bytes) -> bytes:
        """Leave out rows."""
        return only_ok(data)


def _columns(row: Row) -> dict[str, Any]:
    if row.features is None:
        return dict(row.record)
    features = features_from_bytes(row.features)
    return {
        **row.record,
        "header": features.header.to_json(),
        "times": features.times,
        "streams": [
            {"shape": list(array.shape), "values": np.asarray(array, np.float32).reshape(-1)}
            for array in features.streams
        ],
    }


def read_webdataset(data: bytes) -> Iterator[tuple[Mapping[str, Any], Features | None]]:
    """Give, of each video in a shard's bytes, what became of it and its features.

    Raises:
        FeatureFileError: it is no such shard.
    """
    records: dict[str, Mapping[str, Any]] = {}
    found: dict[str, Features] = {}
    try:
        for path, content in _members(data):
            key, _, extension = path.rpartition(".")
            if extension == "json":
                records[key] = parse_json(content)
            else:
                found[key] = features_from_bytes(content)
    except ValueError as error:
        raise FeatureFileError(f"not a shard of features ({error})") from error
    for key, record in records.items():
        yield record, found.get(key)


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Read the members of a tar file.

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


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
