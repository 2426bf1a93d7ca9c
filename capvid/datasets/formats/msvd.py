"""MSVD: ``sents_train_lc_nopunc.txt`` and so on, with lines of id, tab and sentence.

The ids there are ``vid1`` to ``vid1970``. With ``youtube_mapping.txt`` in the folder, videos are named after
their clips (YouTube id, start, end) instead; ``msvd:DIR#ids=vid`` keeps the ids. The published splits have
1200, 100 and 670 videos.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from capvid.datasets.annotation_files import find_file, find_splits, read_lines
from capvid.datasets.dataset import DATASET_FORMATS, SPLITS, CaptionedVideo, LocatedVideos, RowError, Rows
from capvid.datasets.formats.caption_files import captions_by_id
from capvid.errors import UsageError

FILES = tuple((split, f"sents_{split}_lc_nopunc.txt") for split in SPLITS)
MAPPING = "youtube_mapping.txt"


@DATASET_FORMATS.register(
    "msvd", target="DIR", help="MSVD as published; #ids=vid keeps its own ids", options=("ids",)
)
def read(folder: Path, rows: Rows, options: Mapping[str, str]) -> LocatedVideos:
    """Read the videos of all splits; the option ``ids`` is ``vid`` or ``youtube``.

    Raises:
        UsageError: an unknown value of ``ids``.
    """
    ids = options.get("ids")
    if ids not in (None, "vid", "youtube"):
        raise UsageError(f"{folder}: no ids {ids!r}", remedy="use vid or youtube")
    mapping = None if ids == "vid" else find_file(folder, MAPPING)
    if ids == "youtube" and mapping is None:
        raise UsageError(f"{folder}: no {MAPPING}", remedy="put it there, or use ids=vid")
    clips = _clips_by_id(mapping, rows) if mapping else None
    for split, path in find_splits(folder, FILES, rows):
        for name, (location, captions) in captions_by_id(read_lines(path, rows), rows).items():
            with rows.at(location):
                if clips is not None and name not in clips:
                    raise RowError(f"{name} is not in {MAPPING}", "add it there, or use msvd:DIR#ids=vid")
                yield location, CaptionedVideo(clips[name] if clips else name, split, tuple(captions))


def _clips_by_id(path: Path, rows: Rows) -> dict[str, str]:
    """Return the names of the clips by id."""
    clips: dict[str, str] = {}
    for location, line in read_lines(path, rows):
        with rows.at(location):
            columns = line.split()
            if len(columns) != 2:
                raise RowError(f"{len(columns)} columns", "write the clip's name, a space and its id")
            clip, video = columns
            if video in clips:
                raise RowError(f"the id {video} occurs twice", "give each id one line")
            clips[video] = clip
    return clips
