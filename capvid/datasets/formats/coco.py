"""COCO captions: a JSON file with ``images`` and ``annotations``.

The id of an image is its ``file_name`` without the suffix, or its number if it has no file name. Its split is
the field ``split``; images without this field are in the split that follows the path, as in
``coco:captions.json#split=val``, by default in train.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from capvid.datasets.annotation_files import JsonFile, Lists, Location, RowError, Rows, read_grouped
from capvid.datasets.dataset import SPLITS, CaptionedVideo, dataset_format
from capvid.errors import UsageError

_SPLITS = {
    **{split: split for split in SPLITS},
    "training": "train",
    "restval": "train",
    "validation": "val",
    "validate": "val",
    "testing": "test",
}
_LISTS = Lists(videos="images", id="id", captions="annotations", refers="image_id")


@dataset_format("coco", "FILE", "COCO captions; #split=val for images that name no split", options=("split",))
def read(path: Path, rows: Rows, options: Mapping[str, str]) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read the images; the option ``split`` is that of images without a split of their own.

    Raises:
        DataError: the file has another layout, or a bad row and these are not skipped.
        UsageError: no such split.
    """
    default = options.get("split", "train")
    if default not in SPLITS:
        raise UsageError(f"{path}: no split {default!r}", remedy=f"use one of {', '.join(SPLITS)}")

    def name_and_split(row: Any) -> tuple[str, str]:
        split = row.get("split", default)
        if not isinstance(split, str) or split not in _SPLITS:
            raise RowError(
                f"split {reprlib.repr(split)} is not one of {', '.join(SPLITS)}", "give one of them"
            )
        file_name = row.get("file_name")
        if isinstance(file_name, str) and file_name.strip():
            path = PurePosixPath(file_name)
            if not path.name:
                raise RowError(f"no name of a file: {reprlib.repr(file_name)}", "mend its 'file_name'")
            return path.with_suffix("").as_posix(), _SPLITS[split]
        return str(row["id"]), _SPLITS[split]

    yield from read_grouped(JsonFile(path), _LISTS, rows, name_and_split)
