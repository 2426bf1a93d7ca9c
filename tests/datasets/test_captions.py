from __future__ import annotations

import json
from pathlib import Path

import pytest

from capvid.datasets.dataset import Segment, load_data
from capvid.errors import DataError, UsageError


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return str(path)


def test_several_files_are_concatenated_and_text_is_unchanged(tmp_path: Path) -> None:
    one = write(tmp_path / "a b.jsonl", {"id": "v1", "split": "val", "captions": ["A  cat, é!"]}, "")
    two = write(tmp_path / "b.jsonl", {"id": "v2", "captions": ["x", "y"]})
    videos = load_data([f"jsonl:{one}", two]).videos
    assert [(v.id, v.split, v.captions) for v in videos] == [
        ("v1", "val", ("A  cat, é!",)),
        ("v2", "train", ("x", "y")),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{oops", "not JSON"),
        ("[1]", "no id"),
        ({"id": 3.5, "captions": ["a"]}, "no id"),
        ({"id": "v", "captions": []}, "no list of captions"),
        ({"id": "v", "captions": "a man"}, "no list of captions"),
        ({"id": "v", "captions": ["a"], "split": "dev"}, "split 'dev'"),
        ({"id": "good", "captions": ["a"]}, "occurs twice"),
    ],
)
def test_bad_row_reports_its_line(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "c.jsonl", {"id": "good", "captions": ["a"]}, row)
    with pytest.raises(DataError, match=f"line 2: .*{message}") as error:
        load_data([path])
    assert "\n" not in str(error.value)


SEGMENTS = [{"start": 0, "end": 2}, {"start": 2, "end": 5}]


def test_paragraphs_have_a_sentence_for_every_segment(tmp_path: Path) -> None:
    row = {"id": "v", "split": "val", "segments": SEGMENTS, "paragraphs": [["a", "b"], ["c", "d"]]}
    timed = {**row, "id": "w", "unit": "seconds", "captions": ["all of it"]}
    first, second = load_data([write(tmp_path / "p.jsonl", row, timed)]).videos
    assert first.captions == ()
    assert first.segments == (Segment(0, 2), Segment(2, 5))
    assert first.paragraphs == (("a", "b"), ("c", "d"))
    assert second.segments[1] == Segment(2, 5, "seconds")
    assert second.captions == ("all of it",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paragraphs": [["a"]]}, "a sentence for each of the 2 segments"),
        ({"paragraphs": []}, "no list of paragraphs"),
        ({"paragraphs": ["a", "b"]}, "no list of paragraphs"),
        ({"segments": []}, "no list of segments"),
        ({"segments": [{"start": 0}]}, "no list of segments"),
        ({"segments": [{"start": 3, "end": 3}, SEGMENTS[1]]}, "no list of segments"),
        ({"segments": SEGMENTS[::-1]}, "in order of their start"),
        ({"unit": "hours"}, "no list of segments"),
        (
            {"segments": [{"start": 0.5, "end": 2}, SEGMENTS[1]]},
            "no list of segments",
        ),  # seconds, but no unit
    ],
)
def test_bad_paragraph_reports_its_line(tmp_path: Path, change: dict, message: str) -> None:
    row = {"id": "v", "segments": SEGMENTS, "paragraphs": [["a", "b"]], **change}
    with pytest.raises(DataError, match=f"line 1: .*{message}") as error:
        load_data([write(tmp_path / "p.jsonl", row)])
    assert "\n" not in str(error.value)


def test_missing_files_empty_files_and_unknown_formats_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_data([str(tmp_path / "none.jsonl")])
    with pytest.raises(DataError, match="no captions in this file"):
        load_data([write(tmp_path / "empty.jsonl", "")])
    with pytest.raises(UsageError, match="no such dataset format"):
        load_data(["nowhere:x"])
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\x00")
    with pytest.raises(DataError, match="not UTF-8 text"):
        load_data([str(tmp_path / "bytes.jsonl")])
