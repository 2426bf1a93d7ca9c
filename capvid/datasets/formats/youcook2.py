"""YouCookII: ``youcookii_annotations_trainval.json``.

In its place ``captioning_train.json`` and ``captioning_val.json`` are taken. There are 1333 videos for
training and 457 for validation, each with one paragraph; the test videos' annotations are not published.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from capvid.datasets.annotation_files import (
    JsonFile,
    Place,
    RowError,
    Rows,
    find_file,
    find_splits,
    member,
    note_mended,
    read_timed,
    told,
)
from capvid.datasets.dataset import CaptionedVideo, dataset_format

FILE = "youcookii_annotations_trainval.json"
FILES = (("train", "captioning_train.json"), ("val", "captioning_val.json"))
_SPLITS = {"training": "train", "validation": "val", "testing": "test"}


@dataset_format("youcook2", "DIR", "YouCookII as published")
def read(folder: Path, rows: Rows, options: Mapping[str, str]) -> Iterator[tuple[Place, CaptionedVideo]]:
    """Read the videos of both splits.

    Raises:
        DataError: the files are missing or not as published, or a row is not and bad rows are not skipped.
    """
    path = find_file(folder, FILE)
    if path is None:
        for split, one in find_splits(folder, FILES, rows):
            yield from read_timed(one, split, rows)
        return
    mended: list[str] = []
    for place, name, row in JsonFile(path).members("database"):
        with rows.at(place):
            subset = member(row, "subset", str, "split")
            if subset not in _SPLITS:
                raise RowError(
                    f"subset {reprlib.repr(subset)} is not one of {', '.join(_SPLITS)}", "give one of them"
                )
            told_of = member(row, "annotations", list, "list of annotations")
            times = [member(one, "segment", list, "segment") for one in told_of]
            sentences = [one.get("sentence") for one in told_of]
            yield place, told(name, _SPLITS[subset], times, sentences, mended)
    note_mended(path, mended, rows)
