"""Loading of datasets by spec, FORMAT:PATH."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capvid.datasets.annotation_files import BadRow, Location, RowError, Rows, whole_text
from capvid.datasets.dataset import DATASET_FORMATS, CaptionedVideo, known_specs
from capvid.errors import DataError, UsageError


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
        specs: each ``kind:path``, with the formats of :data:`DATASET_FORMATS`, or the path of a JSONL file.
        skip_bad: leave out rows that cannot be used, and count them.
        keep_going: gather why a data set cannot be used at all, and go on with the next one.

    Raises:
        DataError: a file cannot be used at all, or a row and ``skip_bad`` is off.
        UsageError: a spec that is not understood.
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
    """Read one data set into ``videos``."""
    before, bad_before = len(videos), len(rows.bad)
    for location, video in DATASET_FORMATS[spec.kind].read(_existing(spec), rows, spec.options):
        with rows.at(location):
            whole_text(video.id)
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
    """Return the path of a spec, with .gz if only that exists."""
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
    """Take a spec apart.

    Raises:
        UsageError: a kind or option that is not known, or no path.
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
    """Read data sets given as ``kind:path`` or ``FILE`` (JSONL); several extend one another.

    A JSONL file has ``{"id": ..., "split": ..., "captions": [...]}`` on each line, or, in place of the
    captions, ``"segments": [{"start": 0, "end": 4}, ...], "paragraphs": [[sentence, ...], ...]`` with a
    sentence for every segment; segments are numbers of frames unless ``"unit": "seconds"`` says otherwise. A
    TSV file has an id, a tabulator and a caption on each line, an id as often as it has captions, all of the
    train split.

    Args:
        specs: the data sets.
        skip_bad: skip unusable rows; :func:`load_data` also lists them.

    Raises:
        DataError: a file is missing or empty, a row cannot be used, or an id comes twice.
        UsageError: a kind of data set that is not known.
    """
    return load_data(specs, skip_bad=skip_bad).videos
