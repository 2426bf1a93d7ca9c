from __future__ import annotations

import json
import platform
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import StopAfterSteps, StoppedError, make_trainer, resume_run

import capvid
from capvid.checkpoints.publishing import _check_file
from capvid.errors import CheckpointError
from capvid.features.feature_file import FeatureHeader
from capvid.training import run_folder
from capvid.training.trainer import Trainer

SETTINGS = ["training.epochs=2", "training.batch_size=5", "training.seed=7", "training.save_every=0"]


def read_record(trainer: Trainer) -> dict[str, Any]:
    return json.loads((trainer.folder / "run.json").read_text())


def test_run_record_describes_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", *SETTINGS)
    best, _ = trainer.run()
    record = read_record(trainer)
    assert (record["recipe"], record["captioner"], record["seed"]) == ("m3-small", "m3", 7)
    split_counts = {"videos": 20, "captions": 20, "paragraphs": 0}
    no_counts = {"videos": 0, "captions": 0, "paragraphs": 0}
    assert record["data"] == {"train": split_counts, "val": split_counts, "test": no_counts}
    first_start = record["began"]
    age = datetime.now(timezone.utc) - datetime.fromisoformat(first_start["time"].replace("Z", "+00:00"))
    assert timedelta(seconds=-1) < age < timedelta(minutes=2)
    assert first_start["capvid"] == {
        "version": capvid.__version__,
        "source_sha256": run_folder.source_digest(),
    }
    assert (first_start["python"], first_start["numpy"]) == (platform.python_version(), np.__version__)
    assert first_start["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (first_start["device"], first_start["threads"], first_start["processes"]) == (
        "cpu",
        torch.get_num_threads(),
        1,
    )
    assert first_start["processor"] and first_start["device_name"] == first_start["processor"]
    assert record["resumed"] == []
    log = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    assert record["seconds"] == pytest.approx(sum(row["seconds"] for row in log), abs=1e-3)
    assert record["epochs"] == 2
    assert record["best"] == {"epoch": best.epoch, "val_cider": max(row["val_cider"] for row in log)}
    words = json.loads((trainer.folder / "vocabulary.json").read_text())
    assert words == trainer.vocabulary.words and record["vocabulary"] == len(words)
    assert FeatureHeader.from_json((trainer.folder / "features.json").read_text()) == trainer.store.header
    for name in ("run.json", "vocabulary.json", "features.json"):
        text = (trainer.folder / name).read_text()
        assert str(tmp_path) not in text and platform.node() not in text
    _check_file(trainer.folder / "run.json", trainer.folder)


def test_resumed_run_keeps_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "m3", *SETTINGS)
    trainer.reporter = StopAfterSteps(7)
    with pytest.raises(StoppedError):
        trainer.run()
    record_before = read_record(trainer)
    assert "best" not in record_before
    monkeypatch.setattr(run_folder, "__version__", "9.9")
    resumed_trainer = resume_run(trainer)
    best, _ = resumed_trainer.run()
    record = read_record(trainer)
    assert record["began"] == record_before["began"]
    (resumption,) = record["resumed"]
    assert (resumption["epoch"], resumption["batch"]) == (2, 3)  # after step 7, with 4 steps per epoch
    assert resumption["capvid"]["version"] == "9.9" != record["began"]["capvid"]["version"]
    assert (record["epochs"], record["best"]["epoch"]) == (2, best.epoch)
    resume_run(trainer).run()  # the run had finished
    assert read_record(trainer) == record


def test_new_run_replaces_the_record(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", *SETTINGS)
    trainer.run()
    new_trainer = make_trainer(tmp_path, "m3", *SETTINGS[:2], "training.seed=8")
    new_trainer.reporter = StopAfterSteps(1)
    with pytest.raises(StoppedError):
        new_trainer.run()
    assert read_record(new_trainer)["seed"] == 8 and "best" not in read_record(new_trainer)


def test_missing_or_damaged_record(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", *SETTINGS)
    trainer.reporter = StopAfterSteps(6)
    with pytest.raises(StoppedError):
        trainer.run()
    for damage in ("{", "[]", "{}"):
        (trainer.folder / "run.json").write_text(damage)
        with pytest.raises(CheckpointError, match=r"run\.json: damaged .*; remove it, and resume again"):
            resume_run(trainer).run()
    (trainer.folder / "run.json").unlink()
    resume_run(trainer).run()
    record = read_record(trainer)
    assert record["began"] is None and len(record["resumed"]) == 1 and record["recipe"] == "m3-small"
    (trainer.folder / "run.json").unlink()
    resume_run(trainer).run()
    assert not (trainer.folder / "run.json").exists()


def test_source_digest_covers_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(name: str, files: dict[str, str]) -> str:
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        monkeypatch.setattr(run_folder, "PACKAGE", tmp_path / name)
        run_folder.source_digest.cache_clear()
        try:
            return run_folder.source_digest()
        finally:
            run_folder.source_digest.cache_clear()

    sources = {"__init__.py": "", "a/b.py": "x = 1", "c.toml": "y = 2"}
    first = digest("one", sources)
    assert len(first) == 64
    assert digest("same", {**dict(reversed(sources.items())), "note.txt": "", "b.pyc": ""}) == first
    changed = [
        {**sources, "a/b.py": "x = 3"},
        {**sources, "c.toml": "y = 3"},
        {"__init__.py": "", "a/c.py": "x = 1", "c.toml": "y = 2"},
        {"__init__.py": "x", "a/b.py": " = 1", "c.toml": "y = 2"},
    ]
    digests = [digest(f"changed{n}", files) for n, files in enumerate(changed)]
    assert len({first, *digests}) == 5
