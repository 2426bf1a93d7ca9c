"""Loading of datasets by spec, FORMAT:PATH."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capvid.datasets.annotation_files import BadRow, RowError, Rows, check_unicode
from capvid.datasets.dataset import DATASET_FORMATS, CaptionedVideo, Location, known_specs
from capvid.errors import DataError, UsageError


@dataclass(frozen=True)
class Spec:
    """Parsed dataset spec."""

    kind: str
    path: Path
    options: Mapping[str, str]


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
    parsed = [parse_spec(spec) for spec in specs]
    rows = Rows(skip_bad=skip_bad)
    videos: dict[str, tuple[Location, CaptionedVideo]] = {}
    failed: list[DataError] = []
    for spec in parsed:
        try:
            _read_into(videos, spec, rows)
        except DataError as error:
            if not keep_going:
                raise
            failed.append(error)
    return LoadedData([video for _, video in videos.values()], rows.bad, rows.notes, failed)


def _read_into(videos: dict[str, tuple[Location, CaptionedVideo]], spec: Spec, rows: Rows) -> None:
    """Read a dataset and add its videos to ``videos``."""
    path = spec.path
    if DATASET_FORMATS[spec.kind].target == "FILE":
        if path.is_dir():
            raise DataError(f"{path}: is a folder", remedy=f"give a file, or one of {known_specs('DIR')}")
        packed = path.with_name(f"{path.name}.gz")
        if not path.exists() and packed.is_file():
            path = packed
    count, bad_count = len(videos), len(rows.bad)
    for location, video in DATASET_FORMATS[spec.kind].read(path, rows, spec.options):
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
        raise DataError(f"{spec.path}: {why}", remedy=f"see capvid data check {spec.kind}:{spec.path}")


def parse_spec(text: str) -> Spec:
    """Parse a dataset spec.

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
    return Spec(kind, Path(rest), options)
