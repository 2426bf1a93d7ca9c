"""Segmentation of videos: equal parts, segments from a file, or cuts where the features change."""

from __future__ import annotations

import csv
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np

from capvid.errors import DataError, UsageError
from capvid.utils.files import read_regular
from capvid.utils.limits import limits
from capvid.utils.storage import VideoPath
from capvid.utils.validation import parse_json
from capvid.video.frame_sampling import MAX_FRAMES, RateSampling, Sampling, UniformSampling, nearest

Span = tuple[float, float]
_FORMS = (
    "write JSON with a list of {start, end} for every video, or of such lists by video, "
    "or CSV with the columns start,end or video,start,end; times in seconds"
)
_VIDEO = ("video", "id", "video_id", "path")
_SPANS = ("segments", "timestamps")


class Segmentation(Protocol):
    """Rule that divides videos into segments."""

    @property
    def spec(self) -> str:
        """The rule as text, for records."""

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Return the indices of the frames that are needed, ascending and distinct.

        Args:
            path: path of the video.
            times: times of its frames in seconds, ascending, (N,).
            duration: duration in seconds.
            sampling: the captioner's sampling within a segment.
        """

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Return start and end of each segment in seconds, ordered by start.

        Args:
            path: path of the video.
            features: features of the chosen frames, (T, D) or (T, L, D).
            times: times of these in seconds, (T,).
            duration: duration of the video in seconds.

        Raises:
            DataError: the segments of this video are unknown or do not fit it.
        """


def frames_within(span: Span, times: np.ndarray, duration: float) -> np.ndarray:
    """Return the indices of a segment's frames from their times (T,), at least the one nearest to its middle.

    Frames at the end of the video or after it belong to the last segment.
    """
    start, end = span
    first, stop = np.searchsorted(times, span)
    stop = len(times) if end >= duration else stop
    if first >= stop:
        return nearest(np.array([(start + end) / 2]), times)
    return np.arange(first, stop)


def _choose_in_each(
    spans: Iterable[Span], times: np.ndarray, duration: float, sampling: Sampling
) -> np.ndarray:
    """Return the indices of the frames that ``sampling`` chooses in each of the segments."""
    inner = (frames_within(span, times, duration) for span in spans)
    return np.unique(np.concatenate([indices[sampling.choose(times[indices])] for indices in inner]))


@dataclass(frozen=True)
class EqualSegments:
    """``count`` segments of equal length."""

    count: int

    @property
    def spec(self) -> str:
        """The number."""
        return str(self.count)

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Return the frames that the sampling chooses in every segment."""
        if self.count > len(times):  # spans() will refuse
            return sampling.choose(times)
        return _choose_in_each(self._equal(duration), times, duration, sampling)

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Divide the video from beginning to end; a single image stays undivided.

        Raises:
            DataError: there are more segments than frames.
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
        return list(pairwise(duration * number / self.count for number in range(self.count + 1)))


@dataclass(frozen=True)
class GivenSegments:
    """Segments from a file, common to all videos or specific to each.

    Attributes:
        path: path of the file.
        spec: name of the file and a digest of its content.
        common: segments of videos that the file does not name.
        named: segments by video: path as written, file name, with or without extension.
    """

    path: Path
    spec: str
    common: tuple[Span, ...] = ()
    named: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Return the frames that the sampling chooses in every segment."""
        spans = [span for span in self._of(path) if span[0] < duration]
        return _choose_in_each(spans, times, duration, sampling) if spans else sampling.choose(times)

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Return the segments of this video, cut off at its end.

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
    """Read a file of segments: JSON, JSON lines (also the output of ``capvid caption``), CSV or TSV.

    Raises:
        DataError: it cannot be read or understood; the message names the position.
    """
    try:
        raw = read_regular(path, max_bytes=limits().text_bytes)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})", remedy=_FORMS) from error
    rows = _json_rows(path, text) if text.lstrip()[:1] in ("{", "[") else _table_rows(path, text)
    spans_by_video: dict[str | None, list[Span]] = {}
    for position, video, value in rows:
        pair = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
        start, end = map(_seconds, pair)
        if start is None or end is None:
            raise DataError(f"{path}: {position}: no start and end in seconds ({value!r:.60})", remedy=_FORMS)
        if not 0 <= start < end:
            raise DataError(
                f"{path}: {position}: from {start:g} to {end:g} s",
                remedy="let segments end after they begin, at 0 or later",
            )
        spans_by_video.setdefault(video, []).append((start, end))
    if not spans_by_video:
        raise DataError(f"{path}: no segments in this file", remedy=_FORMS)
    ordered = {video: tuple(sorted(spans)) for video, spans in spans_by_video.items()}
    return GivenSegments(
        path=path,
        spec=f"{path.name}@{hashlib.sha256(raw).hexdigest()[:12]}",
        common=ordered.pop(None, ()),
        named={video: spans for video, spans in ordered.items() if video is not None},
    )


Row = tuple[str, str | None, Any]  # position in the file, video if named, and the segment


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    try:
        values = [parse_json(text)]
    except ValueError:
        try:
            values = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error})", remedy=_FORMS) from error
    for value in values:
        yield from _rows_in(value, None, "segment")


