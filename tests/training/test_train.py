"""The library's ``train``: from a recipe, data and features to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_loop import SMALL, Silent, data

import capvid
from capvid.captioners.checkpoint import load_checkpoint
from capvid.errors import DataError, UsageError
from capvid.training.recipe import load_recipe

SETTINGS = [*SMALL, "training.epochs=2"]


def specs(folder: Path) -> list[str]:
    videos, _ = data(folder)
    rows = [{"id": v.id, "split": v.split, "captions": v.captions} for v in videos]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"jsonl:{folder / 'data.jsonl'}"]


def test_trains_and_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded, features = specs(tmp_path), [tmp_path / "features.safetensors"]
    result = capvid.train("m3-small", loaded, features, tmp_path / "run", settings=SETTINGS)
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
        capvid.train("m3-small", loaded, features, tmp_path / "run", settings=SETTINGS)
    again = capvid.train("m3-small", loaded, features, tmp_path / "run", settings=SETTINGS, resume=True)
    assert again == result


def test_takes_loaded_recipes_and_videos_and_reports(tmp_path: Path) -> None:
    videos, _ = data(tmp_path)
    reporter, features = Silent(), [str(tmp_path / "features.safetensors")]
    recipe = load_recipe("m3-small", [*SETTINGS, "search.model.hidden=[16,24]"])
    first = capvid.train(recipe, videos, features, tmp_path / "a", reporter=reporter)
    assert [row.cider for row in reporter.results][first.epoch - 1] == first.val_cider
    by_name = capvid.train("m3-small", specs(tmp_path), features, tmp_path / "b", settings=SETTINGS)
    assert first.val_cider == by_name.val_cider
    assert (tmp_path / "a/last/captioner.safetensors").read_bytes() == (
        tmp_path / "b/last/captioner.safetensors"
    ).read_bytes()
    fine = capvid.train(
        "m3-small", videos, features, tmp_path / "fine", settings=SETTINGS, self_critical=tmp_path / "a"
    )
    assert fine.val_cider >= first.val_cider
    best = capvid.train(recipe, videos, features, tmp_path / "search", search=2)
    assert best.val_cider == max(trial.value for trial in best.trials)
    assert load_checkpoint(tmp_path / "search").info["epoch"] == best.epoch


def test_rows_that_are_left_out_are_noted(tmp_path: Path) -> None:
    loaded, features = specs(tmp_path), [tmp_path / "features.safetensors"]
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"id": 3}\n')
    with pytest.raises(DataError):
        capvid.train("m3-small", loaded, features, tmp_path / "run", settings=SETTINGS)
    notes: list[str] = []
    options = {"skip_bad": True, "note": notes.append}
    capvid.train("m3-small", loaded, features, tmp_path / "run", settings=SETTINGS, **options)
    assert any(line.startswith("1 row of the data is left out (") for line in notes)
