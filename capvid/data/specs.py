"""Data sets by what is written after ``--data``: ``kind:path``, with options after a ``#``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capvid.data import activitynet, charades, coco, msrvtt, msvd, plain, youcook2
from capvid.data.captions import CaptionedVideo
from capvid.data.predictions import whole_text
from capvid.data.reading import BadRow, Place, RowError, Rows
from capvid.errors import DataError, UsageError

Reader = Callable[[Path, Rows, Mapping[str, str]], Iterator[tuple[Place, CaptionedVideo]]]


@dataclass(frozen=True)
class Kind:
    """A kind of data set.

    Attributes:
        read: reads the videos at a path.
        place: DIR or FILE, what the path is.
        options: names of what may follow the ``#``.
    """

    read: Reader
    place: str
    options: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    "jsonl": Kind(plain.read_jsonl, "FILE"),
    "tsv": Kind(plain.read_tsv, "FILE"),
    "coco": Kind(coco.read, "FILE", ("split",)),
    "msvd": Kind(msvd.read, "DIR", ("ids",)),
    "msrvtt": Kind(msrvtt.read, "DIR"),
    "charades": Kind(charades.read, "DIR"),
    "activitynet": Kind(activitynet.read, "DIR"),
    "youcook2": Kind(youcook2.read, "DIR"),
}


@dataclass(frozen=True)
class Spec:
    """A data set to read."""

    kind: str
    path: Path
    options: Mapping[str, str]


@dataclass(frozen=True)
class LoadedData:
    """What was read.

    Attributes:
        videos: in the order of the files.
        skipped: rows that could not be used and were left out.
        notes: what else is worth knowing, a line each.
        failed: why files could not be used at all, if that was not to be raised.
    """

    videos: list[CaptionedVideo]
    skipped: list[BadRow]
    notes: list[str]
    failed: list[DataError]


def load_data(specs: Sequence[str], *, skip_bad: bool = False, keep_going: bool = False) -> LoadedData:
    """Read data sets; several extend one another.

    Args:
        specs: each ``kind:path``, with the kinds of :data:`KINDS`, or the path of a JSONL file.
        skip_bad: leave out rows that cannot be used, and count them.
        keep_going: gather why a data set cannot be used at all, and go on with the next one.

    Raises:
        DataError: a file cannot be used at all, or a row and ``skip_bad`` is off.
        UsageError: a spec that is not understood.
    """
    parsed = [parse_spec(spec) for spec in specs]
    rows = Rows(skip_bad=skip_bad)
    found: dict[str, tuple[Place, CaptionedVideo]] = {}
    failed: list[DataError] = []
    for spec in parsed:
        try:
            _add(spec, rows, found)
        except DataError as error:
            if not keep_going:
                raise
            failed.append(error)
    return LoadedData([video for _, video in found.values()], rows.bad, rows.notes, failed)


def _add(spec: Spec, rows: Rows, found: dict[str, tuple[Place, CaptionedVideo]]) -> None:
    """Read one data set into ``found``."""
    before, bad_before = len(found), len(rows.bad)
    for place, video in KINDS[spec.kind].read(_existing(spec), rows, spec.options):
        with rows.at(place):
            whole_text(video.id)
            if video.id in found:
                raise RowError(
                    f"the video {video.id} comes twice (first at {found[video.id][0]})",
                    "give each video one row",
                )
            found[video.id] = (place, video)
    if len(found) == before:
        bad = len(rows.bad) - bad_before
        why = f"none of its rows can be used ({rows.bad[-1]})" if bad else "no captions in this file"
        raise DataError(f"{spec.path}: {why}", remedy=f"see capvid data check {spec.kind}:{spec.path}")


def _existing(spec: Spec) -> Path:
    """The path of a spec, with .gz behind it where only that is there."""
    if KINDS[spec.kind].place == "FILE":
        if spec.path.is_dir():
            folders = ", ".join(f"{name}:DIR" for name, kind in KINDS.items() if kind.place == "DIR")
            raise DataError(f"{spec.path}: is a folder", remedy=f"give a file, or one of {folders}")
        packed = spec.path.with_name(f"{spec.path.name}.gz")
        if not spec.path.exists() and packed.is_file():
            return packed
    return spec.path


def parse_spec(text: str) -> Spec:
    """Take a spec apart.

    Raises:
        UsageError: a kind or option that is not known, or no path.
    """
    kind, colon, rest = text.partition(":")
    if Path(text).exists() or not colon or (kind not in KINDS and (len(kind) < 2 or not kind.isalnum())):
        kind, rest = "jsonl", text
    if kind not in KINDS:
        kinds = ", ".join(f"{name}:{known.place}" for name, known in KINDS.items())
        raise UsageError(f"{text}: no such kind of data set", remedy=f"use one of {kinds}")
    options: dict[str, str] = {}
    if KINDS[kind].options and "#" in rest and not Path(rest).exists():
        rest, _, fragment = rest.rpartition("#")
        for item in fragment.split("&"):
            key, equals, value = item.partition("=")
            if key not in KINDS[kind].options or not equals or not value:
                known = ", ".join(f"{name}=..." for name in KINDS[kind].options)
                raise UsageError(f"{text}: {item!r} is not understood after the #", remedy=f"use {known}")
            options[key] = value
    if not rest:
        raise UsageError(f"{text}: no path", remedy=f"write {kind}:{KINDS[kind].place}")
    return Spec(kind, Path(rest), options)
