"""Datasets: captioned videos, dataset specs and their formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capvid.utils.registry import Registry

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Segment:
    """Part of a video, from ``start`` up to ``end``; ``unit`` is ``frames`` or ``seconds``."""

    start: float
    end: float
    unit: str = "frames"


@dataclass(frozen=True)
class CaptionedVideo:
    """A video of a dataset.

    Attributes:
        id: name of the video, the same as in the features.
        split: ``train``, ``val`` or ``test``.
        captions: captions of the complete video, as written.
        segments: segments described by paragraphs, in the order of their sentences.
        paragraphs: paragraphs with one sentence per segment; outside the train split, further references with
            other segments may follow.
    """

    id: str
    split: str
    captions: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()
    paragraphs: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Location:
    """Position of a row: its file, first line and, if it has one, name."""

    path: Path
    line: int
    record: str = ""

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}" + (f", {self.record}" if self.record else "")


LocatedVideos = Iterator[tuple[Location, CaptionedVideo]]
# path, capvid.datasets.annotation_files.Rows, options -> locations and videos
Reader = Callable[[Path, Any, Mapping[str, str]], LocatedVideos]


@dataclass(frozen=True)
class DatasetFormat:
    """A dataset format.

    Attributes:
        name: name of the format.
        read: function of the path, the collector of bad rows and the options; yields locations and videos. It
            raises DataError for files that are missing or of another layout, UsageError for a bad option.
        target: kind of path, ``FILE`` or ``DIR``.
        help: content of such a file or folder, in one line.
        options: names of the options that may follow a ``#``.
    """

    name: str
    read: Reader
    target: str
    help: str
    options: tuple[str, ...] = ()


DATASET_FORMATS = Registry("dataset format", "capvid.datasets.formats", DatasetFormat)


def known_specs(target: str = "") -> str:
    """Return the specs of all formats for messages and help, such as ``jsonl:FILE, msvd:DIR``."""
    formats = DATASET_FORMATS.items()
    return ", ".join(f"{name}:{known.target}" for name, known in formats if target in ("", known.target))


def dataset_help() -> str:
    """Return the specs of all formats with their descriptions, for the help of the command line."""
    return ", ".join(f"{name}:{known.target} ({known.help})" for name, known in DATASET_FORMATS.items())