def _rows_in(value: Any, video: str | None, position: str) -> Iterator[Row]:
    """Yield the segments in a JSON value: of one video, of a list of records, or by video."""
    if isinstance(value, Mapping):
        named = next((str(value[key]) for key in _VIDEO if isinstance(value.get(key), str)), video)
        inner = next((key for key in _SPANS if isinstance(value.get(key), list)), None)
        if inner is not None:
            yield from _rows_in(value[inner], named, position)
        elif "start" in value or "end" in value:
            yield position, named, (value.get("start"), value.get("end"))
        elif value.get("status") != "error":
            for name, spans in value.items():
                yield from _rows_in(spans, name, f"{name}, segment")
    elif isinstance(value, list) and not (len(value) == 2 and not isinstance(value[0], list | Mapping)):
        for number, item in enumerate(value, 1):
            yield from _rows_in(item, video, f"{position} {number}")
    else:
        yield position, video, value


def _table_rows(path: Path, text: str) -> Iterator[Row]:
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    columns: Sequence[str] = ("start", "end")
    try:
        for number, cells in enumerate(csv.reader(lines, delimiter="\t" if "\t" in first else ","), 1):
            cells = [cell.strip() for cell in cells]
            if "start" in map(str.lower, cells):
                columns = [cell.lower() for cell in cells]
            elif any(cells):
                row = dict(zip(columns, cells, strict=False))
                video = next((row[key] for key in _VIDEO if row.get(key)), None)
                yield f"line {number}", video, (row.get("start"), row.get("end"))
    except csv.Error as error:
        raise DataError(f"{path}: not a valid table ({error})", remedy=_FORMS) from error


def _seconds(value: Any) -> float | None:
    """Return the seconds of a number or a text such as ``1:02:03.5``; None for anything else."""
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


RATE = 2.0  # frames per second
LEAST = 28  # frames of a short video
SHORTEST = 2.0  # seconds of a segment
PENALTY = 7.0
COMPONENTS = 32
_BLOCK = 14400  # frames searched together: two hours, since the search takes quadratic time


@dataclass(frozen=True)
class AutoSegments:
    """Segments between the changes of a video's features."""

    spec: str = "auto"

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Return evenly spread frames, at the sampling's rate if it has one."""
        if isinstance(sampling, RateSampling):
            return sampling.choose(times)
        short = duration * RATE < LEAST
        return (UniformSampling(LEAST) if short else RateSampling(RATE)).choose(times)

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Cut between frames with different features, from beginning to end of the video."""
        shortest = 1  # frames of a segment
        if len(times) >= 2 and times[-1] > times[0]:
            shortest = max(1, round(SHORTEST * (len(times) - 1) / (times[-1] - times[0])))
        inner = (float(times[cut - 1] + times[cut]) / 2 for cut in changes(features, shortest))
        return list(pairwise([0.0, *sorted({time for time in inner if 0 < time < duration}), duration]))


def changes(features: np.ndarray, shortest: int) -> list[int]:
    """Return the indices of frames that begin a segment, ascending, without the first frame.

    The features' 32 principal components, centred and of unit length, are cut so that the sum of their
    squared distances to the means of the segments, plus :data:`PENALTY` for each segment, is minimal.

    Args:
        features: (T, D), or maps (T, L, D), which are averaged over the locations.
        shortest: minimum frames of a segment.
    """
    from ruptures import KernelCPD

    vectors = features.mean(1) if features.ndim == 3 else features
    cuts: list[int] = []
    for start in range(0, len(vectors), _BLOCK):
        block = vectors[start : start + _BLOCK].astype(np.float64)
        cuts.append(start)
        if len(block) < 2 * shortest:
            continue
        signal = block - block.mean(0)
        if min(signal.shape) > COMPONENTS:
            _, axes = np.linalg.eigh(signal.T @ signal)
            signal = signal @ axes[:, -COMPONENTS:]
        signal = signal / np.maximum(np.linalg.norm(signal, axis=1, keepdims=True), 1e-12)
        search = KernelCPD(kernel="linear", min_size=shortest).fit(signal)
        cuts += [start + int(cut) for cut in search.predict(pen=PENALTY)[:-1]]
    return [cut for cut in cuts if cut]


def parse_segments(text: str) -> Segmentation:
    """Return the segmentation of ``auto``, a number of equal segments, or a file (:func:`read_segments`).

    Raises:
        UsageError: a number out of range, or no such file.
        DataError: the file cannot be read or understood.
    """
    if text == "auto":
        return AutoSegments()
    if re.fullmatch("[+-]?[0-9]{1,1000}", text):
        if int(text) < 1:
            raise UsageError(f"{text} segments cannot be made", remedy="ask for at least 1")
        if int(text) > MAX_FRAMES:
            raise UsageError(f"{text} segments cannot be made", remedy=f"ask for at most {MAX_FRAMES}")
        return EqualSegments(int(text))
    if not os.path.isfile(text):  # noqa: PTH113  # Path.is_file raises where a name is too long
        raise UsageError(
            f"{text}: no such file of segments", remedy="give a file, a number of equal segments, or auto"
        )
    return read_segments(Path(text))
