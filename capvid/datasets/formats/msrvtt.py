"""MSR-VTT: ``train_val_videodatainfo.json`` and ``test_videodatainfo.json``, 20 captions per video.

The published splits have 6513, 497 and 2990 videos.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from capvid.datasets.annotation_files import (
    JsonFile,
    Lists,
    Location,
    RowError,
    Rows,
    find_splits,
    read_grouped,
)
from capvid.datasets.dataset import CaptionedVideo, dataset_format

FILES = (("train and val", "train_val_videodatainfo.json"), ("test", "test_videodatainfo.json"))
_SPLITS = {"train": "train", "validate": "val", "test": "test"}
_LISTS = Lists(videos="videos", id="video_id", captions="sentences", refers="video_id")


@dataset_format("msrvtt", "DIR", "MSR-VTT as published")
def read(folder: Path, rows: Rows, options: Mapping[str, str]) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read the videos of all splits.

    Raises:
        DataError: the files are missing or not as published, or have a bad row and these are not skipped.
    """
    for _, path in find_splits(folder, FILES, rows):
        yield from read_grouped(JsonFile(path), _LISTS, rows, _name_and_split)


def _name_and_split(row: Any) -> tuple[str, str]:
    split = row.get("split")
    if not isinstance(split, str) or split not in _SPLITS:
        raise RowError(
            f"split {reprlib.repr(split)} is not one of {', '.join(_SPLITS)}", "give each video one of them"
        )
    return str(row["video_id"]), _SPLITS[split]
