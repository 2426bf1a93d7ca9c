"""``capvid.train``: from a recipe, data and features to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_training import SMALL_M3, SilentReporter, write_dataset

import capvid
from capvid.captioners.checkpoint import load_checkpoint
from capvid.errors import DataError, UsageError
from capvid.training.recipe import load_recipe

SETTINGS = [*SMALL_M3, "training.epochs=2"]


def write_specs(folder: Path) -> list[str]:
    videos, _ = write_dataset(folder)
    rows = [{"id": v.id, "split": v.split, "captions": v.captions} for v in videos]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"jsonl:{folder / 'data.jsonl'}"]


def test_train_is_silent_and_returns_the_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    specs, features = write_specs(tmp_path), [tmp_path / "features.safetensors"]
    result = capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS)
    assert capfd.readouterr() == ("", "")
    info = load_checkpoint(tmp_path / "run").info
    assert (result.folder, result.epoch, result.val_cider) == (
        tmp_path / "run",
        info["epoch"],
        info["val_cider"],
    )
    assert (result.scores, result.captions, result.trials) == ({}, {}, ())
    assert (tmp_path / "run" / "README.md").read_text().startswith("---\nlibrary_name: capvid")
    assert list((tmp_path / "run" / "events").iterdir())

    with pytest.raises(UsageError, match="holds a training run already"):
        capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS)
    resumed = capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS, resume=True)
    assert resumed == result


def test_train_accepts_recipes_videos_and_reporters(tmp_path: Path) -> None:
    videos, _ = write_dataset(tmp_path)
    reporter, features = SilentReporter(), [str(tmp_path / "features.safetensors")]
    recipe = load_recipe("m3-small", [*SETTINGS, "search.model.hidden=[16,24]"])
    first = capvid.train(recipe, videos, features, tmp_path / "a", reporter=reporter)
    assert [row.cider for row in reporter.results][first.epoch - 1] == first.val_cider
    by_name = capvid.train("m3-small", write_specs(tmp_path), features, tmp_path / "b", settings=SETTINGS)
    assert first.val_cider == by_name.val_cider
    assert (tmp_path / "a/last/captioner.safetensors").read_bytes() == (
        tmp_path / "b/last/captioner.safetensors"
    ).read_bytes()
    fine_tuned = capvid.train(
        "m3-small", videos, features, tmp_path / "fine", settings=SETTINGS, self_critical=tmp_path / "a"
    )
    assert fine_tuned.val_cider >= first.val_cider
    best = capvid.train(recipe, videos, features, tmp_path / "search", search=2)
    assert best.val_cider == max(trial.value for trial in best.trials)
    assert load_checkpoint(tmp_path / "search").info["epoch"] == best.epoch


def test_skipped_rows_are_noted(tmp_path: Path) -> None:
    specs, features = write_specs(tmp_path), [tmp_path / "features.safetensors"]
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"id": 3}\n')
    with pytest.raises(DataError):
        capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS)
    notes: list[str] = []
    options = {"skip_bad": True, "note": notes.append}
    capvid.train("m3-small", specs, features, tmp_path / "run", settings=SETTINGS, **options)
    assert any(line.startswith("1 row of the data is left out (") for line in notes)
