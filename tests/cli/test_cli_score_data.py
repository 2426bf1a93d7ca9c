"""Human captions scored against each other: one reference of each video against the rest."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from toy import Run

pytestmark = pytest.mark.shared
METRICS = ("--format=json", "--metrics", "bleu,rouge,cider")


@pytest.fixture
def annotations(shared_data: Path) -> Path:
    return shared_data / "data" / "annotations"


def read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def score_json(capvid: Run, *arguments: object) -> dict[str, Any]:
    code, out, err = capvid("score", *arguments)
    assert code == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.mark.slow
def test_msrvtt_first_caption_against_the_rest(annotations: Path, capvid: Run, tmp_path: Path) -> None:
    annotation = read(annotations / "msrvtt" / "test_videodatainfo.json.gz")
    first_captions: dict[str, str] = {}
    other_rows = []
    for row in annotation["sentences"]:
        if row["video_id"] in first_captions:
            other_rows.append(row)
        else:
            first_captions[row["video_id"]] = row["caption"]
    rows = [{"video": f"clips/{v}.mp4", "captions": [{"text": text}]} for v, text in first_captions.items()]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "references.json").write_text(json.dumps({**annotation, "sentences": other_rows}))
    report = score_json(capvid, tmp_path / "predictions.jsonl", tmp_path / "references.json", *METRICS)
    assert report["counts"]["references"] == 19 * report["counts"]["videos"] == len(other_rows)
    assert 0.3 < report["scores"]["CIDEr-D"] < 0.8
    self_report = score_json(
        capvid,
        tmp_path / "predictions.jsonl",
        annotations / "msrvtt" / "test_videodatainfo.json.gz",
        *METRICS,
    )
    assert self_report["scores"]["BLEU-4"] == pytest.approx(1, abs=1e-6)


def test_msvd_first_caption_against_the_rest(annotations: Path, capvid: Run, tmp_path: Path) -> None:
    text = gzip.decompress((annotations / "msvd" / "sents_test_lc_nopunc.txt.gz").read_bytes()).decode()
    mapping = gzip.decompress((annotations / "msvd" / "youtube_mapping.txt.gz").read_bytes()).decode()
    names = {line.split()[1]: line.split()[0] for line in mapping.splitlines()}
    first_captions: dict[str, str] = {}
    other_lines = []
    for line in text.splitlines():
        video, _, caption = line.partition("\t")
        if first_captions.setdefault(video, caption) != caption:
            other_lines.append(line)
    rows = [
        {"image_id": f"YouTubeClips/{names[v]}.avi", "caption": text} for v, text in first_captions.items()
    ]
    (tmp_path / "predictions.json").write_text(json.dumps(rows))
    (tmp_path / "references.txt").write_text("\n".join(other_lines))
    (tmp_path / "youtube_mapping.txt").write_text(mapping)
    report = score_json(
        capvid, tmp_path / "predictions.json", tmp_path / "references.txt", *METRICS, "--missing", "skip"
    )
    assert report["counts"]["missing"] == 0
    assert report["counts"]["videos"] == len(first_captions) == 670
    assert 0.6 < report["scores"]["CIDEr-D"] < 1.6


@pytest.mark.slow
def test_activitynet_first_annotator_against_both(annotations: Path, capvid: Run, tmp_path: Path) -> None:
    folder = annotations / "activitynet"
    annotation = read(folder / "captioning_val_1.json.gz")
    results = {
        name[2:]: [{"sentence": text} for text in row["sentences"]] for name, row in annotation.items()
    }
    (tmp_path / "predictions.json").write_text(
        json.dumps({"version": "1", "results": results, "external_data": {}})
    )
    first, second = (folder / f"captioning_val_{number}_para.json.gz" for number in (1, 2))
    arguments = ("--paragraph", "--format=json", "--metrics", "bleu,rouge,cider,repetition")
    both_reports = score_json(capvid, tmp_path / "predictions.json", first, second, *arguments)
    assert both_reports["counts"] == {"videos": 2460, "references": 4901, "missing": 0, "extra": 0}
    assert both_reports["scores"]["ROUGE_L"] > 0.999
    second_report = score_json(capvid, tmp_path / "predictions.json", second, *arguments)
    assert second_report["counts"]["extra"] == 2460 - second_report["counts"]["videos"] == 19
    assert 0.15 < second_report["scores"]["CIDEr-D"] < 0.7
    assert 0 < second_report["scores"]["R@4"] < 0.1
    timed_report = score_json(
        capvid, tmp_path / "predictions.json", folder / "captioning_val_1.json.gz", *arguments
    )
    first_report = score_json(capvid, tmp_path / "predictions.json", first, *arguments)
    assert timed_report["scores"] == first_report["scores"]


@pytest.mark.slow
def test_youcook2_annotations_match_themselves(annotations: Path, capvid: Run, tmp_path: Path) -> None:
    folder = annotations / "youcook2"
    annotation = read(folder / "captioning_val.json.gz")
    (tmp_path / "predictions.json").write_text(
        json.dumps({name: row["sentences"] for name, row in annotation.items()})
    )
    arguments = ("--paragraph", "--format=json", "--metrics", "bleu,rouge,cider,repetition")
    reports = [
        score_json(capvid, tmp_path / "predictions.json", name, *arguments)
        for name in (
            folder / "captioning_val.json.gz",
            folder / "captioning_val_para.json.gz",
            f"{folder / 'youcookii_annotations_trainval.json.gz'}#split=val",
        )
    ]
    assert [report["counts"]["videos"] for report in reports] == [457, 457, 457]
    for report in reports:
        assert report["scores"]["ROUGE_L"] > 0.999
        assert report["scores"]["R@4"] == reports[0]["scores"]["R@4"]
