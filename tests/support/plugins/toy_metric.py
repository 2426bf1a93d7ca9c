"""Toy metric: words per caption."""

from __future__ import annotations

from capvid.metrics import METRICS, Scored, Texts


@METRICS.register("toy")
def words(texts: Texts) -> Scored:
    """Mean number of words of the captions."""
    counts = {video: float(len(text.split())) for video, text in texts.predictions.items()}
    return {"WORDS": (sum(counts.values()) / len(counts), counts)}
