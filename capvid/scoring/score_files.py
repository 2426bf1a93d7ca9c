"""Scores of each video as a file: JSON, JSONL, CSV or TSV by its suffix."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from capvid.errors import UsageError
from capvid.utils.escaping import json_text, table_cell
from capvid.utils.files import atomic_write_text

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv")


def check_suffix(path: Path) -> None:
    """Refuse a file name whose suffix is not one of :data:`SUFFIXES`.

    Raises:
        UsageError: it is not.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: no format {path.suffix or 'without suffix'}", remedy=f"use {', '.join(SUFFIXES)}"
        )


def write_scores(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write a row for each video, replacing the file at once.

    Args:
        path: whose suffix says the format.
        rows: values by column; a value may be missing, and is null or an empty cell then.
        columns: in their order.

    Raises:
        UsageError: the suffix is of no format.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    suffix = path.suffix.lower()
    records = [{column: row.get(column) for column in columns} for row in rows]
    if suffix == ".json":
        text = json_text(records, indent=1) + "\n"
    elif suffix == ".jsonl":
        text = "".join(json_text(record) + "\n" for record in records)
    elif suffix == ".tsv":
        lines = [columns, *([_cell(value) for value in record.values()] for record in records)]
        text = "".join("\t".join(line) + "\n" for line in lines)
    else:
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in record.values()] for record in records)
        text = stream.getvalue()
    atomic_write_text(path.resolve(), text)  # a link stays one


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return table_cell(value)
    return "" if value is None else str(value)
