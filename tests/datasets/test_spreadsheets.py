"""Tables as spreadsheets write them: semicolons, UTF-16, numbers as ids; and JSON lines as references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capvid.datasets.dataset import load_data
from capvid.scoring.predictions import read_predictions
from capvid.scoring.references import read_references
from capvid.video.input_lists import read_list, read_piped

TABLE = 'video;caption\nclips/7.mp4;"a man, who sings"\nclips/8.mp4;a dog\n'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_with_semicolons(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(TABLE, encoding=encoding)
    expected = {"clips/7.mp4": ["a man, who sings"], "clips/8.mp4": ["a dog"]}
    assert read_predictions(path).sentences == expected
    captions = {video.id: video.captions for video in load_data([f"csv:{path}"]).videos}
    assert captions == {"7": ("a man, who sings",), "8": ("a dog",)}
    assert [str(entry) for entry in read_list(path)] == list(expected)
    if encoding != "utf-16":
        assert [str(entry) for entry in read_piped(path.read_bytes())] == list(expected)


def test_ids_may_be_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"id": 7, "captions": ["a man"]}))
    assert [video.id for video in load_data([f"jsonl:{path}"]).videos] == ["7"]


def test_lines_of_result_files_are_references(tmp_path: Path) -> None:
    path = tmp_path / "references.jsonl"
    rows = [
        {"video_id": 7, "caption": "a man"},
        {"video_id": 7, "caption": "a singer"},
        {"id": "b", "caption": "a"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_references(path).texts == {"7": ["a man", "a singer"], "b": ["a"]}
    path.write_text(json.dumps({"file_name": "b.mp4", "text": "a dog"}))
    assert read_references(path).texts == {"b.mp4": ["a dog"]}
