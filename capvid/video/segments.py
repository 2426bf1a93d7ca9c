"""Where a video is cut into segments, each of which gets a sentence: equal parts, or as a file says.

Where its features change (``--segments auto``) is found in :mod:`capvid.features.boundaries`.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np

from capvid.errors import DataError
from capvid.files import read_regular
from capvid.limits import limits
from capvid.parsing import parse_json
from capvid.storage import VideoPath
from capvid.video.sampling import Sampling, nearest

Span = tuple[float, float]
_FORMS = (
    "write JSON with a list of {start, end} for every video, or of such lists by video, "
    "or CSV with the columns start,end or video,start,end; times in seconds"
)
_VIDEO = ("video", "id", "video_id", "path")
_SPANS = ("segments", "timestamps")


class Segmentation(Protocol):
    """What cuts videos into segments."""

    @property
    def spec(self) -> str:
        """The cut as text, for the records."""

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Choose the frames that are needed, by index.

        Args:
            path: of the video.
            times: (N,) of its frames in seconds, ascending.
            duration: in seconds.
            sampling: which frames the captioner wants of a segment.

        Returns:
            indices, ascending and distinct.
        """

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Give the segments by start and end in seconds, in the order of their starts.

        Args:
            path: of the video.
            features: (T, D), or maps (T, L, D), of the frames that were chosen.
            times: (T,) of these in seconds.
            duration: of the video, in seconds.

        Raises:
            DataError: it is not known where to cut this video.
        """


def frames_within(span: Span, times: np.ndarray, duration: float) -> np.ndarray:
    """The frames of a segment by their times (T,): indices; if there are none, the one nearest to its middle.

    What is shown at the end or after it belongs to the last segment.
    """
    start, end = span
    first, stop = np.searchsorted(times, span)
    stop = len(times) if end >= duration else stop
    if first >= stop:
        return nearest(np.array([(start + end) / 2]), times)
    return np.arange(first, stop)


def _chosen(spans: Iterable[Span], times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
    """The frames that ``sampling`` chooses in each of the segments, by index."""
    found = []
    for span in spans:
        here = frames_within(span, times, duration)
        found.append(here[sampling.choose(times[here])])
    return np.unique(np.concatenate(found))


@dataclass(frozen=True)
class EqualSegments:
    """So many segments of equal length.

    Attributes:
        count: how many.
    """

    count: int

    @property
    def spec(self) -> str:
        """The number."""
        return str(self.count)

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Choose in every segment what the sampling would choose of a video."""
        if self.count > len(times):  # of which nothing comes
            return sampling.choose(times)
        return _chosen(self._equal(duration), times, duration, sampling)

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Cut from the beginning to the end; a single picture stays whole.

        Raises:
            DataError: there are more segments than frames to tell about.
        """
        if duration > 0 and self.count > len(times):
            raise DataError(
                f"{path}: {self.count} segments, and only {len(times)} frames to look at in them",
                remedy="ask for fewer segments",
            )
        return self._equal(duration)

    def _equal(self, duration: float) -> list[Span]:
        if duration <= 0:
            return [(0.0, 0.0)]
        edges = [duration * number / self.count for number in range(self.count + 1)]
        return list(pairwise(edges))


@dataclass(frozen=True)
class GivenSegments:
    """Segments that a file gives, for every video the same or for each its own.

    Attributes:
        path: of the file.
        spec: its name and a digest of what it says.
        common: for videos that it does not name.
        named: by video: its path as given, its file name, with or without extension.
    """

    path: Path
    spec: str
    common: tuple[Span, ...] = ()
    named: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Choose in every segment what the sampling would choose of a video."""
        spans = [span for span in self._of(path) if span[0] < duration]
        return _chosen(spans, times, duration, sampling) if spans else sampling.choose(times)

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Give the segments of this video; an end behind its end is cut off.

        Raises:
            DataError: the file has none for it, or one that begins after its end.
        """
        spans = self._of(path)
        if not spans:
            raise DataError(
                f"{path}: {self.path} has no segments for it",
                remedy="name the video by its path or file name",
            )
        for start, end in spans:
            if start >= duration:
                raise DataError(
                    f"{path}: {self.path} has a segment from {start:g} to {end:g} s, and the video is "
                    f"{duration:.3f} s long",
                    remedy="see whether the segments are of this video, and in seconds",
                )
        return [(start, min(end, duration)) for start, end in spans]

    def _of(self, path: VideoPath) -> tuple[Span, ...]:
        names = (str(path), PurePath(path).as_posix(), path.name, path.stem)
        return next((self.named[name] for name in names if name in self.named), self.common)


def read_segments(path: Path) -> GivenSegments:
    """Read a file of segments: JSON, JSON lines (also what ``capvid caption`` wrote), CSV or TSV.

    Raises:
        DataError: it cannot be read, or says something else; with the place in it.
    """
    try:
        raw = read_regular(path, max_bytes=limits().text_bytes)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})", remedy=_FORMS) from error
    rows = _json_rows(path, text) if text.lstrip()[:1] in ("{", "[") else _table_rows(path, text)
    found: dict[str | None, list[Span]] = {}
    for place, video, value in rows:
        found.setdefault(video, []).append(_span(path, place, value))
    if not found:
        raise DataError(f"{path}: no segments in this file", remedy=_FORMS)
    ordered = {video: tuple(sorted(spans)) for video, spans in found.items()}
    return GivenSegments(
        path=path,
        spec=f"{path.name}@{hashlib.sha256(raw).hexdigest()[:12]}",
        common=ordered.pop(None, ()),
        named={video: spans for video, spans in ordered.items() if video is not None},
    )


Row = tuple[str, str | None, Any]  # where it stands, of which video if it is said, and the segment


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    try:
        values = [parse_json(text)]
    except ValueError:
        try:
            values = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error})", remedy=_FORMS) from error
    for value in values:
        yield from _found_in(value, None, "segment")


def _found_in(value: Any, video: str | None, place: str) -> Iterator[Row]:
    """The segments in a JSON value: of one video, of a list of records, or by video."""
    if isinstance(value, Mapping):
        named = next((str(value[key]) for key in _VIDEO if isinstance(value.get(key), str)), video)
        inner = next((key for key in _SPANS if isinstance(value.get(key), list)), None)
        if inner is not None:
            yield from _found_in(value[inner], named, place)
        elif "start" in value or "end" in value:
            yield place, named, (value.get("start"), value.get("end"))
        elif value.get("status") != "error":
            for name, spans in value.items():
                yield from _found_in(spans, name, f"{name}, segment")
    elif isinstance(value, list) and not (len(value) == 2 and not isinstance(value[0], list | Mapping)):
        for number, item in enumerate(value, 1):
            yield from _found_in(item, video, f"{place} {number}")
    else:
        yield place, video, value


def _table_rows(path: Path, text: str) -> Iterator[Row]:
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    rows = csv.reader(lines, delimiter="\t" if "\t" in first else ",")
    columns: Sequence[str] = ("start", "end")
    for number, cells in enumerate(_checked(path, rows), 1):
        cells = [cell.strip() for cell in cells]
        if not any(cells):
            continue
        if "start" in map(str.lower, cells):
            columns = [cell.lower() for cell in cells]
            continue
        row = dict(zip(columns, cells, strict=False))
        video = next((row[key] for key in _VIDEO if row.get(key)), None)
        yield f"line {number}", video, (row.get("start"), row.get("end"))


def _checked(path: Path, rows: Iterator[list[str]]) -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise DataError(f"{path}: not a valid table ({error})", remedy=_FORMS) from error


def _span(path: Path, place: str, value: Any) -> Span:
    """A segment's start and end in seconds."""
    start, end = map(_seconds, value) if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    if start is None or end is None:
        raise DataError(f"{path}: {place}: no start and end in seconds ({value!r:.60})", remedy=_FORMS)
    if not 0 <= start < end:
        raise DataError(
            f"{path}: {place}: from {start:g} to {end:g} s",
            remedy="let segments end after they begin, at 0 or later",
        )
    return start, end


def _seconds(value: Any) -> float | None:
    """A time in seconds, of a number or a text such as ``1:02:03.5``."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parts = [float(part) for part in str(value).replace(",", ".").split(":")]
    except ValueError:
        return None
    if len(parts) > 3:
        return None
    seconds = sum(part * 60**power for power, part in enumerate(reversed(parts)))
    return seconds if math.isfinite(seconds) else None
