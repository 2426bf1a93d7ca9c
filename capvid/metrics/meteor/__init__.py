"""METEOR 1.5, digit for digit and without Java."""

from __future__ import annotations

from importlib import import_module

from capvid.errors import MetricError, UsageError
from capvid.metrics import METRICS, Scored, Texts

ENGINES = {
    "auto": "capvid.metrics.meteor.meteor_scorer",
    "builtin": "capvid.metrics.meteor.meteor_scorer",
    "java": "capvid.metrics.java",
}


@METRICS.register("meteor")
def meteor(texts: Texts, *, engine: str = "auto") -> Scored:
    """Compute METEOR of the captions with one of :data:`ENGINES`.

    Raises:
        UsageError: no such engine.
        MetricError: its data are not installed.
    """
    if engine not in ENGINES:
        raise UsageError(f"no METEOR engine {engine!r}", remedy=f"use one of: {', '.join(ENGINES)}")
    try:
        module = import_module(ENGINES[engine])
    except ImportError as error:
        raise MetricError("METEOR is not available", remedy="pip install 'capvid[meteor]'") from error
    return {"METEOR": module.meteor_scores(texts.predictions, texts.references)}
