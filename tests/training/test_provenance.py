from __future__ import annotations

import json
import platform
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_loop import trainer
from test_resume import Breaks, BrokenError, resumed

import capvid
from capvid.checkpoints.publishing import _check_file
from capvid.errors import CheckpointError
from capvid.features.feature_file import FeatureHeader
from capvid.training import run_folder as provenance
from capvid.training.trainer import Trainer

SETTINGS = ["training.epochs=2", "training.batch_size=5", "training.seed=7", "training.save_every=0"]


def read(made: Trainer) -> dict[str, Any]:
    return json.loads((made.folder / "run.json").read_text())


def test_what_a_run_was_made_of(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", *SETTINGS)
    best, _ = made.run()
    said = read(made)
    assert (said["recipe"], said["captioner"], said["seed"]) == ("m3-small", "m3", 7)
    some = {"videos": 20, "captions": 20, "paragraphs": 0}
    none = {"videos": 0, "captions": 0, "paragraphs": 0}
    assert said["data"] == {"train": some, "val": some, "test": none}
    began = said["began"]
    age = datetime.now(timezone.utc) - datetime.fromisoformat(began["time"].replace("Z", "+00:00"))
    assert timedelta(seconds=-1) < age < timedelta(minutes=2)
    assert began["capvid"] == {
        "version": capvid.__version__,
        "source_sha256": provenance.source_digest(),
    }
    assert (began["python"], began["numpy"]) == (platform.python_version(), np.__version__)
    assert began["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (began["device"], began["threads"], began["processes"]) == ("cpu", torch.get_num_threads(), 1)
    assert began["processor"] and began["device_name"] == began["processor"]
    assert said["resumed"] == []
    log = [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()]
    assert said["seconds"] == pytest.approx(sum(row["seconds"] for row in log), abs=1e-3)
    assert said["epochs"] == 2
    assert said["best"] == {"epoch": best.epoch, "val_cider": max(row["val_cider"] for row in log)}
    words = json.loads((made.folder / "vocabulary.json").read_text())
    assert words == made.vocabulary.words and said["vocabulary"] == len(words)
    assert FeatureHeader.from_json((made.folder / "features.json").read_text()) == made.store.header
    for name in ("run.json", "vocabulary.json", "features.json"):
        text = (made.folder / name).read_text()
        assert str(tmp_path) not in text and platform.node() not in text
    _check_file(made.folder / "run.json", made.folder)


def test_a_run_that_goes_on_keeps_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, "m3", *SETTINGS)
    made.reporter = Breaks(7)
    with pytest.raises(BrokenError):
        made.run()
    before = read(made)
    assert "best" not in before
    monkeypatch.setattr(provenance, "__version__", "9.9")
    again = resumed(made)
    best, _ = again.run()
    said = read(made)
    assert said["began"] == before["began"]
    (entry,) = said["resumed"]
    assert (entry["epoch"], entry["batch"]) == (2, 3)  # after the seventh step, of 4 + 4
    assert entry["capvid"]["version"] == "9.9" != said["began"]["capvid"]["version"]
    assert (said["epochs"], said["best"]["epoch"]) == (2, best.epoch)
    resumed(made).run()  # nothing is left to do
    assert read(made) == said


def test_a_run_that_begins_anew_forgets_what_was_before(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", *SETTINGS)
    made.run()
    anew = trainer(tmp_path, "m3", *SETTINGS[:2], "training.seed=8")
    anew.reporter = Breaks(1)
    with pytest.raises(BrokenError):
        anew.run()
    assert read(anew)["seed"] == 8 and "best" not in read(anew)


def test_runs_whose_record_is_missing_or_damaged(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", *SETTINGS)
    made.reporter = Breaks(6)
    with pytest.raises(BrokenError):
        made.run()
    for damage in ("{", "[]", "{}"):
        (made.folder / "run.json").write_text(damage)
        with pytest.raises(CheckpointError, match=r"run\.json: damaged .*; remove it, and resume again"):
            resumed(made).run()
    (made.folder / "run.json").unlink()
    resumed(made).run()
    said = read(made)
    assert said["began"] is None and len(said["resumed"]) == 1 and said["recipe"] == "m3-small"
    (made.folder / "run.json").unlink()
    resumed(made).run()
    assert not (made.folder / "run.json").exists()


def test_the_digest_is_that_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(name: str, files: dict[str, str]) -> str:
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        monkeypatch.setattr(provenance, "PACKAGE", tmp_path / name)
        provenance.source_digest.cache_clear()
        try:
            return provenance.source_digest()
        finally:
            provenance.source_digest.cache_clear()

    sources = {"__init__.py": "", "a/b.py": "x = 1", "c.toml": "y = 2"}
    first = digest("one", sources)
    assert len(first) == 64
    assert digest("elsewhere", {**dict(reversed(sources.items())), "note.txt": "", "b.pyc": ""}) == first
    changed = [
        {**sources, "a/b.py": "x = 3"},
        {**sources, "c.toml": "y = 3"},
        {"__init__.py": "", "a/c.py": "x = 1", "c.toml": "y = 2"},
        {"__init__.py": "x", "a/b.py": " = 1", "c.toml": "y = 2"},
    ]
    digests = [digest(f"changed{n}", files) for n, files in enumerate(changed)]
    assert len({first, *digests}) == 5
