"""Shards of captions as Parquet: a row for each video, with the fields of its record as columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from capvid.errors import DataError
from capvid.files import open_regular
from capvid.output.rows import Row
from capvid.output.shards import ShardFormat, Written
from capvid.storage import Storage, filesystem, patiently, protocol_of
from capvid.video.lists import pyarrow_parquet


class ParquetCaptions(ShardFormat):
    """Records as columns; captions, segments and words are nested, settings are JSON."""

    extension = "parquet"

    def __init__(self) -> None:
        pyarrow_parquet()

    def encode(self, rows: Sequence[Row]) -> bytes:
        """Give the file's bytes."""
        import pyarrow as pa

        flat = [{**row.record, "settings": json.dumps(row.record["settings"])} for row in rows]
        return encoded(pa.Table.from_pylist(flat, schema=_schema()))

    def videos(self, storage: Storage, name: str) -> list[Written]:
        """Read two columns."""
        return written(storage, name)

    def without_failed(self, data: bytes) -> bytes:
        """Leave out rows."""
        return only_ok(data)


def _schema() -> Any:
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    word = pa.struct([("word", text), ("logprob", number), ("attention", pa.list_(number))])
    caption = pa.struct(
        [
            ("text", text),
            ("logprob", number),
            ("mean_logprob", number),
            ("generic", pa.bool_()),
            ("words", pa.list_(word)),
            ("times", pa.list_(number)),
        ]
    )
    segment = pa.struct(
        [
            ("start", number),
            ("end", number),
            ("caption", text),
            ("captions", pa.list_(caption)),
            ("memory_change", pa.list_(number)),
        ]
    )
    return pa.schema(
        [
            ("schema_version", pa.int32()),
            ("video", text),
            ("status", text),
            ("model", pa.struct([("name", text), ("revision", text)])),
            ("settings", text),
            ("duration", number),
            ("captions", pa.list_(caption)),
            ("segments", pa.list_(segment)),
            ("error", error_type()),
        ]
    )


def error_type() -> Any:
    """The column of what went wrong."""
    import pyarrow as pa

    return pa.struct([("kind", pa.string()), ("message", pa.string()), ("remedy", pa.string())])


def encoded(table: Any) -> bytes:
    """Give an Arrow table as the bytes of a Parquet file."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    pyarrow_parquet().write_table(table, sink, compression="zstd")
    found: bytes = sink.getvalue().to_pybytes()
    return found


def only_ok(data: bytes) -> bytes:
    """Leave out the rows of videos that failed.

    Raises:
        ValueError: the data are damaged.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        table = pyarrow_parquet().read_table(pa.BufferReader(data))
        return encoded(table.filter(pc.equal(table["status"], "ok")))
    except (KeyError, OSError, pa.ArrowException) as error:  # Arrow reports damage as OSError, too
        raise ValueError(str(error)) from error


def written(storage: Storage, name: str) -> list[Written]:
    """Read which videos are in a shard, and no more than that of it.

    Raises:
        DataError: it is no shard.
    """
    place = storage.place(name)
    parquet = pyarrow_parquet()
    import pyarrow as pa

    def action() -> list[Written]:
        remote = storage.local is None
        with filesystem(protocol_of(place)).open(place, "rb") if remote else open_regular(place) as file:
            try:
                rows = parquet.ParquetFile(file).read(columns=["video", "status"]).to_pylist()
                return [Written.of(row) for row in rows]
            except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                if isinstance(error, OSError) and (remote or error.errno is not None):
                    raise  # by the system or a server: Arrow's own have no number
                raise DataError(f"{place}: not a shard of capvid", remedy="move it elsewhere") from error

    return action() if storage.local is not None else patiently(place, "read", action)
