"""Segmentation of videos: equal segments, segments from a file, or changes of the features."""

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

RATE = 2.0  # frames per second in AutoSegments
MIN_FRAMES = 28  # in AutoSegments, where a short video has fewer at this rate
MIN_SECONDS = 2.0  # of a segment
PENALTY = 7.0  # cost of a segment
COMPONENTS = 32  # principal components of the features
_BLOCK = 14400  # frames segmented at once: two hours, since the search takes quadratic time
_FORMS = (
    "write JSON with a list of {start, end} for all videos, or an object of such lists by video, "
    "or CSV with the columns start,end or video,start,end; times in seconds"
)
_VIDEO_KEYS = ("video", "id", "video_id", "path")
_LIST_KEYS = ("segments", "timestamps")

Span = tuple[float, float]
Row = tuple[str, str | None, Any]  # position in the file, name of the video if any, and the segment


class Segmentation(ABC):
    """Rule that divides videos into segments."""

    spec: str  # text form for records

    @abstractmethod
    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Return start and end of each segment in seconds, ordered by start.

        The features of the chosen frames are (T, D) or (T, L, D), their times (T,) in seconds.

        Raises:
            DataError: the segments of this video are unknown or do not fit its length.
        """

    def _known_spans(self, path: VideoPath, num_frames: int, duration: float) -> list[Span]:
        """Return the segments that are known without features."""
        return []

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Return the ascending, distinct indices of the frames to decode, of those with times (N,).

        The sampling chooses them in each segment, or in the whole video if no segments are known.
        """
        spans = self._known_spans(path, len(times), duration)
        if not spans:
            return sampling.choose(times)
        frames = (frames_within(span, times, duration) for span in spans)
        return np.unique(np.concatenate([indices[sampling.choose(times[indices])] for indices in frames]))


def frames_within(span: Span, times: np.ndarray, duration: float) -> np.ndarray:
    """Return the indices of the frames with times (T,) in a segment, or of the frame nearest to its middle.

    Frames at or after the end of the video belong to the last segment.
    """
    start, end = span
    first, stop = np.searchsorted(times, span)
    stop = len(times) if end >= duration else stop
    if first >= stop:
        return nearest(np.array([(start + end) / 2]), times)
    return np.arange(first, stop)


@dataclass(frozen=True)
class EqualSegments(Segmentation):
    """``count`` segments of equal length; a single image is not divided."""

    count: int

    @property
    def spec(self) -> str:  # type: ignore[override]
        """The number of segments."""
        return str(self.count)

    def _known_spans(self, path: VideoPath, num_frames: int, duration: float) -> list[Span]:
        if duration <= 0:
            return [(0.0, 0.0)]
        if self.count > num_frames:
            return []
        return list(pairwise(duration * number / self.count for number in range(self.count + 1)))

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Divide the whole video; raise DataError if there are more segments than frames."""
        if spans := self._known_spans(path, len(times), duration):
            return spans
        problem = f"{path}: {self.count} segments, but only {len(times)} frames"
        raise DataError(problem, remedy="request fewer segments")


@dataclass(frozen=True)
class ListedSegments(Segmentation):
    """Segments from a file, for all videos or by video.

    A video is identified by its path as written or its file name, with or without extension.
    """

    path: Path
    spec: str  # name of the file and a digest of its content
    by_video: Mapping[str | None, Sequence[Span]]  # None: for videos that the file does not name

    def _known_spans(self, path: VideoPath, num_frames: int, duration: float) -> list[Span]:
        names = (str(path), PurePath(path).as_posix(), path.name, path.stem, None)
        spans = next((self.by_video[name] for name in names if name in self.by_video), ())
        return [span for span in spans if span[0] < duration]

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Return the segments of this video, ending at its end; raise DataError if one begins after it."""
        spans = self._known_spans(path, len(times), math.inf)
        if not spans:
            remedy = "name the video by its path or file name"
            raise DataError(f"{path}: {self.path} has no segments for it", remedy=remedy)
        for start, end in spans:
            if start >= duration:
                problem = f"{self.path} has a segment from {start:g} to {end:g} s"
                raise DataError(
                    f"{path}: {problem}, but the video is {duration:.3f} s long",
                    remedy="check that the segments belong to this video, and are in seconds",
                )
        return [(start, min(end, duration)) for start, end in spans]


