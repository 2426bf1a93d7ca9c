"""Charades: ``Charades_v1_train.csv`` and ``Charades_v1_test.csv``; the captions are the ``descriptions``.

Descriptions are separated by semicolons, and ``{}`` marks a missing one; without these there are 16,087, the
number in the HAM paper. The scripts that the actors followed are not captions.

The training file has 7985 videos, 16 of them without a description, and the test file 1863. The paper uses
7569 for training and 400 for validation and does not say which. Here the 400 ids with the smallest SHA-256
are for validation, whatever their order in the file; of a shorter file, the same share.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from capvid.datasets.annotation_files import Location, RowError, Rows, check_caption, find_splits, read_text
from capvid.datasets.dataset import CaptionedVideo, dataset_format
from capvid.errors import DataError

FILES = (("train", "Charades_v1_train.csv"), ("test", "Charades_v1_test.csv"))
VALIDATION, OF = 400, 7969
_NONE = "{}"


@dataset_format("charades", "DIR", "Charades as published")
def read(folder: Path, rows: Rows, options: Mapping[str, str]) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read the videos of all splits; videos without a description are skipped and noted.

    Raises:
        DataError: a file is missing or not CSV, or has a bad row and these are not skipped.
    """
    for split, path in find_splits(folder, FILES, rows):
        videos = []
        bare = 0
        for location, name, descriptions in _records(path, rows):
            with rows.at(location):
                captions = _captions(descriptions)
                if captions:
                    videos.append((location, CaptionedVideo(name, split, captions)))
                else:
                    bare += 1
        if bare:
            rows.notes.append(f"{path}: {bare} videos without a description ({_NONE}) are left out")
        held = _held_out([video.id for _, video in videos]) if split == "train" else set()
        for location, video in videos:
            yield location, replace(video, split="val") if video.id in held else video


def _captions(descriptions: str) -> tuple[str, ...]:
    if not descriptions.strip():
        raise RowError("no descriptions", f"write them, or {_NONE} where there are none")
    parts = [part.strip() for part in descriptions.split(";")]
    return tuple(check_caption(part) for part in parts if part not in (_NONE, ""))


def _held_out(names: list[str]) -> set[str]:
    """Return the ids of the validation split."""
    unique = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
    return set(unique[: len(unique) * VALIDATION // OF])


def _records(path: Path, rows: Rows) -> Iterator[tuple[Location, str, str]]:
    """Yield location, id and descriptions of each row."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    header: list[str] | None = None
    begun = 1
    try:
        for row in reader:
            location, begun = Location(path, begun), reader.line_num + 1
            if header is None:
                header = row
                if not {"id", "descriptions"} <= set(header):
                    raise DataError(
                        f"{location}: no columns id and descriptions",
                        remedy="give the file as it was published",
                    )
                continue
            if not row:
                continue
            with rows.at(location):
                if len(row) != len(header):
                    raise RowError(f"{len(row)} columns, and {len(header)} in the header", "mend the row")
                fields = dict(zip(header, row, strict=True))
                if not fields["id"].strip():
                    raise RowError("no id", "give each video one")
                yield location, fields["id"], fields["descriptions"]
    except csv.Error as error:
        raise DataError(f"{path}, line {begun}: not CSV ({error})", remedy="get the file again") from None
