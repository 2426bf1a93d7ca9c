"""No command replaces what it reads, or a file of another kind; each refuses before it does any work."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from toy import Run, Toy

NO_MODEL = ("--model", "no-such-model")  # named by the error if a command came as far as that


@pytest.fixture
def work(tmp_path: Path, video_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of everything that commands read, as the working directory."""
    folder = tmp_path / "work"
    (folder / "clips").mkdir(parents=True)
    for name, source in zip(("a.mp4", "b.mp4", "list.mp4"), video_files, strict=False):
        shutil.copy(source, folder / "clips" / name)
    (folder / "list.txt").write_text("clips/a.mp4\n")
    (folder / "clips" / "list.txt").write_text("clips/list.mp4\n")
    (folder / "times.csv").write_text("start,end\n0,1\n")
    (folder / "prompt.txt").write_text("What happens?")
    (folder / "link.txt").symlink_to("list.txt")
    (folder / "hard.txt").hardlink_to(folder / "list.txt")
    (folder / "p.json").write_text('{"a": "a man runs"}')
    (folder / "q.json").write_text('{"a": "a dog runs"}')
    (folder / "r.json").write_text('{"a": ["a man runs"]}')
    (folder / "own").mkdir()
    (folder / "own" / "a.json").write_text('{"video": "a", "captions": [{"text": "a man"}], "status": "ok"}')
    save_file({"weight": np.zeros(3, np.float32)}, folder / "other.safetensors")
    save_file({"weight": np.zeros(3, np.float32)}, folder / "clips" / "b.safetensors")
    (folder / "data.jsonl").write_text('{"id": "a", "captions": ["a man runs"]}\n')
    with tarfile.open(folder / "clips" / "captions-0123456789abcdef.tar", "w") as tar:
        tar.add(folder / "clips" / "a.mp4", "a.mp4")
    monkeypatch.chdir(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


CAPTION = ("caption", "clips/a.mp4", *NO_MODEL)
SCORE = ("score", "p.json", "r.json")
TRAIN = ("train", "m3-small", "--data", "data.jsonl", "--features", "feats")
REFUSED = [
    (*CAPTION, "-o", "clips/a.mp4"),
    (*CAPTION, "-o", "clips/b.mp4"),
    (*CAPTION, "-o", "clips/new.mp4"),
    (*CAPTION, "-o", "clips/../clips/A.MP4"),
    (*CAPTION, "-o", "other.safetensors"),
    (*CAPTION, "--from-file", "list.txt", "-o", "list.txt"),
    (*CAPTION, "--from-file", "list.txt", "-o", "LIST.txt"),
    (*CAPTION, "--from-file", "list.txt", "-o", "link.txt"),
    (*CAPTION, "--from-file", "list.txt", "-o", "hard.txt"),
    (*CAPTION, "--from-file", "link.txt", "-o", "list.txt"),
    (*CAPTION, "--segments", "times.csv", "-o", "times.csv"),
    (*CAPTION, "--prompt", "prompt.txt", "-o", "prompt.txt"),
    ("caption", "clips", *NO_MODEL, "--from-file", "clips/list.txt", "--output-dir", "clips"),
    ("caption", "clips", *NO_MODEL, "--from-file", "clips/list.txt", "--sidecar", "--overwrite"),
    ("caption", "clips", *NO_MODEL, "--format", "webdataset", "--output-dir", "clips", "--overwrite"),
    ("caption", "clips/*.tar", *NO_MODEL, "--videos-per-file", 9, "--output-dir", "clips", "--overwrite"),
    ("extract", "clips/b.mp4", "--backbone", "toy", "-o", "clips"),
    ("extract", "clips/b.safetensors", "--backbone", "toy", "-o", "clips"),
    (*SCORE, "--per-video", "p.json"),
    (*SCORE, "--per-video", "r.json"),
    ("score", "p.json", "r.json#split=test", "--per-video", "r.json"),
    (*SCORE, "--compare", "q.json", "--per-video", "q.json"),
    (*SCORE, "--compare", "q.json", "--report", "q.json"),
    (*SCORE, "--compare", "q.json", "--report", "clips/a.mp4"),
    (*SCORE, "--training", "data.jsonl", "--per-video", "data.jsonl"),
    ("score", "own", "r.json", "--per-video", "own/a.json"),
    (*SCORE, "--compare", "q.json", "--report", "x.csv", "--per-video", "x.csv"),
    ("convert", "other.safetensors", "-o", "other.safetensors"),
    (*TRAIN, "-o", "run", "--plot", "clips/a.png", "--features", "clips/a.png"),
    (*TRAIN, "-o", "feats"),
]


def test_refused(capvid: Run, toy: Toy, work: Path) -> None:
    (work / "feats").mkdir()
    (work / "clips" / "a.png").write_text('{"not": "an image"}')
    before = contents(work)
    for command in REFUSED:
        code, out, err = capvid(*command)
        assert (code, out) == (2, "") and contents(work) == before, (command, code, err)
        assert err.startswith("error: ") and err.count("\n") == 1, (command, err)
        reasons = ("would replace", "is the file that is read", "is the name of a video", "are one file")
        assert any(reason in err for reason in (*reasons, "and a part of -o")), (command, err)


def test_training_replaces_no_readme(capvid: Run, toy: Toy, work: Path) -> None:
    (work / "README.md").write_text("# A project\n")
    code, _, err = capvid(*TRAIN, "-o", ".")
    assert code == 2 and "holds a README.md, which the model card would replace" in err
    (work / "run").mkdir()
    shutil.move(work / "data.jsonl", work / "run" / "metrics.jsonl")
    code, _, err = capvid(
        "train", "m3-small", "--data", "run/metrics.jsonl", "--features", "feats", "-o", "run"
    )
    assert code == 2 and "metrics.jsonl: is the file that is read" in err


def test_own_outputs_are_replaced(capvid: Run, toy: Toy, work: Path) -> None:
    for outputs in (
        ("-o", "new.txt", "--report", "page.html"),
        ("--output-dir", "out"),
        ("--output-dir", "clips", "--format", "json"),
        ("--format", "videofolder", "--output-dir", "clips"),
        ("--videos-per-file", 9, "--output-dir", "shards"),
    ):
        for _ in range(2):
            command = ("caption", "clips/a.mp4", "--model", toy.model, "--overwrite", *outputs)
            assert capvid(*command)[0] == 0, command
    (work / "truncated").mkdir()
    (work / "truncated" / "a.safetensors").write_bytes(b"damaged")
    assert capvid("extract", "clips/a.mp4", "--backbone", "toy", "-o", "truncated")[0] == 0
    for _ in range(2):
        assert capvid(*SCORE, "--metrics", "bleu", "--per-video", "scores.json")[0] == 0


def test_shards_in_the_folder_of_the_inputs_are_no_inputs(capvid: Run, toy: Toy, work: Path) -> None:
    (work / "clips" / "captions-0123456789abcdef.tar").rename(work / "clips" / "videos.tar")
    command = ("caption", "clips", "--model", toy.model, "--format", "webdataset", "--output-dir", "clips")
    code, _, err = capvid(*command)
    assert code == 0 and "4 captioned" in err
    before = contents(work)
    code, _, err = capvid(*command)
    assert code == 0 and "0 captioned, 4 skipped (already done)" in err and contents(work) == before
    code, _, err = capvid(*command, "--overwrite")
    assert code == 2 and "is the file that is read" in err and contents(work) == before
    records = [json.loads(line) for line in next((work / "clips").glob("*.tar.jsonl")).open()]
    assert len(records) == 4
