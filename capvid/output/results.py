"""Results of captioning, and their JSON record.

Array shapes: L words of a sentence, T frames that the captioner looked at, W width of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capvid.utils.escaping import json_value, utf8_text

if TYPE_CHECKING:
    import numpy as np

    from capvid.decoding.caption_generator import Caption
    from capvid.errors import CapvidError
    from capvid.utils.storage import VideoPath


SCHEMA_VERSION = 1  # of JSON records
_DECIMALS = 6
_CONFIDENCE_DECIMALS = 3
_WEIGHT_DECIMALS = 4


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment of a video, or the complete video, with its captions.

    Attributes:
        start: start in seconds.
        end: end in seconds; None if the duration of the video is unknown.
        captions: captions, best first.
        frames: indices (T,) into the times of the result: the frames that the captioner looked at.
        memory_change: relative change of each layer's memory, for captioners that carry memory from one
            segment to the next.
    """

    start: float
    end: float | None
    captions: tuple[Caption, ...]
    frames: np.ndarray
    memory_change: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CaptionResult:
    """Captions of one input, or the error that prevented them.

    Attributes:
        path: path or address of the input.
        status: ``ok`` or ``error``.
        captions: captions, best first; of a video in segments one, which joins the best caption of each.
        error: why there are no captions.
        model: captioner as ``name@revision``.
        name: name of the input for files made from it.
        lost: number of frames that could not be decoded.
        duration: duration of the video in seconds, if known.
        segments: segments with their captions; a single one if segmentation was not requested.
        paragraph: whether segmentation was requested.
        times: times of the sampled frames in seconds, if known.
        thumbnails: thumbnails of the sampled frames as JPEG files, if requested.
    """

    path: VideoPath
    status: str
    captions: tuple[Caption, ...]
    error: CapvidError | None
    model: str
    name: str = ""
    lost: int = 0
    duration: float | None = None
    segments: tuple[Segment, ...] = ()
    paragraph: bool = False
    times: np.ndarray | None = None
    thumbnails: tuple[bytes, ...] = ()

    @property
    def num_low_confidence(self) -> int:
        """Number of segments whose best caption is flagged as one of low confidence."""
        return sum(segment.captions[0].low_confidence for segment in self.segments)

    @property
    def low_confidence(self) -> bool:
        """Whether the best caption of a segment is flagged as one of low confidence."""
        return self.num_low_confidence > 0

    def failed(self, error: CapvidError) -> CaptionResult:
        """Return the result of the same input with an error instead of captions."""
        return CaptionResult(
            path=self.path,
            status="error",
            captions=(),
            error=error,
            model=self.model,
            name=self.name,
            lost=self.lost,
        )


def make_record(
    result: CaptionResult, settings: Mapping[str, Any], *, attention: bool = False
) -> dict[str, Any]:
    """Return the JSON record of one result.

    Args:
        result: the result, with traces if ``attention`` is set.
        settings: everything besides the model that the captions depend on.
        attention: whether to record each word's weights over the frames and the times of these frames.
    """
    segments = []
    for segment in result.segments:
        times = None
        if attention and result.times is not None:
            times = [round(float(time), _DECIMALS) for time in result.times[segment.frames]]
        change = [round(value, _DECIMALS) for value in segment.memory_change]
        segments.append(
            {
                "start": round(segment.start, _DECIMALS),
                "end": None if segment.end is None else round(segment.end, _DECIMALS),
                "caption": segment.captions[0].text,
                "captions": [_caption_record(each, times, attention=attention) for each in segment.captions],
                **({"memory_change": change} if change else {}),
            }
        )
    captions: Any = segments[0]["captions"] if segments else []
    if result.paragraph:
        captions = [_caption_record(caption) for caption in result.captions]
    name, _, revision = result.model.partition("@")
    record: dict[str, Any] = json_value(
        {
            "schema_version": SCHEMA_VERSION,
            "video": utf8_text(result.path),
            "status": result.status,
            "low_confidence": result.low_confidence,
            "model": {"name": name, "revision": revision or None},
            "settings": dict(settings),
            "duration": None if result.duration is None else round(result.duration, _DECIMALS),
            "captions": captions,
            **({"segments": segments} if result.paragraph else {}),
            "error": error_record(result.error),
        }
    )
    return record


def error_record(error: CapvidError | None) -> dict[str, str] | None:
    """Return the JSON record of an error; None without one."""
    if error is None:
        return None
    return {"kind": error.kind, "message": utf8_text(error.message), "remedy": utf8_text(error.remedy)}


def _caption_record(
    caption: Caption, times: Sequence[float] | None = None, *, attention: bool = False
) -> dict[str, Any]:
    """Return the JSON record of a caption; ``times`` are those of the frames in its attention."""
    record: dict[str, Any] = {
        "text": caption.text,
        "logprob": round(caption.logprob, _DECIMALS),
        "mean_logprob": round(caption.mean_logprob, _DECIMALS),
    }
    if caption.confidence is not None:
        record["confidence"] = round(caption.confidence, _CONFIDENCE_DECIMALS)
    if caption.clip_score is not None:
        record["clip_score"] = round(caption.clip_score, _DECIMALS)
    record["words"] = [
        {"word": word.word, "logprob": round(word.logprob, _DECIMALS)} for word in caption.words
    ]
    weights = (caption.traces or {}).get("attention") if attention else None
    if weights is not None:
        for word, row in zip(record["words"], weights, strict=False):  # the last row belongs to the end
            word["attention"] = [round(float(weight), _WEIGHT_DECIMALS) for weight in row]
        record["times"] = times
    return record
