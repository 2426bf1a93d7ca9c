"""Segmentation of videos: equal parts, segments from a file, or cuts where the features change."""

from __future__ import annotations

import csv
import hashlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from capvid.errors import DataError, UsageError
from capvid.utils.files import read_regular
from capvid.utils.storage import VideoPath
from capvid.utils.validation import limits, parse_json
from capvid.video.frame_sampling import MAX_FRAMES, RateSampling, Sampling, UniformSampling, nearest

RATE = 2.0  # frames per second that AutoSegments looks at
MIN_FRAMES = 28  # of a short video
MIN_SECONDS = 2.0  # of a segment
PENALTY = 7.0  # cost of a segment
COMPONENTS = 32  # principal components of the features
_BLOCK = 14400  # frames searched together: two hours, since the search takes quadratic time
_FORMS = (
    "write JSON with a list of {start, end} for every video, or of such lists by video, "
    "or CSV with the columns start,end or video,start,end; times in seconds"
)
_VIDEO = ("video", "id", "video_id", "path")
_SPANS = ("segments", "timestamps")

Span = tuple[float, float]
Row = tuple[str, str | None, Any]  # position in the file, video if named, and the segment


class Segmentation(ABC):
    """Rule that divides videos into segments."""

    spec: str  # the rule as text, for records

    @abstractmethod
    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Return start and end of each segment in seconds, ordered by start.

        The features of the chosen frames are (T, D) or (T, L, D), their times (T,) in seconds.

        Raises:
            DataError: the segments of this video are unknown or do not fit it.
        """

    def _expected(self, path: VideoPath, num_frames: int, duration: float) -> list[Span]:
        """Return the segments within the video that are known beforehand."""
        return []

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Return the indices of the frames that are needed of those with times (N,), ascending and distinct.

        These are the frames that the sampling chooses in each segment, or in the video if none is known.
        """
        spans = self._expected(path, len(times), duration)
        if not spans:
            return sampling.choose(times)
        frames = (frames_within(span, times, duration) for span in spans)
        return np.unique(np.concatenate([indices[sampling.choose(times[indices])] for indices in frames]))


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


@dataclass(frozen=True)
class EqualSegments(Segmentation):
    """``count`` segments of equal length; a single image stays undivided."""

    count: int

    @property
    def spec(self) -> str:  # type: ignore[override]
        """The number."""
        return str(self.count)

    def _expected(self, path: VideoPath, num_frames: int, duration: float) -> list[Span]:
        if duration <= 0:
            return [(0.0, 0.0)]
        if self.count > num_frames:
            return []
        return list(pairwise(duration * number / self.count for number in range(self.count + 1)))

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Divide the video from beginning to end; raise DataError if there are more segments than frames."""
        if spans := self._expected(path, len(times), duration):
            return spans
        problem = f"{path}: {self.count} segments, and only {len(times)} frames to look at in them"
        raise DataError(problem, remedy="ask for fewer segments")


@dataclass(frozen=True)
class ListedSegments(Segmentation):
    """Segments from a file, common to all videos or specific to each.

    A video is named by its path as written or its file name, with or without extension; the segments of None
    are those of videos that the file does not name.
    """

    path: Path
    spec: str  # name of the file and a digest of its content
    by_video: Mapping[str | None, Sequence[Span]]

    def _expected(self, path: VideoPath, num_frames: int, duration: float) -> list[Span]:
        names = (str(path), PurePath(path).as_posix(), path.name, path.stem, None)
        spans = next((self.by_video[name] for name in names if name in self.by_video), ())
        return [span for span in spans if span[0] < duration]

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Return the segments of this video, cut off at its end; raise DataError if one begins after it."""
        spans = self._expected(path, len(times), math.inf)
        if not spans:
            remedy = "name the video by its path or file name"
            raise DataError(f"{path}: {self.path} has no segments for it", remedy=remedy)
        for start, end in spans:
            if start >= duration:
                raise DataError(
                    f"{path}: {self.path} has a segment from {start:g} to {end:g} s, and the video is "
                    f"{duration:.3f} s long",
                    remedy="see whether the segments are of this video, and in seconds",
                )
        return [(start, min(end, duration)) for start, end in spans]


@dataclass(frozen=True)
class AutoSegments(Segmentation):
    """Segments between the changes of a video's features."""

    spec: str = "auto"

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Return evenly spread frames, at the sampling's rate if it has one."""
        if not isinstance(sampling, RateSampling):
            short = duration * RATE < MIN_FRAMES
            sampling = UniformSampling(MIN_FRAMES) if short else RateSampling(RATE)
        return sampling.choose(times)

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Cut between frames with different features, from beginning to end of the video."""
        shortest = 1  # frames of a segment
        if len(times) >= 2 and times[-1] > times[0]:
            shortest = max(1, round(MIN_SECONDS * (len(times) - 1) / (times[-1] - times[0])))
        inner = (float(times[cut - 1] + times[cut]) / 2 for cut in changes(features, shortest))
        return list(pairwise([0.0, *sorted({time for time in inner if 0 < time < duration}), duration]))


def changes(features: np.ndarray, shortest: int) -> list[int]:
    """Return the indices of frames that begin a segment, ascending, without the first frame.

    The features' 32 principal components, centred and of unit length, are cut so that the sum of their
    squared distances to the means of the segments, plus :data:`PENALTY` for each segment, is minimal. A
    segment has at least ``shortest`` frames. Maps (T, L, D) are averaged over the locations.
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
        if not 1 <= int(text) <= MAX_FRAMES:
            remedy = "ask for at least 1" if int(text) < 1 else f"ask for at most {MAX_FRAMES}"
            raise UsageError(f"{text} segments cannot be made", remedy=remedy)
        return EqualSegments(int(text))
    if not os.path.isfile(text):  # noqa: PTH113  # Path.is_file raises where a name is too long
        remedy = "give a file, a number of equal segments, or auto"
        raise UsageError(f"{text}: no such file of segments", remedy=remedy)
    return read_segments(Path(text))


def read_segments(path: Path) -> ListedSegments:
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
            remedy = "let segments end after they begin, at 0 or later"
            raise DataError(f"{path}: {position}: from {start:g} to {end:g} s", remedy=remedy)
        spans_by_video.setdefault(video, []).append((start, end))
    if not spans_by_video:
        raise DataError(f"{path}: no segments in this file", remedy=_FORMS)
    spec = f"{path.name}@{hashlib.sha256(raw).hexdigest()[:12]}"
    return ListedSegments(path, spec, {video: sorted(spans) for video, spans in spans_by_video.items()})


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
        parts = [float(part) for part in str(value).replace(",", ".").split(":", 2)]
    except ValueError:
        return None
    seconds = sum(part * 60**power for power, part in enumerate(reversed(parts)))
    return seconds if math.isfinite(seconds) else None
