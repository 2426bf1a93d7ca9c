"""COCO captions: a JSON file with ``images`` and ``annotations``.

The id of an image is its ``file_name`` without the suffix, or its number if it has no file name. Its split is
the field ``split``; images without this field are in the split that follows the path, as in
``coco:captions.json#split=val``, by default in train.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from capvid.datasets.annotation_files import lookup, read_grouped
from capvid.datasets.dataset import DATASET_FORMATS, SPLITS, LocatedVideos, RowError, Rows
from capvid.errors import UsageError

SPLIT_NAMES = {
    **{split: split for split in SPLITS},
    "training": "train",
    "restval": "train",
    "validation": "val",
    "validate": "val",
    "testing": "test",
}
_KEYS = {"videos": "images", "id_key": "id", "captions": "annotations", "reference_key": "image_id"}


@DATASET_FORMATS.register(
    "coco", target="FILE", help="COCO captions; #split=val for images that name no split", options=("split",)
)
def read(path: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read the images; the option ``split`` is that of images without a split of their own.

    Raises:
        UsageError: no such split.
    """
    default = options.get("split", "train")
    if default not in SPLITS:
        raise UsageError(f"{path}: no split {default!r}", remedy=f"use one of {', '.join(SPLITS)}")

    def name_and_split(row: Any) -> tuple[str, str]:
        split = lookup(row, "split", SPLIT_NAMES, default)
        file_name = row.get("file_name")
        if isinstance(file_name, str) and file_name.strip():
            image = PurePosixPath(file_name)
            if not image.name:
                raise RowError(f"not a file name: {reprlib.repr(file_name)}", "correct its 'file_name'")
            return image.with_suffix("").as_posix(), split
        return str(row["id"]), split

    yield from read_grouped(path, rows, name_and_split, **_KEYS)
