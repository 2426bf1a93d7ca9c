from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Run, Toy, write_video

SIZES = ["embedding=12", "hidden=16", "attention=8", "projection=16", "output=16", "memory_rows=4"]
SETTINGS = [
    *(f"model.{size}" for size in SIZES),
    "model.memory_width=8",
    "training.epochs=1",
    "data.min_count=1",
]
SET = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Write six videos of the dataset, one broken file and one video outside the dataset."""
    folder = tmp_path / "my videos"
    for number in range(7):
        write_video(folder / "a" / f"v{number}.mp4", seed=number, frames=5)
    (folder / "a" / "broken.mp4").write_bytes(b"not a video at all" * 100)
    rows = [
        {"id": f"a/v{number}", "split": "val" if number > 3 else "train", "captions": ["a dog runs"]}
        for number in range(6)
    ]
    rows.append({"id": "a/broken", "split": "train", "captions": ["a broken video"]})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_train_extracts_features_from_videos(capvid: Run, toy: Toy, videos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", "m3-small", "--data", tmp_path / "data.jsonl", "--videos", videos, "-o", run, *SET]
    streams = ["--backbone", "toy", "--sampling", "uniform:3", "--weights", toy.weights]
    code, out, err = capvid(*command, *streams)
    assert code == 0, err
    assert out.splitlines()[0].split() == ["epoch", "loss", "val", "CIDEr-D", "captions/s", "seconds"]
    stderr_lines = err.splitlines()
    assert stderr_lines[0].startswith(f"error: {videos}/a/broken.mp4: is a text file, not a video")
    assert stderr_lines[1] == "6 extracted, 1 failed"
    assert (
        stderr_lines[2] == "warning: 1 of 7 videos of the data have no features and are left out (a/broken)"
    )
    assert stderr_lines[3].startswith("warning: 4 training videos are few: below 200, ")
    assert stderr_lines[4].startswith("4 videos, 4 captions an epoch, ")
    known = len(json.loads((run / "vocabulary.json").read_text())) - 4
    assert f", {known} words that occur at least once; " in stderr_lines[4]
    assert sorted(path.stem for path in (run / "features").rglob("*.safetensors")) == [
        f"v{number}" for number in range(6)
    ]
    code, out, err = capvid(
        "caption", videos / "a" / "v0.mp4", "--model", run
    )  # uses the weights stored in the run folder
    assert (code, err) == (0, "") and out.strip()

    code, _, err = capvid(*command, *streams, "--resume")
    assert code == 0 and "0 extracted, 6 skipped (already done), 1 failed" in err.splitlines()


def test_videos_are_sampled_as_the_recipe_says(capvid: Run, toy: Toy, videos: Path, tmp_path: Path) -> None:
    command = ["train", "m3-small", "--data", tmp_path / "data.jsonl", "--videos", videos, *SET]
    command += ["--backbone", "toy", "--weights", toy.weights, "--set", "data.sampling=uniform:4"]
    code, _, err = capvid(*command, "-o", tmp_path / "run")
    assert code == 0 and "note: " not in err, err
    header = json.loads((tmp_path / "run" / "best" / "captioner.json").read_text())["features"]
    assert header["sampling"] == "uniform:4"
    code, _, err = capvid(*command, "-o", tmp_path / "other", "--sampling", "uniform:2")
    assert code == 0
    assert "note: the features have at most 2 frames per video; the recipe expects capvid extract" in err


def test_conflicting_data_options(capvid: Run, toy: Toy, videos: Path, tmp_path: Path) -> None:
    data = ["train", "m3-small", "--data", tmp_path / "data.jsonl", "-o", tmp_path / "run"]
    for options in (["--features", "f", "--videos", videos], []):
        code, _, err = capvid(*data, *options)
        assert (
            code == 2 and "m3-small trains a captioner: it needs --features or --videos, and not both" in err
        )
    code, _, err = capvid(*data, "--features", "f", "--backbone", "toy")
    assert code == 2 and "--backbone and --sampling are for --videos" in err
    code, _, err = capvid(*data, "--videos", videos / "a", "--backbone", "toy")
    assert code == 1
    assert "none of the 8 videos is one of the data, such as 'a/v0'; " in err and "would be 'broken'" in err
    assert not (tmp_path / "run" / "best").exists()


def test_views_that_lack_a_stream_are_reported(capvid: Run, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    frames = np.zeros((2, 3), np.float32)
    save_file(dict.fromkeys(("a", "a@1", "a@2", "b"), frames), tmp_path / "one.safetensors")
    save_file(dict.fromkeys(("a", "b", "a@2"), frames), tmp_path / "two.safetensors")
    (tmp_path / "data.jsonl").write_text('{"id": "a", "split": "train", "captions": ["a dog runs"]}\n')
    features = [part for name in ("one", "two") for part in ("--features", tmp_path / f"{name}.safetensors")]
    command = ["train", "m3-small", "--data", tmp_path / "data.jsonl", *features, "-o", tmp_path / "run"]
    note = "note: 1 view lacks a stream and is left out (a@1)"
    code, _, err = capvid(*command)
    assert (code, err.splitlines()[0]) == (1, note) and "no video of the data is in the val split" in err
    assert note not in capvid(*command, "--set", "data.views=false")[2]
