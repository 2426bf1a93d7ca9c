"""People scored against people on the published annotation files: one reference of each video, the others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from toy import Run

pytestmark = pytest.mark.shared
METRICS = ("--json", "--metrics", "bleu,rouge,cider")


@pytest.fixture
def annotations(shared_data: Path) -> Path:
    return shared_data / "data" / "annotations"


def read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def scored(capvid: Run, *arguments: object) -> dict[str, Any]:
    code, out, err = capvid("score", *arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.slow
def test_msrvtt(annotations: Path, capvid: Run, tmp_path: Path) -> None:
    whole = read(annotations / "msrvtt" / "test_videodatainfo.json.gz")
    first: dict[str, str] = {}
    rest = []
    for row in whole["sentences"]:
        if row["video_id"] in first:
            rest.append(row)
        else:
            first[row["video_id"]] = row["caption"]
    rows = [{"video": f"clips/{v}.mp4", "captions": [{"text": text}]} for v, text in first.items()]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "wanted.json").write_text(json.dumps({**whole, "sentences": rest}))
    found = scored(capvid, tmp_path / "said.jsonl", tmp_path / "wanted.json", *METRICS)
    assert found["counts"]["references"] == 19 * found["counts"]["videos"] == len(rest)
    assert 0.3 < found["scores"]["CIDEr-D"] < 0.8
    every = scored(
        capvid, tmp_path / "said.jsonl", annotations / "msrvtt" / "test_videodatainfo.json.gz", *METRICS
    )
    assert every["scores"]["BLEU-4"] == pytest.approx(1, abs=1e-6)


def test_msvd(annotations: Path, capvid: Run, tmp_path: Path) -> None:
    text = gzip.decompress((annotations / "msvd" / "sents_test_lc_nopunc.txt.gz").read_bytes()).decode()
    mapping = gzip.decompress((annotations / "msvd" / "youtube_mapping.txt.gz").read_bytes()).decode()
    names = {line.split()[1]: line.split()[0] for line in mapping.splitlines()}
    first: dict[str, str] = {}
    rest = []
    for line in text.splitlines():
        video, _, caption = line.partition("\t")
        if first.setdefault(video, caption) != caption:
            rest.append(line)
    rows = [{"image_id": f"YouTubeClips/{names[v]}.avi", "caption": text} for v, text in first.items()]
    (tmp_path / "said.json").write_text(json.dumps(rows))
    (tmp_path / "wanted.txt").write_text("\n".join(rest))
    (tmp_path / "youtube_mapping.txt").write_text(mapping)
    found = scored(capvid, tmp_path / "said.json", tmp_path / "wanted.txt", *METRICS, "--missing", "skip")
    assert found["counts"]["missing"] == 0
    assert found["counts"]["videos"] == len(first) == 670
    assert 0.6 < found["scores"]["CIDEr-D"] < 1.6


@pytest.mark.slow
def test_activitynet(annotations: Path, capvid: Run, tmp_path: Path) -> None:
    folder = annotations / "activitynet"
    told = read(folder / "captioning_val_1.json.gz")
    results = {name[2:]: [{"sentence": text} for text in row["sentences"]] for name, row in told.items()}
    (tmp_path / "said.json").write_text(json.dumps({"version": "1", "results": results, "external_data": {}}))
    first, second = (folder / f"captioning_val_{number}_para.json.gz" for number in (1, 2))
    arguments = ("--paragraph", "--json", "--metrics", "bleu,rouge,cider,repetition")
    both = scored(capvid, tmp_path / "said.json", first, second, *arguments)
    assert both["counts"] == {"videos": 2460, "references": 4901, "missing": 0, "extra": 0}
    assert both["scores"]["ROUGE_L"] > 0.999
    other = scored(capvid, tmp_path / "said.json", second, *arguments)
    assert other["counts"]["extra"] == 2460 - other["counts"]["videos"] == 19
    assert 0.15 < other["scores"]["CIDEr-D"] < 0.7
    assert 0 < other["scores"]["R@4"] < 0.1
    timed = scored(capvid, tmp_path / "said.json", folder / "captioning_val_1.json.gz", *arguments)
    alone = scored(capvid, tmp_path / "said.json", first, *arguments)
    assert timed["scores"] == alone["scores"]


@pytest.mark.slow
def test_youcook2(annotations: Path, capvid: Run, tmp_path: Path) -> None:
    folder = annotations / "youcook2"
    told = read(folder / "captioning_val.json.gz")
    (tmp_path / "said.json").write_text(json.dumps({name: row["sentences"] for name, row in told.items()}))
    arguments = ("--paragraph", "--json", "--metrics", "bleu,rouge,cider,repetition")
    every = [
        scored(capvid, tmp_path / "said.json", name, *arguments)
        for name in (
            folder / "captioning_val.json.gz",
            folder / "captioning_val_para.json.gz",
            f"{folder / 'youcookii_annotations_trainval.json.gz'}#split=val",
        )
    ]
    assert [found["counts"]["videos"] for found in every] == [457, 457, 457]
    for found in every:
        assert found["scores"]["ROUGE_L"] > 0.999
        assert found["scores"]["R@4"] == every[0]["scores"]["R@4"]
