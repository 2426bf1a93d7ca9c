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

from capvid.datasets.annotation_files import check_caption, find_splits, read_text
from capvid.datasets.dataset import DATASET_FORMATS, CaptionedVideo, LocatedVideos, Location, RowError, Rows
from capvid.errors import DataError

FILES = (("train", "Charades_v1_train.csv"), ("test", "Charades_v1_test.csv"))
VALIDATION, DESCRIBED = 400, 7969  # videos of the published training file
_MISSING = "{}"


@DATASET_FORMATS.register("charades", target="DIR", help="Charades as published")
def read(folder: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read the videos of all splits; videos without a description are skipped and noted."""
    for split, path in find_splits(folder, FILES, rows):
        videos: list[tuple[Location, CaptionedVideo]] = []
        undescribed = 0
        for location, name, descriptions in _records(path, rows):
            with rows.at(location):
                if not descriptions.strip():
                    raise RowError("no descriptions", f"write them, or {_MISSING} where there are none")
                parts = [part.strip() for part in descriptions.split(";")]
                captions = tuple(check_caption(part) for part in parts if part not in (_MISSING, ""))
                if captions:
                    videos.append((location, CaptionedVideo(name, split, captions)))
                else:
                    undescribed += 1
        if undescribed:
            rows.notes.append(f"{path}: {undescribed} videos without a description ({_MISSING}) are left out")
        validation: set[str] = set()
        if split == "train":
            names = {video.id for _, video in videos}
            shuffled = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
            validation.update(shuffled[: len(shuffled) * VALIDATION // DESCRIBED])
        for location, video in videos:
            yield location, replace(video, split="val") if video.id in validation else video


def _records(path: Path, rows: Rows) -> Iterator[tuple[Location, str, str]]:
    """Yield location, id and descriptions of each row."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    header: list[str] = []
    line = 1
    try:
        for row in reader:
            location, line = Location(path, line), reader.line_num + 1
            if not header:
                header = row
                if not {"id", "descriptions"} <= set(header):
                    problem = f"{location}: no columns id and descriptions"
                    raise DataError(problem, remedy="give the file as it was published")
            elif row:
                with rows.at(location):
                    if len(row) != len(header):
                        problem = f"{len(row)} columns, and {len(header)} in the header"
                        raise RowError(problem, "correct the row")
                    fields = dict(zip(header, row, strict=True))
                    if not fields["id"].strip():
                        raise RowError("no id", "give each video one")
                    yield location, fields["id"], fields["descriptions"]
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not CSV ({error})", remedy="get the file again") from None
