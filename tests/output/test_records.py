from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from capvid.errors import EmptyVideoError
from capvid.output import make_record
from capvid.output.records import shown
from capvid.results import Caption, CaptionResult, Segment, WordScore

SETTINGS = {"sampling": "uniform:28", "beam_size": 5, "length_penalty": 0.7}


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
        "model": {"name": "m3", "revision": "0123456789ab"},
        "settings": SETTINGS,
        "duration": None,
        "captions": [
            {
                "text": "a dog",
                "logprob": -0.5,
                "words": [{"word": "a", "logprob": -0.25}, {"word": "dog", "logprob": -0.123457}],
            }
        ],
        "error": None,
    }


def test_the_record_of_a_failure() -> None:
    error = EmptyVideoError("in/v.mp4", "is empty", remedy="download it again")
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
    assert shown(Path("caf\udce9.mp4")) == "caf\ufffd.mp4"
    assert shown(Path("café.mp4")) == "café.mp4"