@dataclass(frozen=True)
class AutoSegments(Segmentation):
    """Segments between changes of a video's features."""

    spec: str = "auto"

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Return evenly spaced frames, at the sampling's rate if it has one."""
        if not isinstance(sampling, RateSampling):
            short = duration * RATE < MIN_FRAMES
            sampling = UniformSampling(MIN_FRAMES) if short else RateSampling(RATE)
        return sampling.choose(times)

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Divide the whole video halfway between the frames where the features change."""
        min_frames = 1  # of a segment
        if len(times) >= 2 and times[-1] > times[0]:
            min_frames = max(1, round(MIN_SECONDS * (len(times) - 1) / (times[-1] - times[0])))
        starts = change_points(features, min_frames)
        inner = (float(times[start - 1] + times[start]) / 2 for start in starts)
        return list(pairwise([0.0, *sorted({time for time in inner if 0 < time < duration}), duration]))


def change_points(features: np.ndarray, min_frames: int) -> list[int]:
    """Return the ascending indices of frames that begin a segment, without the first frame.

    The features' 32 principal components, centred and of unit length, are divided so that the sum of their
    squared distances to the means of the segments, plus :data:`PENALTY` for each segment, is minimal. A
    segment has at least ``min_frames`` frames. Maps (T, L, D) are averaged over the locations; of frames
    (T, h, w, 3), a grid of 8 x 8 pixels is compared.
    """
    from ruptures import KernelCPD

    vectors = features.mean(1) if features.ndim == 3 else features
    if features.ndim == 4:
        rows, columns = ((2 * np.arange(8) + 1) * side // 16 for side in features.shape[1:3])
        vectors = features[:, rows][:, :, columns].reshape(len(features), -1)
    starts: list[int] = []
    for offset in range(0, len(vectors), _BLOCK):
        block = vectors[offset : offset + _BLOCK].astype(np.float64)
        starts.append(offset)
        if len(block) < 2 * min_frames:
            continue
        signal = block - block.mean(0)
        if min(signal.shape) > COMPONENTS:
            _, axes = np.linalg.eigh(signal.T @ signal)
            signal = signal @ axes[:, -COMPONENTS:]
        signal = signal / np.maximum(np.linalg.norm(signal, axis=1, keepdims=True), 1e-12)
        search = KernelCPD(kernel="linear", min_size=min_frames).fit(signal)
        starts += [offset + int(start) for start in search.predict(pen=PENALTY)[:-1]]
    return [start for start in starts if start]


def parse_segments(text: str) -> Segmentation:
    """Parse ``auto``, a number of equal segments, or the path of a file (:func:`read_segments`).

    Raises:
        UsageError: the number is out of range, or there is no such file.
        DataError: the file cannot be read or parsed.
    """
    if text == "auto":
        return AutoSegments()
    if re.fullmatch("[+-]?[0-9]{1,1000}", text):
        if not 1 <= int(text) <= MAX_FRAMES:
            remedy = "request at least 1" if int(text) < 1 else f"request at most {MAX_FRAMES}"
            raise UsageError(f"{text} segments cannot be made", remedy=remedy)
        return EqualSegments(int(text))
    if not os.path.isfile(text):  # noqa: PTH113  # Path.is_file raises if a name is too long
        remedy = "give a file, a number of equal segments, or auto"
        raise UsageError(f"{text}: no such file of segments", remedy=remedy)
    return read_segments(Path(text))


def read_segments(path: Path) -> ListedSegments:
    """Read a file of segments: JSON, JSON lines (also the output of ``capvid caption``), CSV or TSV.

    Tables may be the scene lists of PySceneDetect.

    Raises:
        DataError: the file cannot be read or parsed; the message names the position.
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
    """Yield the segments in JSON or JSON lines."""
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
        name = next((str(value[key]) for key in _VIDEO_KEYS if isinstance(value.get(key), str)), video)
        list_key = next((key for key in _LIST_KEYS if isinstance(value.get(key), list)), None)
        if list_key is not None:
            yield from _rows_in(value[list_key], name, position)
        elif "start" in value or "end" in value:
            yield position, name, (value.get("start"), value.get("end"))
        elif value.get("status") != "error":
            for name, spans in value.items():
                yield from _rows_in(spans, name, f"{name}, segment")
    elif isinstance(value, list) and not (len(value) == 2 and not isinstance(value[0], list | Mapping)):
        for number, item in enumerate(value, 1):
            yield from _rows_in(item, video, f"{position} {number}")
    else:
        yield position, video, value


def _table_rows(path: Path, text: str) -> Iterator[Row]:
    """Yield the segments in CSV or TSV, with or without a header line."""
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    columns: Sequence[str] = ("start", "end")
    try:
        for number, cells in enumerate(csv.reader(lines, delimiter="\t" if "\t" in first else ","), 1):
            cells = [cell.strip() for cell in cells]
            names = [cell.lower().removesuffix(" time (seconds)") for cell in cells]  # as in PySceneDetect's
            if "start" in names:
                columns = names
            elif any(cells) and cells[0] != "Timecode List:":  # a line that PySceneDetect puts first
                row = dict(zip(columns, cells, strict=False))
                video = next((row[key] for key in _VIDEO_KEYS if row.get(key)), None)
                yield f"line {number}", video, (row.get("start"), row.get("end"))
    except csv.Error as error:
        raise DataError(f"{path}: not a valid table ({error})", remedy=_FORMS) from error


def _seconds(value: Any) -> float | None:
    """Return the seconds in a number or a text such as ``1:02:03.5``; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parts = [float(part) for part in str(value).replace(",", ".").split(":", 2)]
    except ValueError:
        return None
    seconds = sum(part * 60**power for power, part in enumerate(reversed(parts)))
    return seconds if math.isfinite(seconds) else None
