"""Where a captioner looked, as lines of text: for each word a small chart of the weights of the frames.

Notation for array shapes: L words, T frames, C characters of a chart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from capvid.escaping import terminal

if TYPE_CHECKING:
    from capvid.results import Caption, CaptionResult, Segment

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"
END = "(end)"

_LONGEST_WORD = 18
_NARROWEST = 4  # characters of a chart, however narrow the terminal


def levels_for(encoding: str | None) -> str:
    """The characters for low to high weights that a stream of this encoding can show."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def attention_lines(
    result: CaptionResult, *, width: int, levels: str = BLOCKS, named: bool = False
) -> list[str]:
    """Lines for each caption with attention: the word, its chart over the frames, and where it peaks.

    Charts of a caption have one scale, from nothing to its greatest weight. Where a line would be wider than
    ``width``, neighbouring frames share a character, which shows their mean. A line in between says which
    caption it is, if there are several.

    Args:
        result: with traces.
        width: columns at most.
        levels: characters from low to high.
        named: whether that line is always there, because there are several videos.

    Returns:
        no line for a captioner that has no attention over frames.
    """
    lines = []
    named = named or result.paragraph or len(result.captions) > 1
    for segment in result.segments:
        times = None if result.times is None else result.times[segment.frames]
        for caption in segment.captions:
            weights = (caption.traces or {}).get("attention")
            if weights is None:
                continue
            if named:
                lines.append(_heading(result, segment, caption))
            weights = np.nan_to_num(weights, posinf=0, neginf=0)
            lines += _charts(caption, weights, times, width=width, levels=levels)
    return lines


def _heading(result: CaptionResult, segment: Segment, caption: Caption) -> str:
    part = ""
    if result.paragraph and segment.end is not None:
        part = f" {segment.start:.1f}-{segment.end:.1f}s"
    return f"{terminal(result.path)}{part}: {terminal(caption.text)}"


def _charts(
    caption: Caption, weights: np.ndarray, times: np.ndarray | None, *, width: int, levels: str
) -> list[str]:
    """A line for each word and the end, from weights (L + 1, T) of frames at ``times`` (T,)."""
    words = [_cut(terminal(each.word)) for each in caption.words] + [END]
    peaks = [_peak(row, times) for row in weights]
    longest, last = max(map(len, words)), max(map(len, peaks))
    room = max(_NARROWEST, width - longest - last - 6)
    merged = _merged(weights, room)  # (L + 1, C)
    top = merged.max() or 1.0
    heights = np.ceil(merged / top * len(levels)).astype(int).clip(1) - 1
    charts = ["".join(levels[height] for height in row) for row in heights]
    return [
        f"  {word:<{longest}}  {chart}  {peak:>{last}}"
        for word, chart, peak in zip(words, charts, peaks, strict=True)
    ]


def _cut(word: str) -> str:
    return word if len(word) <= _LONGEST_WORD else f"{word[: _LONGEST_WORD - 1]}~"


def _peak(row: np.ndarray, times: np.ndarray | None) -> str:
    """When the frame of most weight is shown, and its share; its number where times are not known."""
    if not row.max(initial=0):
        return "-"
    frame = int(row.argmax())
    where = f"frame {frame + 1}" if times is None else f"{times[frame]:.1f}s"
    return f"{where} {row[frame]:4.0%}"


def _merged(weights: np.ndarray, room: int) -> np.ndarray:
    """Weights (L + 1, T) with neighbouring frames averaged, at most ``room`` columns."""
    count = weights.shape[1]
    if count <= room:
        return weights
    edges = np.linspace(0, count, room, endpoint=False).astype(int)
    return np.add.reduceat(weights, edges, axis=1) / np.diff(np.append(edges, count))
