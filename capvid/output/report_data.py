"""What the HTML report knows of a video: a small nest of plain values, with pictures as data URIs.

Notation for array shapes: L words, T frames, C columns, W width of a trace.
"""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from capvid.results import Caption, CaptionResult, Segment

COLUMNS = 60  # of a segment at most; where it has more frames, neighbours share one
PICTURES = 2400  # of a video at most, all segments together
LEAST = 4  # pictures of a segment, however many segments there are
SCALE = 10_000  # weights are whole numbers of this fraction

_DECIMALS = 3


def picture_uri(picture: bytes) -> str:
    """A JPEG file as a data URI."""
    return f"data:image/jpeg;base64,{base64.b64encode(picture).decode('ascii')}"


def picture_size(picture: bytes) -> tuple[int, int]:
    """Width and height of a picture in pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as image:
        return image.size


def poster_of(result: CaptionResult) -> int | None:
    """The frame whose picture stands for the video: the middle one; None where there are no pictures."""
    return len(result.pictures) // 2 if result.pictures else None


def video_data(result: CaptionResult, *, poster: int | None) -> dict[str, Any]:
    """What the page unfolds when a video is opened.

    ``pictures`` holds every picture that a segment shows by the number of its frame, but for that of frame
    ``poster``, which the page has already.
    """
    share = max(LEAST, PICTURES // max(1, len(result.segments)))
    segments = [_segment(result, segment, share) for segment in result.segments]
    shown = {frame for segment in segments for frame in segment["pictures"] if frame is not None}
    return {
        "poster": poster,
        "size": picture_size(result.pictures[0]) if result.pictures else None,
        "paragraph": result.paragraph,
        "pictures": {frame: picture_uri(result.pictures[frame]) for frame in sorted(shown - {poster})},
        "segments": segments,
    }


def _segment(result: CaptionResult, segment: Segment, share: int) -> dict[str, Any]:
    frames = segment.frames
    count = min(len(frames), COLUMNS)
    edges = np.linspace(0, len(frames), count, endpoint=False).astype(int)  # (C,) the first frame of each
    ends = np.append(edges[1:], len(frames))
    pictures: list[int | None] = [None] * count
    if result.pictures and count:
        for column in np.linspace(0, count - 1, min(count, share)).round().astype(int):
            pictures[column] = int(frames[(edges[column] + ends[column] - 1) // 2])
    data: dict[str, Any] = {
        "start": round(segment.start, _DECIMALS),
        "end": None if segment.end is None else round(segment.end, _DECIMALS),
        "times": None if result.times is None else _rounded(result.times[frames[edges]]),
        "pictures": pictures,
        "captions": [_caption(caption, edges) for caption in segment.captions],
    }
    if count < len(frames):
        data["first"] = edges.tolist()
        if result.times is not None:
            data["until"] = _rounded(result.times[frames[ends - 1]])
    if segment.memory_change:
        data["change"] = [round(x, _DECIMALS) if math.isfinite(x) else None for x in segment.memory_change]
    return data


def _caption(caption: Caption, edges: np.ndarray) -> dict[str, Any]:
    """Words as pairs with their log-probabilities, the end last, and traces in units of 1 / SCALE."""
    said = sum(word.logprob for word in caption.words)
    traces = {name: np.asarray(trace, dtype=float) for name, trace in (caption.traces or {}).items()}
    if "attention" in traces and len(edges):  # (L + 1, T) -> (L + 1, C)
        traces["attention"] = np.add.reduceat(traces["attention"], edges, axis=1)
    return {
        "text": caption.text,
        "logprob": round(caption.logprob, _DECIMALS),
        "generic": bool(caption.generic),
        "words": [[word.word, round(word.logprob, _DECIMALS)] for word in caption.words]
        + [[None, round(caption.logprob - said, _DECIMALS)]],
        "traces": {
            name: np.rint(np.nan_to_num(trace, posinf=0, neginf=0) * SCALE).astype(int).tolist()
            for name, trace in traces.items()
        },
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), _DECIMALS) for value in values]
