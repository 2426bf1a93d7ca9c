from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from toy import Run

REFERENCES = {"v": {"duration": 20, "timestamps": [[0, 9], [11, 20]], "sentences": ["A man talks.", "a dog"]}}
RESULTS = {
    "v": [
        {"sentence": "a man talks to her", "timestamp": [0, 10]},
        {"sentence": "the dog", "timestamp": [12.5, 20]},
    ]
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    predictions, references = tmp_path / "predictions.json", tmp_path / "references.json"
    predictions.write_text(json.dumps({"version": "1", "results": RESULTS, "external_data": {}}))
    references.write_text(json.dumps(REFERENCES))
    return predictions, references


def test_table_and_json(capvid: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    per_video = tmp_path / "videos.csv"
    code, out, err = capvid("score", "--dense", *files)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["tIoU", "precision", "recall", "BLEU-4"]
    assert [line.split()[0] for line in lines[1:6]] == ["0.3", "0.5", "0.7", "0.9", "mean"]
    assert lines[5].split()[1:3] == ["75.0", "75.0"]
    assert lines[-1] == "1 video; scores are times 100"
    assert max(map(len, lines)) <= 60
    code, out, err = capvid("score", "--dense", *files, "--format=json", "--per-video", per_video)
    record = json.loads(out)
    assert code == 0 and record["evaluator"] == "2019"
    assert record["scores"]["recall"] == 0.75 and record["thresholds"]["0.9"]["recall"] == 0
    assert record["diversity"]["distinct"] == 1 and record["counts"] == {"videos": 1, "missing": 0}
    with per_video.open() as stream:
        (row,) = csv.DictReader(stream)
    assert float(row["CIDEr-D"]) == record["scores"]["CIDEr-D"]


def test_options_of_captions_are_refused(capvid: Run, files: tuple[Path, Path]) -> None:
    for option in (["--paragraph"], ["--metrics", "bleu"], ["--compare", files[0]]):
        code, out, err = capvid("score", "--dense", *files, *option)
        assert (code, out) == (2, "") and f"{option[0]} is not for --dense" in err
