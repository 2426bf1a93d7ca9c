"""The JSON record of one video: what was asked, what came out, or why nothing did."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capvid.results import Caption, CaptionResult, Segment

SCHEMA_VERSION = 1
_DECIMALS = 6


def shown(path: Path) -> str:
    """Give the path as text that can be written as UTF-8, whatever bytes the file name has."""
    return os.fsencode(path).decode("utf-8", "replace")


def make_record(result: CaptionResult, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make the record of one result; ``settings`` is what else the captions depend on."""
    error = result.error
    return {
        "schema_version": SCHEMA_VERSION,
        "video": shown(result.path),
        "status": result.status,
        "model": _model(result.model),
        "settings": dict(settings),
        "duration": None if result.duration is None else round(result.duration, _DECIMALS),
        "captions": [_caption(caption) for caption in result.captions],
        **({"segments": [_segment(segment) for segment in result.segments]} if result.paragraph else {}),
        "error": None
        if error is None
        else {"kind": error.kind, "message": error.message, "remedy": error.remedy},
    }


def _model(text: str) -> dict[str, str | None]:
    """``name@revision`` taken apart."""
    name, _, revision = text.partition("@")
    return {"name": name, "revision": revision or None}


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "start": round(segment.start, _DECIMALS),
        "end": None if segment.end is None else round(segment.end, _DECIMALS),
        "caption": segment.captions[0].text,
        "captions": [_caption(caption) for caption in segment.captions],
    }


def _caption(caption: Caption) -> dict[str, Any]:
    return {
        "text": caption.text,
        "logprob": round(caption.logprob, _DECIMALS),
        "words": [{"word": w.word, "logprob": round(w.logprob, _DECIMALS)} for w in caption.words],
    }
