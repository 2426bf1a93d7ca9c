from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from optuna import load_study
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from safetensors.torch import save_file
from toy import Run, Toy, write_video

SIZES = ["embedding=12", "hidden=16", "attention=8", "projection=16", "output=16", "memory_rows=4"]
SETTINGS = [
    *(f"model.{size}" for size in SIZES),
    "model.memory_width=8",
    "training.epochs=4",
    "training.batch_size=4",
    "data.min_count=1",
    "search.training.learning_rate={low = 3e-3, high = 3e-2, log = true}",
    "search.model.hidden=[16]",
]
SET = [part for setting in SETTINGS for part in ("--set", setting)]


def trials_of(run: Path) -> list[FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(run / "search.journal")))
    return load_study(study_name="capvid", storage=storage).trials


@pytest.fixture
def command(tmp_path: Path) -> list[object]:
    """Return a ``capvid train`` command for a few videos of each split, without ``--search``."""
    generator, features, rows = torch.Generator().manual_seed(3), {}, []
    for number in range(24):
        features[f"v{number}"] = torch.randn(3, 8, generator=generator)
        split = ("train", "train", "val", "test")[number % 4]
        caption = f"a {('man', 'dog')[number % 2]} {('runs', 'sings', 'sits')[number % 3]}"
        rows.append({"id": f"v{number}", "split": split, "captions": [caption]})
    save_file(features, tmp_path / "features.safetensors")
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ["--data", tmp_path / "data.jsonl", "--features", tmp_path / "features.safetensors"]
    return ["train", "m3-tiny", *files, "-o", tmp_path / "run", "--device", "cpu", *SET]


@pytest.mark.slow
def test_search_runs_resumes_and_reports_trials(capvid: Run, command: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = capvid(*command, "--search", 2)
    assert code == 0 and "captions/s" in out, err
    trials = trials_of(run)
    assert set(trials[0].params) >= {"training.learning_rate", "model.hidden", "model.dropout"}
    stderr_lines = err.splitlines()
    assert sum(line.startswith("12 videos, 12 captions an epoch") for line in stderr_lines) == 1
    assert sum(line.startswith("  epoch ") for line in stderr_lines) == 8
    first_line = next(line for line in stderr_lines if line.startswith("trial 1/2"))
    rate = trials[0].params["training.learning_rate"]
    assert (
        f"val CIDEr-D {100 * trials[0].value:.1f} *" in first_line
        and f"  learning_rate {rate:.3g}" in first_line
    )

    code, out, err = capvid(*command, "--search", 4, "--resume", "--plot", tmp_path / "best.svg")
    assert code == 0 and (tmp_path / "best.svg").is_file(), err
    stderr_lines = err.splitlines()
    assert "2 trials are finished already" in stderr_lines
    assert [line[:9] for line in stderr_lines if line.startswith("trial ") and "/" in line] == [
        "trial 3/4",
        "trial 4/4",
    ]
    ranked = sorted(trials_of(run), key=lambda trial: (-trial.value, trial.number))  # type: ignore[operator]
    table = out.splitlines()
    assert "smoothing" in table[1] and "dropout" in table[1]
    table_rows = [line.split()[:2] for line in table[3:7]]
    assert table_rows == [[str(trial.number + 1), f"{100 * trial.value:.1f}"] for trial in ranked]
    best = ranked[0]
    assert f"best: trial {best.number + 1}; saved in {run / 'best'}, after" in err
    assert f"* best: epoch {best.user_attrs['epoch']};" in out
    assert "test split" in table and (run / "test.json").is_file()
    assert f"{best.params['training.learning_rate']}" in (run / "README.md").read_text()

    code, _, err = capvid(*command, "--resume")
    assert code == 2 and "holds a search; continue it with --search N" in err
    code, _, err = capvid(*command, "--search", 4)
    assert code == 2 and "holds a training run already; choose another -o, --resume or --overwrite" in err
    code, _, err = capvid(*command, "--overwrite")
    assert code == 0 and not (run / "search.journal").exists() and not (run / "trials").exists()
    code, _, err = capvid(*command, "--search", 4, "--resume")
    assert code == 2 and "holds a training run that is no search; remove --search" in err


@pytest.mark.slow
def test_search_extracts_features_once(capvid: Run, toy: Toy, tmp_path: Path) -> None:
    rows = []
    for number in range(4):
        write_video(tmp_path / "videos" / f"v{number}.mp4", seed=number, frames=5)
        split = "val" if number > 1 else "train"
        caption = (
            f"a {('dog', 'man')[number % 2]} runs"  # two different captions, or every CIDEr-D would be 0
        )
        rows.append({"id": f"v{number}", "split": split, "captions": [caption]})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    streams = ["--backbone", "toy", "--sampling", "uniform:3", "--weights", toy.weights]
    paths = ["--data", tmp_path / "data.jsonl", "--videos", tmp_path / "videos", "-o", tmp_path / "run"]
    settings = ["training.epochs=30", "training.average=0.5"]
    settings += ["search.training.learning_rate={low = 3e-2, high = 4e-2}"]
    search_settings = [part for setting in settings for part in ("--set", setting)]
    code, _, err = capvid("train", "m3-tiny", *paths, *streams, *SET, *search_settings, "--search", 2)
    assert code == 0, err
    assert err.splitlines()[0] == "4 extracted" and err.count("extracted") == 1
    code, out, err = capvid("caption", tmp_path / "videos" / "v0.mp4", "--model", tmp_path / "run")
    assert (code, err, out.count("\n")) == (0, "", 1)  # the text of so short a training does not matter


def test_conflicting_search_options(capvid: Run, command: list[object], tmp_path: Path) -> None:
    code, _, err = capvid(*command, "--search", 2, "--self-critical", tmp_path)
    assert code == 2 and "--search and --self-critical exclude each other" in err
    code, _, err = capvid(*command, "--search", 0)
    assert code == 2 and "--search" in err
    bare = tmp_path / "bare.toml"
    bare.write_text('captioner = "m3"')
    code, _, err = capvid("train", bare, *command[2 : command.index("--set")], "--search", 2)
    assert code == 2 and "bare: the recipe has no ranges to search" in err
    assert not (tmp_path / "run").exists()
