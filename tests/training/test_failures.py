"""What goes wrong in the midst of a run is one line; what was saved is kept, and the run can be resumed."""

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
from test_loop import SMALL, Silent, data
from test_resume import outcome, resumed

from capvid.captioners.checkpoint import load_checkpoint
from capvid.cli.app import main
from capvid.errors import TrainingError, TrainingMemoryError
from capvid.features.feature_file import save_features
from capvid.features.feature_store import FeatureStore
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

SETTINGS = [*SMALL, "training.epochs=3", "training.batch_size=5", "model.dropout=0.3"]


class Does(Silent):
    """Does something after a number of steps."""

    def __init__(self, steps: int, deed: Callable[[], Any]) -> None:
        super().__init__()
        self.after, self.deed = steps, deed

    def stepped(self, **values: Any) -> None:
        super().stepped(**values)
        if self.steps == self.after:
            self.deed()


def unpacked(folder: Path) -> FeatureStore:
    """The features as a file for each video, in ``folder``."""
    folder.mkdir()
    _, store = data(folder.parent)
    for video in store.ids():
        save_features(folder / f"{video}.safetensors", store.get(video))
    return FeatureStore([folder])


def begun(folder: Path, reporter: Silent, store: FeatureStore | None = None) -> Trainer:
    folder.mkdir(exist_ok=True)
    videos, packed = data(folder)
    return Trainer(
        load_recipe("m3-small", SETTINGS),
        videos=videos,
        store=store or packed,
        folder=folder / "run",
        device=torch.device("cpu"),
        reporter=reporter,
    )


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, Any]:
    """What an undisturbed run gives."""
    made = begun(tmp_path / "whole", Silent())
    made.run()
    return outcome(made.folder)


def test_features_that_go(tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is kept up to the batch before, read ahead or not, and goes on when they are back."""
    monkeypatch.setattr("capvid.datasets.examples.SHARE", 0)  # nothing is kept in memory
    store = unpacked(tmp_path / "features")
    gone = tmp_path / "features" / "train3.safetensors"
    reporter = Does(5, lambda: gone.rename(tmp_path / "away"))
    made = begun(tmp_path / "run", reporter, store)
    with pytest.raises(TrainingError) as error:
        made.run()
    best = made.folder / "best"
    remedy = "bring it back and go on with --resume"
    assert re.fullmatch(
        f"{re.escape(str(gone))}: no such features file; {re.escape(str(best))} keeps epoch [12]; {remedy}",
        str(error.value),
    )
    assert load_checkpoint(best).info["epoch"] in (1, 2)
    (tmp_path / "away").rename(gone)
    again = resumed(made)
    assert 4 * (again.progress.epoch - 1) + again.progress.batch == reporter.steps < 12
    again.run()
    assert outcome(again.folder) == whole


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may be longer: to a program, a disk that fills."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "size", [0, 3_000, 60_000]
)  # for nothing, for all but weights, for all but the state
@pytest.mark.slow
def test_a_disk_that_fills(tmp_path: Path, whole: dict[str, Any], size: int) -> None:
    limit = small_files(size)
    made = begun(tmp_path / "run", Does(10, limit.__enter__))
    try:
        with pytest.raises(TrainingError) as error:
            made.run()
    finally:
        limit.__exit__(None, None, None)
    line = str(error.value)
    assert line.startswith(f"{made.folder}: the run cannot be saved (File too large); ")
    assert re.search("best keeps epoch [12]; make room, and go on with --resume$", line)
    assert load_checkpoint(made.folder).info["epoch"] in (1, 2, 3)
    assert not list(made.folder.rglob("*.tmp"))
    again = resumed(made)
    assert (again.progress.epoch, again.progress.batch) == (3, 0)
    again.run()
    assert outcome(again.folder) == whole


def test_memory_that_ends(tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is too large for it; what was kept goes on, in smaller parts if one likes."""
    made = begun(tmp_path / "run", Silent())
    forward = made.loss.forward

    def greedy(*arguments: Any) -> torch.Tensor:
        if made.progress.epoch == 2 and made.progress.batch == 1:
            return torch.empty(2**50)
        return forward(*arguments)

    monkeypatch.setattr(made.loss, "forward", greedy)
    with pytest.raises(
        TrainingMemoryError, match=r"^out of memory in epoch 2, batch 2; .*best keeps epoch 1"
    ) as e:
        made.run()
    assert "--set training.accumulate=2 or more, and --resume" in str(e.value)
    again = resumed(made)
    assert again.progress.epoch == 2
    again.run()
    assert outcome(again.folder) == whole
    smaller = Trainer(
        load_recipe("m3-small", [*SETTINGS, "training.accumulate=2"]),
        videos=made.videos,
        store=made.store,
        folder=made.folder,
        device=made.device,
        reporter=Silent(),
        resume=True,
    )
    assert smaller.over


@pytest.mark.parametrize("where", ["reading", "validation"])
def test_memory_that_ends_beside_a_step(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(tmp_path / "run", Silent())

    def greedy(*_: Any, **__: Any) -> Any:
        raise MemoryError

    if where == "reading":
        monkeypatch.setattr(made.store, "get", greedy)
        made.reader._cache.clear()
    else:
        monkeypatch.setattr(made.task, "predict", greedy)
    with pytest.raises(
        TrainingMemoryError, match=f"^out of memory in the {where} of epoch 1; no epoch is kept"
    ):
        made.run()


def test_the_command_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unpacked(tmp_path / "features")
    videos, _ = data(tmp_path)
    rows = [{"id": v.id, "split": v.split, "captions": v.captions} for v in videos]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    command = ["train", "m3-small", "--data", f"{tmp_path}/data.jsonl", "--features", f"{tmp_path}/features"]
    with small_files(200_000):
        code = main([*command, "-o", f"{tmp_path}/run", *options])
    said = capsys.readouterr().err.splitlines()
    assert code == 1
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1 and "the run cannot be saved (File too large" in errors[0]
    assert load_checkpoint(tmp_path / "run").info["epoch"] == 1
