"""Attention of a captioner as text: for each word, a small chart of its weights over the frames.

Array shapes: L words, T frames, C characters of a chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from capvid.utils.escaping import terminal

if TYPE_CHECKING:
    from capvid.output.results import CaptionResult


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"
END = "(end)"

_LONGEST_WORD = 18
_NARROWEST = 4  # characters of a chart, however narrow the terminal


def levels_for(encoding: str | None) -> str:
    """Return the characters for low to high weights that a stream of this encoding can show."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def attention_lines(
    result: CaptionResult, *, width: int, levels: str = BLOCKS, named: bool = False
) -> list[str]:
    """Return one line per word: the word, its chart over the frames, and where the weights peak.

    The charts of a caption share one scale, from zero to its largest weight. Captions of a video with several
    are headed by a line of their own.

    Args:
        result: result with traces; without attention traces there are no lines.
        width: maximum width in columns; frames that do not fit are averaged with their neighbours.
        levels: characters from low to high.
        named: whether to head single captions, too, because there are several videos.
    """
    lines = []
    named = named or result.paragraph or len(result.captions) > 1
    for segment in result.segments:
        times = None if result.times is None else result.times[segment.frames]
        span = ""
        if result.paragraph and segment.end is not None:
            span = f" {segment.start:.1f}-{segment.end:.1f}s"
        for caption in segment.captions:
            attention = (caption.traces or {}).get("attention")
            if attention is None:
                continue
            if named:
                lines.append(f"{terminal(result.path)}{span}: {terminal(caption.text)}")
            words = [*(terminal(each.word) for each in caption.words), END]
            weights = np.nan_to_num(attention, posinf=0, neginf=0)
            lines += _charts(words, weights, times, width=width, levels=levels)
    return lines


def _charts(
    words: Sequence[str], weights: np.ndarray, times: np.ndarray | None, *, width: int, levels: str
) -> list[str]:
    """Return a line for each word, from weights (L, T) over frames at ``times`` (T,)."""
    words = [word if len(word) <= _LONGEST_WORD else f"{word[: _LONGEST_WORD - 1]}~" for word in words]
    peaks = []
    for row in weights:
        frame = int(row.argmax()) if row.max(initial=0) else None
        if frame is None:
            peaks.append("-")
        else:
            when = f"frame {frame + 1}" if times is None else f"{times[frame]:.1f}s"
            peaks.append(f"{when} {row[frame]:4.0%}")
    word_width, peak_width = max(map(len, words)), max(map(len, peaks))
    columns = max(_NARROWEST, width - word_width - peak_width - 6)
    count = weights.shape[1]
    if count > columns:
        edges = np.linspace(0, count, columns, endpoint=False).astype(int)
        weights = np.add.reduceat(weights, edges, axis=1) / np.diff(np.append(edges, count))  # (L, C)
    heights = np.ceil(weights / (weights.max() or 1.0) * len(levels)).astype(int).clip(1) - 1
    return [
        f"  {word:<{word_width}}  {''.join(levels[height] for height in row)}  {peak:>{peak_width}}"
        for word, row, peak in zip(words, heights, peaks, strict=True)
    ]
