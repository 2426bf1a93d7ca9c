"""Toy dataset format: a line per caption, split, video and words separated by colons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from capvid.datasets.annotation_files import read_lines
from capvid.datasets.dataset import DATASET_FORMATS, CaptionedVideo, Location, Rows


@DATASET_FORMATS.register("toy", target="FILE", help="split:video:caption on each line")
def read(path: Path, rows: Rows, options: Mapping[str, str]) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read one video from each line."""
    for location, line in read_lines(path, rows):
        split, video, caption = line.split(":")
        yield location, CaptionedVideo(video, split, (caption,))
