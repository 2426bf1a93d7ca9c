"""MSR-VTT: ``train_val_videodatainfo.json`` and ``test_videodatainfo.json``, 20 captions per video.

The published splits have 6513, 497 and 2990 videos.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from capvid.datasets.annotation_files import find_splits, lookup, read_grouped
from capvid.datasets.dataset import DATASET_FORMATS, LocatedVideos, Rows

FILES = (("train and val", "train_val_videodatainfo.json"), ("test", "test_videodatainfo.json"))
_SPLITS = {"train": "train", "validate": "val", "test": "test"}
_KEYS = {"videos": "videos", "id_key": "video_id", "captions": "sentences", "reference_key": "video_id"}


@DATASET_FORMATS.register("msrvtt", target="DIR", help="MSR-VTT as published")
def read(folder: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read the videos of all splits."""
    for _, path in find_splits(folder, FILES, rows):
        yield from read_grouped(
            path, rows, lambda row: (str(row["video_id"]), lookup(row, "split", _SPLITS)), **_KEYS
        )
