from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from report_pages import SETTINGS

from capvid.decoding.caption_generator import Caption, WordScore
from capvid.errors import VideoError
from capvid.output.results import CaptionResult, Segment, make_record
from capvid.pipeline import paragraph
from capvid.utils.escaping import utf8_text


def result(**changes: Any) -> CaptionResult:
    words = (WordScore(word="a", logprob=-0.25), WordScore(word="dog", logprob=-0.123456789))
    fields: dict[str, Any] = {
        "path": Path("in/v.mp4"),
        "status": "ok",
        "captions": (Caption(text="a dog", logprob=-0.5, words=words),),
        "error": None,
        "model": "m3@0123456789ab",
    }
    fields |= changes
    whole = Segment(start=0.0, end=fields.get("duration"), captions=fields["captions"], frames=np.arange(4))
    return CaptionResult(**{"segments": (whole,) if fields["captions"] else (), **fields})


def test_the_record_of_a_caption() -> None:
    assert make_record(result(), SETTINGS) == {
        "schema_version": 1,
        "video": "in/v.mp4",
        "status": "ok",
        "low_confidence": False,
        "model": {"name": "m3", "revision": "0123456789ab"},
        "settings": SETTINGS,
        "duration": None,
        "captions": [
            {
                "text": "a dog",
                "logprob": -0.5,
                "mean_logprob": -0.166667,
                "words": [{"word": "a", "logprob": -0.25}, {"word": "dog", "logprob": -0.123457}],
            }
        ],
        "error": None,
    }


LOOKED = np.array([[0.25, 0.5, 0.125, 0.0625], [0.00004, 0.1, 0.2, 0.69996], [0.0, 0.0, 0.0, 1.0]])


def looked(**changes: Any) -> CaptionResult:
    """With traces: four of the five frames were looked at."""
    words = (WordScore(word="a", logprob=-0.25), WordScore(word="dog", logprob=-0.5))
    blank = np.array([[0.0625], [0.0], [0.0]])
    caption = Caption(text="a dog", logprob=-0.9, words=words, traces={"attention": LOOKED, "blank": blank})
    made = result(captions=(caption,), duration=10.0)
    segment = replace(made.segments[0], frames=np.array([0, 1, 3, 4]))
    return replace(made, segments=(segment,), times=np.array([0.0, 1.5, 3.0, 4.5, 1 / 3 + 6]), **changes)


def test_attention_is_recorded_where_it_is_asked_for() -> None:
    (caption,) = make_record(looked(), SETTINGS, attention=True)["captions"]
    assert caption["times"] == [0.0, 1.5, 4.5, 6.333333]
    assert [word["attention"] for word in caption["words"]] == [
        [0.25, 0.5, 0.125, 0.0625],
        [0.0, 0.1, 0.2, 0.7],
    ]
    without = make_record(looked(), SETTINGS)
    assert without == make_record(replace(looked(), times=None), SETTINGS)
    assert set(without["captions"][0]) == {"text", "logprob", "mean_logprob", "words"}
    (caption,) = make_record(replace(looked(), times=None), SETTINGS, attention=True)["captions"]
    assert caption["times"] is None and "attention" in caption["words"][0]
    (caption,) = make_record(result(), SETTINGS, attention=True)["captions"]  # a captioner that has none
    assert "times" not in caption and "attention" not in caption["words"][0]


def test_segments_have_their_own_attention_and_change_of_memory() -> None:
    whole = looked()
    first = replace(whole.segments[0], end=5.0, frames=np.array([0, 1, 2, 3]), memory_change=(0.5, 1 / 3))
    second = replace(whole.segments[0], start=5.0, frames=np.array([1, 2, 3, 4]))
    told = paragraph([first.captions[0], second.captions[0]])
    several = replace(whole, paragraph=True, captions=(told,), segments=(first, second))
    record = make_record(several, SETTINGS, attention=True)
    assert [each.get("memory_change") for each in record["segments"]] == [[0.5, 0.333333], None]
    assert [each["captions"][0]["times"] for each in record["segments"]] == [
        [0.0, 1.5, 3.0, 4.5],
        [1.5, 3.0, 4.5, 6.333333],
    ]
    (caption,) = record["captions"]
    assert caption["text"] == "A dog. A dog." and "times" not in caption
    assert caption["mean_logprob"] == -0.3  # four words and two ends


def test_records_of_calibrated_captioners_have_a_confidence() -> None:
    caption = replace(result().captions[0], confidence=0.12345)
    assert make_record(result(captions=(caption,)), SETTINGS)["captions"][0]["confidence"] == 0.123
    assert "confidence" not in make_record(result(), SETTINGS)["captions"][0]


def test_the_record_of_a_failure() -> None:
    error = VideoError("in/v.mp4", "is empty", remedy="download it again", kind="empty")
    record = make_record(result(status="error", captions=(), error=error, model="m3"), SETTINGS)
    assert record["status"] == "error"
    assert record["captions"] == []
    assert record["model"] == {"name": "m3", "revision": None}
    assert record["error"] == {
        "kind": "empty",
        "message": "in/v.mp4: is empty",
        "remedy": "download it again",
    }


def test_a_name_that_is_not_utf8_can_be_shown() -> None:
    assert utf8_text(Path("caf\udce9.mp4")) == "caf\\xe9.mp4"
    assert utf8_text(Path("café.mp4")) == utf8_text("café.mp4") == "café.mp4"
