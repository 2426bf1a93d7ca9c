from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from capvid.datasets.dataset_check import check_data, histogram, report_lines
from capvid.errors import FeatureFileError, UsageError

ROWS = [
    {"id": "a", "captions": ["A goat rows a boat.", "The goat rows!"]},
    {"id": "b", "captions": ["a kite"]},
    {"id": "c", "split": "val", "captions": ["A goat reads the kite."]},
]


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return f"jsonl:{path}"


def save_packed_features(path: Path, *names: str) -> str:
    save_file({name: np.ones((3, 4), np.float32) for name in names}, path)
    return str(path)


def report_text(*specs: str, features: tuple[str, ...] = (), min_count: int = 1) -> str:
    return "\n".join(report_lines(check_data(specs, features=features, min_count=min_count)))


def test_report_counts_videos_captions_and_vocabulary(tmp_path: Path) -> None:
    report = check_data([write(tmp_path / "own.jsonl", *ROWS)], min_count=2)
    train = report.splits["train"]
    assert (train.videos, train.captions, train.words, train.sentences) == (2, 3, 10, 0)
    assert report.splits["val"].words == 5
    assert report.vocabulary == Counter(a=3, goat=2, rows=2, boat=1, the=1, kite=1)
    assert report.lengths == Counter({5: 2, 3: 1, 2: 1})
    assert report.usable == 3 and not report.lacks_features
    output = "\n".join(report_lines(report))
    assert "vocabulary of train: 6 words, 3 of them at least 2 times" in output
    assert "unknown words in val: 3 of 5 (60.00%)" in output
    table = [line.split() for line in output.splitlines()[:3]]
    assert table == [
        ["split", "videos", "captions", "words"],
        ["train", "2", "3", "10"],
        ["val", "1", "1", "5"],
    ]
    assert "unusable" not in output and "notes" not in output


def test_paragraphs_are_counted_by_segments_and_sentences(tmp_path: Path) -> None:
    timed = {"timestamps": [[0, 4], [4, 5]], "sentences": ["A goat rows.", " It sings."]}
    (tmp_path / "train.json").write_text(json.dumps({"v_a": timed, "v_b": timed}), encoding="utf-8")
    (tmp_path / "val_1.json").write_text(json.dumps({"v_c": timed}), encoding="utf-8")
    second = {"v_c": {"timestamps": [[0, 5]], "sentences": ["It rows."]}}
    (tmp_path / "val_2.json").write_text(json.dumps(second), encoding="utf-8")
    output = report_text(f"activitynet:{tmp_path}").splitlines()
    assert output[0].split() == ["split", "videos", "segments", "paragraphs", "sentences", "words"]
    assert output[1].split() == ["train", "2", "4", "2", "4", "10"]
    assert output[2].split() == ["val", "1", "2", "2", "3", "7"]


def test_missing_features_are_counted_and_named(tmp_path: Path) -> None:
    rows = [{"id": f"v{n}", "captions": ["a kite"]} for n in range(9)]
    spec = write(tmp_path / "own.jsonl", *rows, *ROWS[2:])
    features = save_packed_features(tmp_path / "some.safetensors", "v8", "v7", "other")
    report = check_data([spec], features=[features])
    assert report.lacks_features and report.usable == 2
    output = "\n".join(report_lines(report))
    assert "missing features: 7 of 9 in train (v0, v1, v2, v3, v4 and 2 more)" in output
    assert "missing features: 1 of 1 in val (c)" in output
    assert "the features hold 3 videos (other, v7, v8)" in output
    rest = save_packed_features(tmp_path / "rest.safetensors", "c", *(f"v{n}" for n in range(7)))
    assert "features: every video has some" in report_text(spec, features=(features, rest))
    with pytest.raises(FeatureFileError, match="no such file"):
        check_data([spec], features=[str(tmp_path / "none")])


def test_augmented_views_are_not_counted_as_videos(tmp_path: Path) -> None:
    features = save_packed_features(tmp_path / "some.safetensors", "a", "a@1", "a@2", "x@1")
    output = report_text(write(tmp_path / "own.jsonl", *ROWS), features=(features,))
    assert "the features hold 2 videos (a, x@1)" in output


def test_segments_in_seconds_need_features_with_times(tmp_path: Path) -> None:
    timed = {"timestamps": [[0, 4]], "sentences": ["A goat rows."]}
    (tmp_path / "train.json").write_text(json.dumps({"v_a": timed}), encoding="utf-8")
    report = check_data(
        [f"activitynet:{tmp_path}"], features=[save_packed_features(tmp_path / "f.safetensors", "v_a")]
    )
    assert report.lacks_features
    assert "features without times, but segments in seconds, for example v_a" in "\n".join(
        report_lines(report)
    )


def test_all_unusable_rows_and_files_are_listed(tmp_path: Path) -> None:
    spec = write(tmp_path / "own.jsonl", ROWS[0], {"id": 3}, ROWS[0], {"id": "d", "captions": [""]})
    report = check_data([spec, f"msvd:{tmp_path / 'none'}"])
    assert [row.location.line for row in report.data.skipped] == [2, 3, 4]
    output = "\n".join(report_lines(report))
    assert "unusable rows: 3\n" in output
    assert f"  {tmp_path / 'own.jsonl'}, line 4: an empty caption" in output
    assert "unusable files: 1\n" in output and "no such folder" in output


def test_missing_splits_and_wordless_captions_are_noted(tmp_path: Path) -> None:
    output = report_text(write(tmp_path / "own.jsonl", {"id": "a", "captions": ["a kite", "..."]}))
    assert "no video is in the val split; training needs one" in output
    alone = report_text(write(tmp_path / "val.jsonl", ROWS[2]))
    assert "no video is in the train split" in alone and "vocabulary" not in alone
    assert "1 captions or sentences have no words and are not learned from" in output


@pytest.mark.parametrize(
    "lengths",
    [
        Counter({7: 3}),
        Counter({0: 1}),
        Counter(range(1, 9)),
        Counter({**dict.fromkeys(range(3, 30), 40), 900: 1}),
        Counter({1: 1_000_000, 1000: 1}),
    ],
)
def test_histogram_has_at_most_ten_rows_and_counts_every_caption(lengths: Counter[int]) -> None:
    lines = list(histogram(lengths))
    assert 1 <= len(lines) <= 10
    assert max(map(len, lines)) <= 80
    assert sum(int(line.split()[1]) for line in lines) == lengths.total()
    for line in lines:
        _, count, *bar = line.split()
        assert bool(bar) == (count != "0")
    last = lines[-1].split()[0].split("-")
    assert int(last[0]) <= max(lengths) <= int(last[-1])


def test_specs_are_parsed_before_any_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such dataset format"):
        check_data([str(tmp_path / "none.jsonl"), "nowhere:x"])


@pytest.mark.slow
def test_check_without_features_does_not_import_torch(tmp_path: Path) -> None:
    spec = write(tmp_path / "own.jsonl", *ROWS)
    code = (
        "import sys; from capvid.cli.app import main; code = main(['data', 'check', sys.argv[1]]);"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, spec], capture_output=True, text=True, check=True)
    assert done.stderr == "0 False\n"
