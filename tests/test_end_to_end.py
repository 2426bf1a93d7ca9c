"""A smaller version of the README's first example, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from capvid.cli.app import main


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a folder with spaces, é")
    script = Path(__file__).resolve().parents[1] / "examples" / "shapes.py"
    subprocess.run([sys.executable, str(script), str(folder), "--clips", "144"], check=True)
    assert (
        main(["extract", str(folder / "videos"), "--backbone", "colour-grid", "-o", str(folder / "f")]) == 0
    )
    data = ["--data", f"jsonl:{folder / 'captions.jsonl'}", "--features", str(folder / "f")]
    settings = ["--set", "training.epochs=12"]
    assert main(["train", "m3-tiny", *data, *settings, "-o", str(folder / "run")]) == 0
    return folder


@pytest.mark.slow
def test_unseen_clip_is_captioned_correctly(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = [json.loads(line) for line in (shapes / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["val_cider"] for row in log) > 1.0
    capsys.readouterr()
    assert main(["caption", str(shapes / "try-me.mp4"), "--model", str(shapes / "run")]) == 0
    caption = capsys.readouterr().out
    assert caption.count("\n") == 1
    assert "blue" in caption
    assert "left to right" in caption


@pytest.mark.slow
def test_folder_with_broken_files(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shapes / "mixed"
    folder.mkdir()
    for number in (0, 7, 23):
        name = f"shapes{number:03d}.mp4"
        (folder / name).write_bytes((shapes / "videos" / name).read_bytes())
    (folder / "text.mp4").write_text("not a video at all")
    (folder / "empty.mp4").touch()
    capsys.readouterr()
    assert main(["caption", str(folder), "--model", str(shapes / "run")]) == 3
    out, err = capsys.readouterr()
    failed = [line for line in out.splitlines() if "\t\terror: " in line]
    assert (len(out.splitlines()), len(failed)) == (5, 2)
    assert [line.split(":")[0] for line in err.splitlines()[:2]] == ["error", "error"]
    assert "text.mp4" in err
    assert "empty.mp4" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1", "8"])
def test_captions_do_not_depend_on_the_batch_size(
    shapes: Path, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [str(shapes / "videos" / f"shapes{n:03d}.mp4") for n in range(12)]
    options = ["--model", str(shapes / "run"), "--format", "jsonl"]
    capsys.readouterr()
    assert main(["caption", *inputs, *options, "--batch-size", size]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["caption", *reversed(inputs), *options, "--batch-size", "3", "--workers", "1"]) == 0
    others = [json.loads(line) for line in capsys.readouterr().out.splitlines()][::-1]
    for row, other in zip(rows, others, strict=True):
        assert row["video"] == other["video"]
        assert row["captions"][0]["text"] == other["captions"][0]["text"]
        assert row["captions"][0]["logprob"] == pytest.approx(other["captions"][0]["logprob"], abs=1e-4)


@pytest.mark.slow
def test_features_of_another_layer_are_refused(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from capvid.features.feature_file import load_features, save_features

    features = load_features(next((shapes / "f").rglob("*.safetensors")))
    header = features.header
    stream = header.streams[0]
    changed = type(header)(
        **{
            **vars(header),
            "streams": (type(stream)(**{**vars(stream), "layer": "fc7"}),),
        }
    )
    other = shapes / "other.safetensors"
    save_features(other, type(features)(**{**vars(features), "header": changed}))
    capsys.readouterr()
    assert main(["caption", str(other), "--model", str(shapes / "run")]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "fc7" in err
