from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_training import SilentReporter, StopAfterSteps, StoppedError, make_trainer, resume_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.record_writer import RecordWriter

from capvid.captioners.checkpoint import load_checkpoint
from capvid.errors import TrainingError
from capvid.training.evaluation import evaluate
from capvid.training.reporters import Events, Reporter, Reporters
from capvid.training.trainer import Trainer

SETTINGS = ["training.epochs=3", "training.batch_size=5", "model.dropout=0.3", "training.schedule=linear"]

Points = dict[str, list[tuple[int, Any]]]


def read_events(folder: Path) -> Points:
    """Return steps and values by tag, as TensorBoard reads them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = accumulator.Tags()
    points: Points = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in accumulator.Tensors(tag)]
        points[tag.removesuffix("/text_summary")] = texts
    return points


def without_times(events: Points) -> Points:
    return {tag: points for tag, points in events.items() if not tag.endswith(("seconds", "per_second"))}


def run_with_events(trainer: Trainer, *others: Reporter, every: float = 0.0) -> Points:
    """Train with an events reporter beside others; return its events, even if the run was stopped."""
    with contextlib.closing(Events(trainer.folder / "events", every=every)) as events:
        trainer.reporter = Reporters(events, *others)
        with contextlib.suppress(StoppedError):
            trainer.run()
    return read_events(trainer.folder / "events")


@pytest.fixture
def new_trainer(tmp_path: Path) -> Callable[[str], Trainer]:
    """Return a function that makes the trainer of a new run."""

    def make(name: str) -> Trainer:
        (tmp_path / name).mkdir()
        return make_trainer(tmp_path / name, "m3", *SETTINGS)

    return make


def test_events_match_the_metrics_log(new_trainer: Callable[[str], Trainer]) -> None:
    trainer = new_trainer("run")
    param_groups = trainer.optimizer.param_groups
    first_rate = param_groups[0]["lr"]
    events = run_with_events(trainer)
    log = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "val_cider", "seconds", "captions_per_second"):
        assert [step for step, _ in events[f"epochs/{name}"]] == [4, 8, 12]
        expected = [row[name] for row in log]
        # the log has speeds rounded to a tenth, seconds to a thousandth
        assert [value for _, value in events[f"epochs/{name}"]] == pytest.approx(expected, rel=1e-6, abs=0.06)
        if name in ("loss", "val_cider"):
            assert [v for _, v in events[f"epochs/{name}"]] == pytest.approx(expected, rel=1e-6)
    for tag in ("steps/loss", "steps/learning_rate", "steps/captions_per_second"):
        assert [step for step, _ in events[tag]] == list(range(1, 13))
    assert dict(events["steps/loss"])[8] == pytest.approx(log[1]["loss"], rel=1e-6)
    rates = [value for _, value in events["steps/learning_rate"]]
    assert max(rates) > rates[-1] == pytest.approx(param_groups[0]["lr"]) and max(rates) > first_rate
    for (_, text), row in zip(events["epochs/samples"], log, strict=True):
        assert text.splitlines() == [f"    {video}: {caption}" for video, caption in row["samples"].items()]


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [0.0, 5.0])
def test_resumed_run_has_the_events_of_an_undisturbed_one(
    new_trainer: Callable[[str], Trainer], save_every: float
) -> None:
    expected = run_with_events(new_trainer("undisturbed"))
    trainer = new_trainer("stopped")
    object.__setattr__(trainer.recipe.training, "save_every", save_every)
    assert len(run_with_events(trainer, StopAfterSteps(6))["steps/loss"]) == 6
    watching = EventAccumulator(str(trainer.folder / "events"), size_guidance={"scalars": 0}).Reload()
    for _ in range(2):
        trainer = resume_run(trainer)
        run_with_events(trainer, StopAfterSteps(5))
    events = read_events(trainer.folder / "events")
    assert len(list((trainer.folder / "events").iterdir())) == 3
    assert without_times(events) == without_times(expected)
    watching.Reload()  # its first load included steps that were lost
    for tag in watching.Tags()["scalars"]:
        assert [(event.step, event.value) for event in watching.Scalars(tag)] == events[tag]
    assert [step for step, _ in events["steps/captions_per_second"]] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("events_first", [True, False])
def test_epoch_without_saved_state_is_recorded_once(
    new_trainer: Callable[[str], Trainer], events_first: bool
) -> None:
    """The run stops between an epoch's end and its saved state, before or after writing its events."""

    class StopInEpoch2(SilentReporter):
        def finished_epoch(self, result: Any) -> None:
            if result.epoch == 2:
                raise StoppedError

    trainer = new_trainer("run")
    with contextlib.closing(Events(trainer.folder / "events", every=0.0)) as events:
        trainer.reporter = (
            Reporters(events, StopInEpoch2()) if events_first else Reporters(StopInEpoch2(), events)
        )
        with pytest.raises(StoppedError):
            trainer.run()
    assert len(read_events(trainer.folder / "events")["epochs/loss"]) == 1 + events_first
    resumed = resume_run(trainer)
    assert resumed.progress.epoch == 2
    recorded, undisturbed = run_with_events(resumed), run_with_events(new_trainer("undisturbed"))
    # TensorBoard discards the scalars of steps that are repeated, but not their texts
    assert dict(recorded.pop("epochs/samples")) == dict(undisturbed.pop("epochs/samples"))
    assert without_times(recorded) == without_times(undisturbed)


