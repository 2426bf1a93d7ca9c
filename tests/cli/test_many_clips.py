"""200 clips, five of them broken: every output agrees on names and counts."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from report_pages import Page
from toy import Run, Toy, save_toy_captioner, write_video

BROKEN = {f"clip {number:03}.mp4" for number in (0, 7, 99, 150, 199)}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for number in range(200):
        path = folder / f"clip {number:03}.mp4"
        if path.name in BROKEN:
            path.write_text("no video")
        elif number < 40:
            write_video(path, seed=number, frames=4)
        else:
            shutil.copy(folder / f"clip {number % 30 + 8:03}.mp4", path)
    return folder


@pytest.fixture
def calibrated(toy: Toy, clips: Path, capvid: Run, tmp_path: Path) -> Path:
    """The toy captioner, with a calibration that flags a quarter of the captions."""
    out = capvid("caption", clips, "--model", toy.model, "--format", "jsonl")[1]
    records = [json.loads(line) for line in out.splitlines()]
    means = sorted(record["captions"][0]["mean_logprob"] for record in records if record["captions"])
    curve = {"intercept": math.log(0.25) - means[len(means) // 4], "per_logprob": 1.0, "per_information": 0.0}
    shares = dict.fromkeys(("videos", "right", "flagged", "right_flagged", "right_others"), 1)
    save_toy_captioner(
        tmp_path / "calibrated", weights=toy.weights, confidence={"average": [0.0] * 1280, **curve, **shares}
    )
    return tmp_path / "calibrated"


@pytest.mark.slow
def test_outputs_agree_on_names_and_counts(
    capvid: Run, toy: Toy, clips: Path, calibrated: Path, tmp_path: Path
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    command = ["caption", clips, "--model", calibrated]
    failed: dict[str, set[str]] = {}
    doubtful: dict[str, set[str]] = {}
    summaries = set()

    def note(output: str, failures: set[str], flagged: set[str]) -> None:
        failed[output], doubtful[output] = (
            {Path(name).name for name in names} for names in (failures, flagged)
        )

    for form in ("txt", "csv", "tsv", "json", "jsonl", "parquet"):
        options = ["--output-dir", tmp_path / form] if form == "parquet" else []
        if form == "txt":
            options = ["--report", tmp_path / "page.html"]
        code, out, err = capvid(*command, "--format", form, *options)
        assert code == 3
        *errors, summary, named = err.splitlines()
        assert {re.match(r"error: (.*\.mp4): ", line)[1] for line in errors} == {  # type: ignore[index]
            str(clips / name) for name in BROKEN
        }
        summaries.add((summary, named))
        if form == "txt":
            rows = [line.split("\t") for line in out.splitlines()]
            flagged = {row[0] for row in rows if row[2:] == ["low confidence"]}
            note(form, {row[0] for row in rows if not row[1] and row[2].startswith("error: ")}, flagged)
        elif form in ("csv", "tsv"):
            table = list(csv.DictReader(io.StringIO(out), delimiter="," if form == "csv" else "\t"))
            flagged = {row["video"] for row in table if row["low_confidence"] == "true"}
            note(form, {row["video"] for row in table if row["status"] == "error"}, flagged)
        else:
            records = json.loads(out) if form == "json" else list(map(json.loads, out.splitlines()))
            if form == "parquet":
                records = [
                    r for path in (tmp_path / form).glob("*.parquet") for r in pq.read_table(path).to_pylist()
                ]
            assert len(records) == 200
            flagged = {record["video"] for record in records if record["low_confidence"]}
            note(form, {record["video"] for record in records if record["status"] == "error"}, flagged)

    page = (tmp_path / "page.html").read_text()
    assert page.count('class="video failed"') == len(BROKEN)
    records = list(map(json.loads, Page(page).records))
    note(
        "page",
        {record["video"] for record in records if record["status"] == "error"},
        {record["video"] for record in records if record["low_confidence"]},
    )
    assert set(map(frozenset, failed.values())) == {frozenset(BROKEN)}
    (flagged_everywhere,) = set(map(frozenset, doubtful.values()))
    count = len(flagged_everywhere)
    assert 20 < count < 100
    assert re.search(rf"\b195 captioned, 5 failed, {count} of low confidence in ", page)
    ((summary, named),) = summaries
    assert summary == f"195 captioned, 5 failed, {count} of low confidence"
    first = sorted(flagged_everywhere)[:3]
    names = ", ".join(str(clips / name) for name in first)
    assert named == f"note: low confidence: {names} and {count - 3} more, see low_confidence in csv and json"
