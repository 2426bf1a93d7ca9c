from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_loop import Silent, trainer
from test_resume import Breaks, BrokenError, resumed

from capvid.captioners.checkpoint import load_checkpoint
from capvid.errors import TrainingError
from capvid.training.evaluation import evaluate
from capvid.training.reporters import Events, Reporter, Reporters
from capvid.training.trainer import Trainer

SETTINGS = ["training.epochs=3", "training.batch_size=5", "model.dropout=0.3", "training.schedule=linear"]

Points = dict[str, list[tuple[int, Any]]]


def points(folder: Path) -> Points:
    """Steps and values by tag, as TensorBoard reads them."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = read.Tags()
    found: Points = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        said = [(e.step, e.tensor_proto.string_val[0].decode()) for e in read.Tensors(tag)]
        found[tag.removesuffix("/text_summary")] = said
    return found


def timeless(found: Points) -> Points:
    return {tag: said for tag, said in found.items() if not tag.endswith(("seconds", "per_second"))}


def run(made: Trainer, *others: Reporter, every: float = 0.0) -> Points:
    """Train with events beside other reporters; gives what stands in them, however it ended."""
    with contextlib.closing(Events(made.folder / "events", every=every)) as events:
        made.reporter = Reporters(events, *others)
        with contextlib.suppress(BrokenError):
            made.run()
    return points(made.folder / "events")


@pytest.fixture
def new(tmp_path: Path) -> Callable[[str], Trainer]:
    """Makes the trainer of a new run."""

    def make(name: str) -> Trainer:
        (tmp_path / name).mkdir()
        return trainer(tmp_path / name, "m3", *SETTINGS)

    return make


def test_events_are_those_of_the_log(new: Callable[[str], Trainer]) -> None:
    made = new("run")
    rows = made.optimizer.param_groups
    first_rate = rows[0]["lr"]
    found = run(made)
    log = [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "val_cider", "seconds", "captions_per_second"):
        assert [step for step, _ in found[f"epochs/{name}"]] == [4, 8, 12]
        wanted = [row[name] for row in log]
        # the log has speeds rounded to a tenth, seconds to a thousandth
        assert [value for _, value in found[f"epochs/{name}"]] == pytest.approx(wanted, rel=1e-6, abs=0.06)
        if name in ("loss", "val_cider"):
            assert [v for _, v in found[f"epochs/{name}"]] == pytest.approx(wanted, rel=1e-6)
    for tag in ("steps/loss", "steps/learning_rate", "steps/captions_per_second"):
        assert [step for step, _ in found[tag]] == list(range(1, 13))
    assert dict(found["steps/loss"])[8] == pytest.approx(log[1]["loss"], rel=1e-6)
    rates = [value for _, value in found["steps/learning_rate"]]
    assert max(rates) > rates[-1] == pytest.approx(rows[0]["lr"]) and max(rates) > first_rate
    for (_, said), row in zip(found["epochs/samples"], log, strict=True):
        assert said.splitlines() == [f"    {video}: {caption}" for video, caption in row["samples"].items()]


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [0.0, 5.0])
def test_a_run_that_is_broken_off_has_the_events_of_an_unbroken_one(
    new: Callable[[str], Trainer], save_every: float
) -> None:
    whole = run(new("whole"))
    made = new("broken")
    object.__setattr__(made.recipe.training, "save_every", save_every)
    assert len(run(made, Breaks(6))["steps/loss"]) == 6
    watching = EventAccumulator(str(made.folder / "events"), size_guidance={"scalars": 0}).Reload()
    for _ in range(2):
        made = resumed(made)
        run(made, Breaks(5))
    found = points(made.folder / "events")
    assert len(list((made.folder / "events").iterdir())) == 3
    assert timeless(found) == timeless(whole)
    watching.Reload()  # it has seen what was lost
    for tag in watching.Tags()["scalars"]:
        assert [(event.step, event.value) for event in watching.Scalars(tag)] == found[tag]
    assert [step for step, _ in found["steps/captions_per_second"]] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_an_epoch_that_ended_without_its_state_is_told_once(
    new: Callable[[str], Trainer], told: bool
) -> None:
    """The run ends between the epoch and its state, after its events were written or before."""

    class Dies(Silent):
        def finished_epoch(self, result: Any) -> None:
            if result.epoch == 2:
                raise BrokenError

    made = new("run")
    with contextlib.closing(Events(made.folder / "events", every=0.0)) as events:
        made.reporter = Reporters(events, Dies()) if told else Reporters(Dies(), events)
        with pytest.raises(BrokenError):
            made.run()
    assert len(points(made.folder / "events")["epochs/loss"]) == 1 + told
    again = resumed(made)
    assert again.progress.epoch == 2
    assert timeless(run(again)) == timeless(run(new("whole")))


@pytest.mark.slow
def test_a_file_that_is_damaged_at_its_end_is_mended(new: Callable[[str], Trainer]) -> None:
    whole = run(new("whole"))
    for number, damage in enumerate([b"\x05", b"\xff" * 40, b"\x04" + b"\0" * 11 + b"\xff" * 30]):
        made = new(f"damaged{number}")
        object.__setattr__(made.recipe.training, "save_every", 0.0)
        run(made, Breaks(6))
        with next((made.folder / "events").iterdir()).open("ab") as file:
            file.write(damage)
        assert timeless(run(resumed(made))) == timeless(whole)


def test_scores_on_the_test_split_stay_single(new: Callable[[str], Trainer]) -> None:
    made = new("run")
    made.test = [video for video in made.videos if video.split == "val"]
    first = run(made)
    again = resumed(made)
    again.test = made.test
    second = run(again)
    scores = evaluate(load_checkpoint(made.folder), made.test, made.store, made.recipe.decoding).scores
    assert {tag for tag in second if tag.startswith("test/")} == {f"test/{name}" for name in scores}
    for name, score in scores.items():
        assert second[f"test/{name}"] == [(13, pytest.approx(score, rel=1e-6))]
    assert second == first


def test_a_new_run_forgets_the_events_of_an_old_one(new: Callable[[str], Trainer]) -> None:
    made = new("run")
    run(made)
    anew = trainer(made.folder.parent, "m3", *SETTINGS)
    (made.folder / "events" / "mine.txt").touch()
    found = run(anew, Breaks(2))
    assert [step for step, _ in found["steps/loss"]] == [1, 2] and "epochs/loss" not in found
    assert (made.folder / "events" / "mine.txt").exists()


def test_steps_are_told_now_and_then(new: Callable[[str], Trainer]) -> None:
    found = run(new("run"), every=1000.0)
    assert [step for step, _ in found["steps/loss"]] == [1, 4, 8, 12]


def test_events_that_cannot_be_written_end_the_run_in_one_line(new: Callable[[str], Trainer]) -> None:
    made = new("run")
    made.folder.mkdir()
    (made.folder / "events").touch()
    made.reporter = Events(made.folder / "events")
    with pytest.raises(TrainingError, match=r"events: events cannot be written \(File exists\); make room"):
        made.run()
    assert not (made.folder / "metrics.jsonl").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is full")
def test_a_full_disk_ends_the_run_and_it_can_be_resumed(new: Callable[[str], Trainer]) -> None:
    class Fills(Silent):
        def stepped(self, **values: Any) -> None:
            super().stepped(**values)
            if self.steps == 6:
                events._file = full

    made = new("run")
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        contextlib.closing(Events(made.folder / "events", every=0)) as events,
    ):
        made.reporter = Reporters(events, Fills())
        with pytest.raises(TrainingError, match=r"cannot be written \(No space left on device\); make"):
            made.run()
    assert made.progress.epoch == 2
    assert timeless(run(resumed(made))) == timeless(run(new("whole")))
