"""Loading of datasets by spec, FORMAT:PATH."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capvid.datasets.annotation_files import BadRow, Location, RowError, Rows, check_unicode
from capvid.datasets.dataset import DATASET_FORMATS, CaptionedVideo, known_specs
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
            _add(spec, rows, videos)
        except DataError as error:
            if not keep_going:
                raise
            failed.append(error)
    return LoadedData([video for _, video in videos.values()], rows.bad, rows.notes, failed)


def _add(spec: Spec, rows: Rows, videos: dict[str, tuple[Location, CaptionedVideo]]) -> None:
    """Add the videos of a dataset to ``videos``."""
    before, bad_before = len(videos), len(rows.bad)
    for location, video in DATASET_FORMATS[spec.kind].read(_existing(spec), rows, spec.options):
        with rows.at(location):
            check_unicode(video.id)
            if video.id in videos:
                raise RowError(
                    f"the video {video.id} comes twice (first at {videos[video.id][0]})",
                    "give each video one row",
                )
            videos[video.id] = (location, video)
    if len(videos) == before:
        bad = len(rows.bad) - bad_before
        why = f"none of its rows can be used ({rows.bad[-1]})" if bad else "no captions in this file"
        raise DataError(f"{spec.path}: {why}", remedy=f"see capvid data check {spec.kind}:{spec.path}")


def _existing(spec: Spec) -> Path:
    """Return the path of a spec, with .gz if only that file exists."""
    if DATASET_FORMATS[spec.kind].target == "FILE":
        if spec.path.is_dir():
            raise DataError(
                f"{spec.path}: is a folder", remedy=f"give a file, or one of {known_specs('DIR')}"
            )
        packed = spec.path.with_name(f"{spec.path.name}.gz")
        if not spec.path.exists() and packed.is_file():
            return packed
    return spec.path


def parse_spec(text: str) -> Spec:
    """Parse a dataset spec.

    Raises:
        UsageError: an unknown format or option, or no path.
    """
    kind, colon, rest = text.partition(":")
    if (
        Path(text).exists()
        or not colon
        or (kind not in DATASET_FORMATS and (len(kind) < 2 or not kind.isalnum()))
    ):
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


def load_captions(specs: Sequence[str], *, skip_bad: bool = False) -> list[CaptionedVideo]:
    """Return the videos of datasets; arguments and errors are those of :func:`load_data`."""
    return load_data(specs, skip_bad=skip_bad).videos
