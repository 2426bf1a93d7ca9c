"""What ``capvid caption`` writes is what ``capvid train --data`` and ``capvid score`` read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from toy import Run, Toy

from capvid.datasets.dataset import Segment, load_data
from capvid.errors import DataError
from capvid.scoring.predictions import read_predictions


@pytest.fixture
def clips(
    tmp_path: Path, video_files: list[Path], bad_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Three videos, one in a subfolder, and one that fails, seen from their parent."""
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips" / "sub").mkdir(parents=True)
    for name, source in zip(("a.mp4", "=b.mp4", "sub/c.mp4"), video_files[1:], strict=False):
        shutil.copy(source, tmp_path / "clips" / name)
    shutil.copy(bad_files["text"], tmp_path / "clips" / "broken.mp4")
    return tmp_path


OUTPUTS = {
    "tsv:own.tsv": ("-o", "own.tsv"),
    "tsv:own.txt": ("-o", "own.txt"),
    "csv:own.csv": ("-o", "own.csv"),
    "jsonl:own.jsonl": ("-o", "own.jsonl"),
    "jsonl:clips/metadata.jsonl": ("--format", "videofolder", "--output-dir", "clips"),
    "texts:texts": ("--output-dir", "texts"),
    "texts:clips": ("--sidecar",),
}


def test_captions(capvid: Run, toy: Toy, clips: Path) -> None:
    best = None
    for spec, outputs in OUTPUTS.items():
        shown = ["--num-captions", 2] if spec in ("tsv:own.tsv", "csv:own.csv", "jsonl:own.jsonl") else []
        assert capvid("caption", "clips", "--model", toy.model, *outputs, *shown)[0] == 3
        data = load_data([spec])
        captions = {video.id: video.captions for video in data.videos}
        best = best or captions
        assert sorted(captions) == ["=b", "a", "sub/c"] and captions == best, spec
        assert all(not video.segments and video.split == "train" for video in data.videos)
        predictions = read_predictions(Path(spec.partition(":")[2]))
        assert sorted(texts[0] for texts in predictions.sentences.values()) == sorted(
            t[0] for t in best.values()
        )
        Path("r.json").write_text(json.dumps(best))
        code, out, err = capvid("score", spec.partition(":")[2], "r.json", "--metrics", "bleu")
        assert code == 0 and "100.0" in out, (spec, err)


@pytest.mark.parametrize("spec", ["tsv:own.tsv", "csv:own.csv", "jsonl:own.jsonl"])
def test_segments(capvid: Run, toy: Toy, clips: Path, spec: str) -> None:
    command = ("caption", "clips/sub", "--model", toy.model, "--segments", 2, "--num-captions", 2)
    assert capvid(*command, *OUTPUTS[spec])[0] == 0
    (video,) = load_data([spec]).videos
    assert video.id == "c" and video.captions == () and len(video.paragraphs[0]) == 2
    assert [segment.unit for segment in video.segments] == ["seconds"] * 2
    assert video.segments[0] == Segment(0, video.segments[1].start, "seconds")


def test_reviewed_texts(capvid: Run, toy: Toy, clips: Path) -> None:
    capvid("caption", "clips", "--model", toy.model, *OUTPUTS["jsonl:clips/metadata.jsonl"])
    path = Path("clips/metadata.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["text"] = "a reviewed text"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_data([str(path)]).videos[0].captions == ("a reviewed text",)
    assert read_predictions(path).sentences["=b.mp4"] == ["a reviewed text"]
    rows[0]["text"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"metadata\.jsonl, line 1: a caption that is not text"):
        load_data([str(path)])


def test_other_outputs_are_refused_by_name(capvid: Run, toy: Toy, clips: Path) -> None:
    capvid("caption", "clips", "--model", toy.model, "-o", "own.json")
    with pytest.raises(DataError, match=r"own\.json, line 1: a JSON document, .*--format jsonl"):
        load_data(["own.json"])
    capvid("caption", "clips", "--model", toy.model, "--output-dir", "records", "--format", "json")
    with pytest.raises(DataError, match=r"no \.txt in this folder, but "):
        load_data(["texts:records"])
    Path("own.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="no header with the columns video and caption"):
        load_data(["csv:own.csv"])


def test_tables_of_others_have_several_captions(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text('video,caption\na.mp4,"a man, running"\na.mp4,a runner\nb.mp4,a dog\n')
    captions = {video.id: video.captions for video in load_data([f"csv:{path}"]).videos}
    assert captions == {"a": ("a man, running", "a runner"), "b": ("a dog",)}
