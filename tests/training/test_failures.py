"""Failures during training are one-line errors, and the run can be resumed from what was saved."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import SMALL_M3, SilentReporter, resume_run, run_outcome, write_dataset

from capvid.captioners.checkpoint import load_checkpoint
from capvid.cli.app import main
from capvid.errors import TrainingError
from capvid.features.feature_file import save_features
from capvid.features.feature_store import FeatureStore
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

SETTINGS = [*SMALL_M3, "training.epochs=3", "training.batch_size=5", "model.dropout=0.3"]


class CallAfterSteps(SilentReporter):
    """Calls a function after a number of steps."""

    def __init__(self, steps: int, action: Callable[[], Any]) -> None:
        super().__init__()
        self.after, self.action = steps, action

    def stepped(self, **values: Any) -> None:
        super().stepped(**values)
        if self.steps == self.after:
            self.action()


def write_unpacked_features(folder: Path) -> FeatureStore:
    """Write one features file per video to ``folder``."""
    folder.mkdir()
    _, store = write_dataset(folder.parent)
    for video in store.ids():
        save_features(folder / f"{video}.safetensors", store.get(video))
    return FeatureStore([folder])


def build_trainer(folder: Path, reporter: SilentReporter, store: FeatureStore | None = None) -> Trainer:
    folder.mkdir(exist_ok=True)
    videos, packed = write_dataset(folder)
    return Trainer(
        load_recipe("m3-small", SETTINGS),
        videos=videos,
        store=store or packed,
        folder=folder / "run",
        device=torch.device("cpu"),
        reporter=reporter,
    )


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, Any]:
    """Return the outcome of an undisturbed run."""
    trainer = build_trainer(tmp_path / "undisturbed", SilentReporter())
    trainer.run()
    return run_outcome(trainer.folder)


def test_missing_features_file_during_training(
    tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the batch before is saved, and the run resumes once the file is back."""
    monkeypatch.setattr("capvid.datasets.batches.SHARE", 0)  # do not cache features in memory
    store = write_unpacked_features(tmp_path / "features")
    features_file = tmp_path / "features" / "train3.safetensors"
    reporter = CallAfterSteps(5, lambda: features_file.rename(tmp_path / "away"))
    trainer = build_trainer(tmp_path / "run", reporter, store)
    with pytest.raises(TrainingError) as error:
        trainer.run()
    best = trainer.folder / "best"
    remedy = "bring it back and go on with --resume"
    assert re.fullmatch(
        f"{re.escape(str(features_file))}: no such feature file; "
        f"{re.escape(str(best))} keeps epoch [12]; {remedy}",
        str(error.value),
    )
    assert load_checkpoint(best).info["epoch"] in (1, 2)
    (tmp_path / "away").rename(features_file)
    resumed_trainer = resume_run(trainer)
    assert 4 * (resumed_trainer.progress.epoch - 1) + resumed_trainer.progress.batch == reporter.steps < 12
    resumed_trainer.run()
    assert run_outcome(resumed_trainer.folder) == expected


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Limit the size of files, which looks to a program like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 3_000, 60_000])  # room for no file, no weights, no state
@pytest.mark.slow
def test_full_disk_keeps_the_best_epoch(tmp_path: Path, expected: dict[str, Any], size: int) -> None:
    limit = limited_file_size(size)
    trainer = build_trainer(tmp_path / "run", CallAfterSteps(10, limit.__enter__))
    try:
        with pytest.raises(TrainingError) as error:
            trainer.run()
    finally:
        limit.__exit__(None, None, None)
    message = str(error.value)
    assert message.startswith(f"{trainer.folder}: the run cannot be saved (File too large); ")
    assert re.search("best keeps epoch [12]; make room, and go on with --resume$", message)
    assert load_checkpoint(trainer.folder).info["epoch"] in (1, 2, 3)
    assert not list(trainer.folder.rglob("*.tmp"))
    resumed_trainer = resume_run(trainer)
    assert (resumed_trainer.progress.epoch, resumed_trainer.progress.batch) == (3, 0)
    resumed_trainer.run()
    assert run_outcome(resumed_trainer.folder) == expected


def test_out_of_memory_in_a_step(
    tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run resumes, also with smaller micro-batches."""
    trainer = build_trainer(tmp_path / "run", SilentReporter())
    forward = trainer.loss.forward

    def run_out_of_memory(*arguments: Any) -> torch.Tensor:
        if trainer.progress.epoch == 2 and trainer.progress.batch == 1:
            return torch.empty(2**50)
        return forward(*arguments)

    monkeypatch.setattr(trainer.loss, "forward", run_out_of_memory)
    with pytest.raises(
        TrainingError, match=r"^out of memory in epoch 2, batch 2; .*best keeps epoch 1"
    ) as error:
        trainer.run()
    assert "--set training.accumulate=2 or more, and --resume" in str(error.value)
    resumed_trainer = resume_run(trainer)
    assert resumed_trainer.progress.epoch == 2
    resumed_trainer.run()
    assert run_outcome(resumed_trainer.folder) == expected
    with_micro_batches = Trainer(
        load_recipe("m3-small", [*SETTINGS, "training.accumulate=2"]),
        videos=trainer.videos,
        store=trainer.store,
        folder=trainer.folder,
        device=trainer.device,
        reporter=SilentReporter(),
        resume=True,
    )
    assert with_micro_batches.over


@pytest.mark.parametrize("stage", ["reading", "validation"])
def test_out_of_memory_outside_a_step(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tmp_path / "run", SilentReporter())

    def run_out_of_memory(*_: Any, **__: Any) -> Any:
        raise MemoryError

    if stage == "reading":
        monkeypatch.setattr(trainer.store, "get", run_out_of_memory)
        trainer.reader._cache.clear()
    else:
        monkeypatch.setattr(trainer.task, "predict", run_out_of_memory)
    with pytest.raises(TrainingError, match=f"^out of memory in the {stage} of epoch 1; no epoch is kept"):
        trainer.run()


def test_command_prints_one_error_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_unpacked_features(tmp_path / "features")
    videos, _ = write_dataset(tmp_path)
    rows = [{"id": v.id, "split": v.split, "captions": v.captions} for v in videos]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    command = ["train", "m3-small", "--data", f"{tmp_path}/data.jsonl", "--features", f"{tmp_path}/features"]
    with limited_file_size(200_000):
        code = main([*command, "-o", f"{tmp_path}/run", *options])
    stderr_lines = capsys.readouterr().err.splitlines()
    assert code == 1
    errors = [line for line in stderr_lines if line.startswith("error: ")]
    assert len(errors) == 1 and "the run cannot be saved (File too large" in errors[0]
    assert load_checkpoint(tmp_path / "run").info["epoch"] == 1
