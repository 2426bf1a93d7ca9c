"""Datasets: captioned videos, their formats, and loading by spec, FORMAT:PATH."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from capvid.errors import DataError, UsageError
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


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, with the reason and a remedy."""

    location: Location
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return " ".join(f"{self.location}: {self.reason}".split())


class RowError(Exception):
    """Raised inside :meth:`Rows.at` for a row that cannot be used."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Rows:
    """Collector of bad rows and of notes about the files.

    Args:
        skip_bad: whether to skip bad rows; otherwise the first one raises an error.

    Attributes:
        bad: bad rows so far.
        notes: further remarks about the files, one line each.
    """

    def __init__(self, *, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.bad: list[BadRow] = []
        self.notes: list[str] = []

    @contextmanager
    def at(self, location: Location) -> Iterator[None]:
        """Record a RowError of the block as a bad row.

        Raises:
            DataError: a bad row, unless they are skipped.
        """
        try:
            yield
        except RowError as error:
            self.bad.append(BadRow(location, error.reason, error.remedy))
            if not self.skip_bad:
                raise DataError(f"{location}: {error.reason}", remedy=error.remedy) from None


def check_unicode(text: str) -> str:
    """Return ``text`` unchanged; raise RowError if it has an unpaired surrogate, which cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"an unpaired surrogate in {reprlib.repr(text)}", "correct its \\u escapes") from None
    return text


LocatedVideos = Iterator[tuple[Location, CaptionedVideo]]
Reader = Callable[[Path, Rows, Mapping[str, str]], LocatedVideos]


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


@dataclass(frozen=True)
class LoadedData:
    """Videos of the datasets, and what was left out.

    Attributes:
        videos: videos in the order of the files.
        skipped: bad rows that were skipped.
        notes: further remarks, one line each.
        failed: errors of unusable files, with ``keep_going``.
    """

    videos: list[CaptionedVideo]
    skipped: list[BadRow]
    notes: list[str]
    failed: list[DataError]


def load_data(specs: Sequence[str], *, skip_bad: bool = False, keep_going: bool = False) -> LoadedData:
    """Read one or more datasets.

    Args:
        specs: ``FORMAT:PATH`` with a name in :data:`DATASET_FORMATS`, or the path of a JSONL file.
        skip_bad: skip and collect bad rows.
        keep_going: collect the errors of unusable datasets instead of raising the first.

    Raises:
        DataError: an unusable file, or a bad row without ``skip_bad``.
        UsageError: an invalid spec.
    """
    parsed = [parse_spec(spec) for spec in specs]  # before anything is read
    rows = Rows(skip_bad=skip_bad)
    videos: dict[str, tuple[Location, CaptionedVideo]] = {}
    failed: list[DataError] = []
    for kind, path, options in parsed:
        try:
            _read_into(videos, rows, kind, path, options)
        except DataError as error:
            if not keep_going:
                raise
            failed.append(error)
    return LoadedData([video for _, video in videos.values()], rows.bad, rows.notes, failed)


def _read_into(
    videos: dict[str, tuple[Location, CaptionedVideo]],
    rows: Rows,
    kind: str,
    path: Path,
    options: Mapping[str, str],
) -> None:
    """Read a dataset and add its videos to ``videos``."""
    spec = f"{kind}:{path}"
    if DATASET_FORMATS[kind].target == "FILE":
        if path.is_dir():
            raise DataError(f"{path}: is a folder", remedy=f"give a file, or one of {known_specs('DIR')}")
        packed = path.with_name(f"{path.name}.gz")
        if not path.exists() and packed.is_file():
            path = packed
    count, bad_count = len(videos), len(rows.bad)
    for location, video in DATASET_FORMATS[kind].read(path, rows, options):
        with rows.at(location):
            check_unicode(video.id)
            if video.id in videos:
                first, _ = videos[video.id]
                raise RowError(
                    f"the video {video.id} occurs twice (first at {first})", "give each video one row"
                )
            videos[video.id] = (location, video)
    if len(videos) == count:
        all_bad = len(rows.bad) > bad_count
        why = f"none of its rows can be used ({rows.bad[-1]})" if all_bad else "no captions in this file"
        raise DataError(f"{spec.partition(':')[2]}: {why}", remedy=f"see capvid data check {spec}")


def parse_spec(text: str) -> tuple[str, Path, Mapping[str, str]]:
    """Parse a dataset spec; return format, path and options.

    Raises:
        UsageError: an unknown format or option, or no path.
    """
    kind, colon, rest = text.partition(":")
    is_drive_or_folder = len(kind) < 2 or not kind.isalnum()  # in front of a colon that is part of a path
    if Path(text).exists() or not colon or (kind not in DATASET_FORMATS and is_drive_or_folder):
        kind, rest = "jsonl", text
    if kind not in DATASET_FORMATS:
        raise UsageError(f"{text}: no such dataset format", remedy=f"use one of {known_specs()}")
    known = DATASET_FORMATS[kind]
    options: dict[str, str] = {}
    if known.options and "#" in rest and not Path(rest).exists():
        rest, _, fragment = rest.rpartition("#")
        for item in fragment.split("&"):
            key, equals, value = item.partition("=")
            if key not in known.options or not equals or not value:
                usage = ", ".join(f"{name}=..." for name in known.options)
                raise UsageError(f"{text}: {item!r} is not understood after the #", remedy=f"use {usage}")
            options[key] = value
    if not rest:
        raise UsageError(f"{text}: no path", remedy=f"write {kind}:{known.target}")
    return kind, Path(rest), options
