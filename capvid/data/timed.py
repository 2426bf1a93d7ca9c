"""Sentences with the seconds at which they begin and end, as paragraphs."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from capvid.data.captions import CaptionedVideo, Segment
from capvid.data.reading import JsonFile, Place, RowError, Rows, check_caption, member, number

FRAME = 0.5  # seconds between the frames of the MART paper's features


def read_timed(path: Path, split: str, rows: Rows) -> Iterator[tuple[Place, CaptionedVideo]]:
    """Read a JSON object of videos by their ids, each with ``timestamps`` and ``sentences``.

    Raises:
        DataError: the file is not of that form, or a row is not and bad rows are not skipped.
    """
    mended: list[str] = []
    for place, name, row in JsonFile(path).members():
        with rows.at(place):
            times = member(row, "timestamps", list, "list of times")
            sentences = member(row, "sentences", list, "list of sentences")
            yield place, told(name, split, times, sentences, mended)
    note_mended(path, mended, rows)


def told(
    name: str, split: str, times: Sequence[Any], sentences: Sequence[Any], mended: list[str]
) -> CaptionedVideo:
    """Make a video of its segments and the sentence about each, in the order in which they were told.

    That order, and not that of time, is the one of the published reference paragraphs. A segment that ends
    before it begins is turned round; an empty one begins one frame earlier. Their videos go to ``mended``.

    Raises:
        RowError: a time or sentence is not one, or there are not as many of them.
    """
    if not name.strip():
        raise RowError("no id", "give each video one")
    if len(times) != len(sentences):
        raise RowError(
            f"{len(times)} segments and {len(sentences)} sentences", "give a sentence for every segment"
        )
    segments = []
    for pair in times:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"a segment that is not [start, end]: {reprlib.repr(pair)}", "give both times")
        start, end = sorted(map(number, pair))
        if start < 0 or end <= 0:
            raise RowError(f"a segment from {start:g} to {end:g} seconds", "give times from 0 on")
        if number(pair[0]) >= number(pair[1]):
            mended.append(name)
        segments.append(Segment(start if start < end else max(0.0, start - FRAME), end, "seconds"))
    return CaptionedVideo(name, split, (), tuple(segments), (tuple(map(check_caption, sentences)),))


def note_mended(path: Path, mended: Sequence[str], rows: Rows) -> None:
    """Note in how many segments, and in which videos, the end did not come after the start."""
    if mended:
        names = ", ".join(mended[:5]) + (", ..." if len(mended) > 5 else "")
        rows.notes.append(
            f"{path}: {len(mended)} segments that do not end after they begin, mended ({names})"
        )
