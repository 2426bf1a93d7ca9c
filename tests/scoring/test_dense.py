from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from capvid.errors import DataError, UsageError
from capvid.metrics.dense_captioning import TimedSentence
from capvid.scoring.dense import read_timed_sentences, score_dense

SEGMENTS = {
    "v_aaaaaaaaaaa": [TimedSentence(0, 9, "a man talks"), TimedSentence(11, 20.5, "a dog runs away")],
    "v_bbbbbbbbbbb": [TimedSentence(3, 7, "two men cook")],
}
FORMS: dict[str, Any] = {
    "pdvc": {
        "version": "VERSION 1.0",
        "results": {
            video: [
                {"sentence": text, "timestamp": [start, end], "proposal_score": 0.5, "query_id": 3}
                for start, end, text in segments
            ]
            for video, segments in SEGMENTS.items()
        },
        "external_data": {"used": True, "details": ""},
    },
    "activitynet": {
        video: {
            "duration": 30,
            "timestamps": [[start, end] for start, end, _ in segments],
            "sentences": [text for _, _, text in segments],
        }
        for video, segments in SEGMENTS.items()
    },
    "youcook2": {
        "database": {
            video: {
                "subset": "training",
                "annotations": [
                    {"segment": [start, end], "id": 0, "sentence": text} for start, end, text in segments
                ],
            }
            for video, segments in SEGMENTS.items()
        }
    },
    "records": [
        {
            "video": f"clips/{video}.mp4",
            "status": "ok",
            "segments": [
                {"start": start, "end": end, "caption": text, "captions": [{"text": text}]}
                for start, end, text in segments
            ],
        }
        for video, segments in SEGMENTS.items()
    ],
}


@pytest.fixture(autouse=True)
def no_meteor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave METEOR out, whose paraphrases take seconds to read."""
    monkeypatch.setitem(sys.modules, "capvid.metrics.meteor.meteor_scorer", None)


@pytest.fixture
def references(tmp_path: Path) -> Path:
    return write(tmp_path / "references.json", FORMS["activitynet"])


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path: Path, references: Path, form: str) -> None:
    path = write(tmp_path / "predictions.json", FORMS[form])
    segments = read_timed_sentences(path)
    assert list(segments.values()) == list(SEGMENTS.values())
    scores = score_dense(path, [references])
    assert scores.mean["precision"] == scores.mean["recall"] == 1
    assert scores.mean["BLEU-4"] == pytest.approx(0.5, abs=0.02)  # the video with 3 words has no 4-gram
    assert scores.diversity.distinct == 1 and not scores.missing and not scores.soda
    assert scores.notes == ["METEOR and SODA_c are left out: pip install 'capvid[meteor]'"]


def test_records_of_captions_cover_the_video(tmp_path: Path) -> None:
    rows = [
        {"video": "a.mp4", "status": "ok", "duration": 8.5, "captions": [{"text": "a man"}, {"text": "a"}]},
        {"video": "b.mp4", "status": "error", "duration": None, "captions": []},
    ]
    lines = tmp_path / "records.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, row in enumerate(rows):
        write(folder / f"{number}.json", row)
    for path in (lines, folder):
        assert read_timed_sentences(path) == {"a.mp4": [TimedSentence(0, 8.5, "a man")]}


def test_missing_predictions(tmp_path: Path, references: Path) -> None:
    results = {"bbbbbbbbbbb": FORMS["pdvc"]["results"]["v_bbbbbbbbbbb"], "other": []}
    path = write(tmp_path / "predictions.json", {"results": results})
    with pytest.raises(DataError, match="no prediction for 1 of 2 videos: v_aaaaaaaaaaa"):
        score_dense(path, [references])
    empty = score_dense(path, [references], missing="empty")
    skip = score_dense(path, [references], missing="skip")
    assert empty.mean["recall"] == 0.5 and skip.mean["recall"] == 1
    assert empty.missing == ["v_aaaaaaaaaaa"] and list(skip.per_video) == ["v_bbbbbbbbbbb"]
    assert any("1 not in the references, left out: other" in note for note in skip.notes)


def test_the_best_annotator_counts(tmp_path: Path, references: Path) -> None:
    predictions = write(tmp_path / "predictions.json", FORMS["pdvc"])
    second = {video: {"timestamps": [[40, 50]], "sentences": ["a cat"]} for video in SEGMENTS}
    scores = score_dense(predictions, [write(tmp_path / "second.json", second), references])
    assert scores.mean["precision"] == scores.mean["recall"] == 1


def test_copies_of_training_sentences(tmp_path: Path, references: Path) -> None:
    training = {"t": {"timestamps": [[0, 1]], "sentences": ["Two men cook."]}}
    path = write(tmp_path / "training.json", training)
    scores = score_dense(references, [references], training=[path])
    assert scores.diversity.in_training == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ({"v": [{"sentence": "a", "timestamp": [5, 3]}]}, "a segment from 5 to 3 seconds"),
        ({"v": [{"sentence": "a", "timestamp": [5]}]}, "not .start, end.: .5."),
        ({"v": [{"sentence": 3, "timestamp": [1, 2]}]}, "a caption that is not text: 3"),
        ({"v": [{"sentence": "a", "timestamp": [1, None]}]}, "None is not a time in seconds"),
        ({"v": ["a man"]}, "a segment that is not an object: 'a man'"),
        ({"v": "a man"}, "no segments: 'a man'"),
        ({"v": {"timestamps": [[0, 1]], "sentences": ["a", "b"]}}, "1 segments and 2 sentences"),
        ({"v": [], "v ": []}, "the id 'v' occurs twice"),
        ([{"caption": "a"}], "no id: none of image_id"),
        ("a man", "not a known format of segments"),
        ({}, "no segments"),
    ],
)
def test_wrong_files(tmp_path: Path, segments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_timed_sentences(write(tmp_path / "predictions.json", segments))


def test_unknown_version(references: Path) -> None:
    with pytest.raises(UsageError, match="no evaluator '2017'"):
        score_dense(references, [references], version="2017")
