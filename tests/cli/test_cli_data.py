from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from toy import Run

GOOD = [
    {"id": "a", "captions": ["A goat rows a boat."]},
    {"id": "b", "split": "val", "captions": ["A goat sings."]},
]


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_check_of_a_usable_dataset(capvid: Run, tmp_path: Path) -> None:
    code, out, err = capvid("data", "check", write(tmp_path / "own.jsonl", *GOOD), "--min-count", "2")
    assert (code, err) == (0, "")
    assert out.startswith("split ") and "at least 2 times" in out and "words per caption" in out


def test_unusable_rows_are_listed_on_stdout(capvid: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", *GOOD, {"id": "c"}, GOOD[0])
    code, out, err = capvid("data", "check", path)
    assert (code, err) == (3, "")
    assert f"unusable rows: 2\n  {path}, line 3: no list of captions\n  {path}, line 4: the video a" in out
    skipped = capvid("data", "check", "--skip-bad", path)
    assert skipped == (0, out, "")


def test_check_reports_missing_features(capvid: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", *GOOD)
    partial, unrelated = tmp_path / "one.safetensors", tmp_path / "none.safetensors"
    save_file({"a": np.ones((2, 3), np.float32)}, partial)
    save_file({"z": np.ones((2, 3), np.float32)}, unrelated)
    code, out, err = capvid("data", "check", path, "--features", partial, "--skip-bad")
    assert (code, err) == (3, "")
    assert "missing features: 1 of 1 in val (b)" in out
    code, out, err = capvid("data", "check", path, "--features", unrelated)
    assert (code, err) == (1, "error: no video of the data has features; see the report\n")
    assert "the features hold 1 videos (z)" in out


def test_check_of_an_unusable_dataset(capvid: Run, tmp_path: Path) -> None:
    code, out, err = capvid("data", "check", f"msvd:{tmp_path}")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}: no sents_train_lc_nopunc.txt or ") and err.count("\n") == 1
    code, out, err = capvid("data", "check", write(tmp_path / "own.jsonl", {"id": "c"}, {"id": "d"}))
    assert (code, err) == (1, "error: nothing in the data can be used; see the report\n")
    assert "unusable rows: 2\n" in out


def test_skip_bad_reports_unparsable_dataset(capvid: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", *GOOD)
    (tmp_path / "train.json").write_text('{"v_a": {\n', encoding="utf-8")
    code, out, err = capvid("data", "check", path, f"activitynet:{tmp_path}", "--skip-bad")
    assert (code, err) == (3, "")
    assert "unusable files: 1\n" in out and "train.json, line 2, column 1: not JSON" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check"], "SPEC"),
        (["check", "nowhere:x"], "no such dataset format"),
        (["check", "msvd:"], "no path"),
        (["check", "a.jsonl", "--min-count", "0"], "--min-count"),
        (["look"], "look"),
    ],
)
def test_usage_errors(capvid: Run, arguments: list[str], message: str) -> None:
    code, out, err = capvid("data", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_help_imports_nothing_heavy(capvid: Run) -> None:
    script = (
        "import sys; from capvid.cli.app import main; code = main(['data', 'check', '--help']);"
        "print(code, {'torch', 'numpy', 'nltk'} & set(sys.modules), file=sys.stderr)"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stderr == "0 set()\n"
    assert "youcook2:DIR" in completed.stdout
    assert "\n  data " in capvid("--help")[1]


def test_the_check_does_not_advise_itself(capvid: Run, tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl")
    bad = write(tmp_path / "bad.jsonl", {"id": "a"})
    for specs in ([empty], [bad], [empty, bad]):
        code, out, err = capvid("data", "check", *specs)
        assert code == 1 and "capvid data check" not in out + err