def test_test_scores_are_recorded_once(new_trainer: Callable[[str], Trainer]) -> None:
    trainer = new_trainer("run")
    trainer.test = [video for video in trainer.videos if video.split == "val"]
    first = run_with_events(trainer)
    resumed = resume_run(trainer)
    resumed.test = trainer.test
    second = run_with_events(resumed)
    scores = evaluate(
        load_checkpoint(trainer.folder), trainer.test, trainer.store, trainer.recipe.decoding
    ).scores
    assert {tag for tag in second if tag.startswith("test/")} == {f"test/{name}" for name in scores}
    for name, score in scores.items():
        assert second[f"test/{name}"] == [(13, pytest.approx(score, rel=1e-6))]
    assert second == first


def test_new_run_removes_old_events(new_trainer: Callable[[str], Trainer]) -> None:
    trainer = new_trainer("run")
    run_with_events(trainer)
    next_trainer = make_trainer(trainer.folder.parent, "m3", *SETTINGS)
    (trainer.folder / "events" / "notes.txt").touch()
    events = run_with_events(next_trainer, StopAfterSteps(2))
    assert [step for step, _ in events["steps/loss"]] == [1, 2] and "epochs/loss" not in events
    assert (trainer.folder / "events" / "notes.txt").exists()


def test_steps_are_recorded_at_intervals(new_trainer: Callable[[str], Trainer]) -> None:
    events = run_with_events(new_trainer("run"), every=1000.0)
    assert [step for step, _ in events["steps/loss"]] == [1, 4, 8, 12]


def test_unwritable_events_stop_the_run(new_trainer: Callable[[str], Trainer]) -> None:
    trainer = new_trainer("run")
    trainer.folder.mkdir()
    (trainer.folder / "events").touch()
    trainer.reporter = Events(trainer.folder / "events")
    with pytest.raises(TrainingError, match=r"events: events cannot be written \(File exists\); free"):
        trainer.run()
    assert not (trainer.folder / "metrics.jsonl").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_run_resumes_after_a_full_disk(new_trainer: Callable[[str], Trainer]) -> None:
    class FillDisk(SilentReporter):
        def stepped(self, **values: Any) -> None:
            super().stepped(**values)
            if self.steps == 6:
                events._writer = RecordWriter("/dev/full")

    trainer = new_trainer("run")
    events = Events(trainer.folder / "events", every=0)
    trainer.reporter = Reporters(events, FillDisk())
    with pytest.raises(TrainingError, match=r"cannot be written \(No space left on device\); free"):
        trainer.run()
    assert trainer.progress.epoch == 2
    assert without_times(run_with_events(resume_run(trainer))) == without_times(
        run_with_events(new_trainer("undisturbed"))
    )
