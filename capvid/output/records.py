"""The JSON record of one video: what was asked, what came out, or why nothing did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capvid.digests import shown
from capvid.errors import CapvidError
from capvid.escaping import json_value

if TYPE_CHECKING:
    from capvid.results import Caption, CaptionResult, Segment

SCHEMA_VERSION = 1
_DECIMALS = 6
_WEIGHT_DECIMALS = 4


def make_record(
    result: CaptionResult, settings: Mapping[str, Any], *, attention: bool = False
) -> dict[str, Any]:
    """Make the record of one result.

    Args:
        result: with traces, if there is to be attention.
        settings: what else the captions depend on.
        attention: whether words have the weights of the frames, and captions the times of these.
    """
    several: dict[str, Any] = {}
    if result.paragraph:
        captions = [_caption(caption) for caption in result.captions]
        several["segments"] = [_segment(result, each, attention=attention) for each in result.segments]
    else:
        captions = _captions(result, result.captions, *result.segments, attention=attention)
    record = {
        "schema_version": SCHEMA_VERSION,
        "video": shown(result.path),
        "status": result.status,
        "model": _model(result.model),
        "settings": dict(settings),
        "duration": None if result.duration is None else round(result.duration, _DECIMALS),
        "captions": captions,
        **several,
        "error": error_record(result.error),
    }
    cleaned: dict[str, Any] = json_value(record)
    return cleaned


def error_record(error: CapvidError | None) -> dict[str, str] | None:
    """Say what went wrong, if anything did."""
    if error is None:
        return None
    return {"kind": error.kind, "message": shown(error.message), "remedy": shown(error.remedy)}


def frame_times(result: CaptionResult, *segments: Segment) -> list[float] | None:
    """Seconds at which the frames are shown that the captioner looked at, if that is known."""
    if result.times is None:
        return None
    return [round(float(result.times[at]), _DECIMALS) for segment in segments for at in segment.frames]


def _model(text: str) -> dict[str, str | None]:
    """``name@revision`` taken apart."""
    name, _, revision = text.partition("@")
    return {"name": name, "revision": revision or None}


def _segment(result: CaptionResult, segment: Segment, *, attention: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "start": round(segment.start, _DECIMALS),
        "end": None if segment.end is None else round(segment.end, _DECIMALS),
        "caption": segment.captions[0].text,
        "captions": _captions(result, segment.captions, segment, attention=attention),
    }
    if segment.memory_change:
        record["memory_change"] = [round(change, _DECIMALS) for change in segment.memory_change]
    return record


def _captions(
    result: CaptionResult, captions: Sequence[Caption], *segments: Segment, attention: bool
) -> list[dict[str, Any]]:
    """Records of the captions of a segment; with attention, where the captioner has it."""
    records = []
    for caption in captions:
        record = _caption(caption)
        looked = (caption.traces or {}).get("attention") if attention else None
        if looked is not None:
            for word, weights in zip(record["words"], looked, strict=False):  # the last row is the end's
                word["attention"] = [round(float(weight), _WEIGHT_DECIMALS) for weight in weights]
            record["times"] = frame_times(result, *segments)
        records.append(record)
    return records


def _caption(caption: Caption) -> dict[str, Any]:
    return {
        "text": caption.text,
        "logprob": round(caption.logprob, _DECIMALS),
        "mean_logprob": round(caption.mean_logprob, _DECIMALS),
        **({} if caption.generic is None else {"generic": caption.generic}),
        "words": [{"word": w.word, "logprob": round(w.logprob, _DECIMALS)} for w in caption.words],
    }
