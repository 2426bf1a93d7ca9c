from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command_server import CommandServer
from safetensors.torch import load_file, save_file
from small_training import (
    NOUNS,
    SMALL_M3,
    TRAINING,
    VERBS,
    SilentReporter,
    StopAfterSteps,
    StoppedError,
    make_trainer,
    resume_run,
    run_outcome,
    small_trainer,
)

from capvid.captioners.checkpoint import WEIGHTS
from capvid.errors import CheckpointError, TrainingError
from capvid.training.recipe import load_recipe
from capvid.training.trainer import STATE, Trainer

KILLS = 10
CONSTANT = "training.schedule=constant"


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [0.0, 5.0])
@pytest.mark.parametrize(
    ("name", "optimizer", "schedule", "average"),
    [
        ("m3", "adam", "constant", 0.9),
        ("m3", "adadelta", "constant", 0.0),
        ("dense-lstm", "adamw", "one-cycle", 0.9),
        ("mart", "adamw", "linear", 0.99),
    ],
)
def test_stopped_and_resumed_run_equals_an_undisturbed_one(
    tmp_path: Path, name: str, optimizer: str, schedule: str, average: float, save_every: float
) -> None:
    settings = [
        "model.dropout=0.3",
        "data.frame_dropout=0.3",
        "training.batch_size=5",
        "training.epochs=4",
        f"training.optimizer={optimizer}",
        f"training.schedule={schedule}",
        f"training.average={average}",
        f"training.save_every={save_every}",
    ]
    folders = [tmp_path / "undisturbed", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    make_trainer(folders[0], name, *settings).run()  # 16 steps
    trainer = make_trainer(folders[1], name, *settings)
    trainer.reporter = StopAfterSteps(6)
    runs = 0
    while True:
        try:
            trainer.run()
            break
        except StoppedError:
            runs += 1
            # without states within an epoch, each run must reach the end of one
            trainer = resume_run(trainer, after=3 if save_every == 0 else 5)
    assert runs >= 2
    assert run_outcome(folders[0] / "run") == run_outcome(folders[1] / "run")


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", "training.epochs=2")
    best, _ = trainer.run()
    expected = run_outcome(trainer.folder)
    resumed = resume_run(trainer)
    assert resumed.run()[0] == best
    assert isinstance(resumed.reporter, SilentReporter) and resumed.reporter.steps == 0
    assert run_outcome(trainer.folder) == expected


def test_state_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", "training.epochs=1")
    trainer.run()
    options: dict[str, Any] = {
        "store": trainer.store,
        "folder": trainer.folder,
        "device": trainer.device,
        "reporter": SilentReporter(),
        "resume": True,
    }
    with pytest.raises(CheckpointError, match="the state of a run with another data; give the data"):
        Trainer(trainer.recipe, videos=trainer.videos[2:], **options)
    other_recipe = load_recipe("m3-small", [*TRAINING, "training.epochs=3"])
    with pytest.raises(CheckpointError, match="the state of a run with another recipe"):
        Trainer(other_recipe, videos=trainer.videos, **options)
    state = trainer.folder / "last" / STATE
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged, no state to resume from") as error:
        resume_run(trainer)
    assert "\n" not in str(error.value)


def test_a_finished_run_is_trained_longer(tmp_path: Path) -> None:
    """With a constant learning rate that equals training so long at once; other schedules depend on it."""
    for name, *settings in (
        ("whole", "training.epochs=3", CONSTANT),
        ("longer", "training.epochs=1", "training.patience=1", CONSTANT),
        ("cosine", "training.epochs=1", "training.schedule=one-cycle"),
    ):
        (tmp_path / name).mkdir()
        trainer = make_trainer(tmp_path / name, "m3", *settings)
        trainer.run()

    def resume(name: str, *settings: str) -> Trainer:
        folder = tmp_path / name
        return small_trainer(folder, "m3", trainer.videos, trainer.store, *settings, resume=True)

    (tmp_path / "longer/run/metrics.jsonl").write_text('{"epoch": "x"}\n')  # written anew
    resume("longer", "training.epochs=3", CONSTANT).run()
    assert run_outcome(tmp_path / "longer/run") == run_outcome(tmp_path / "whole/run")
    with pytest.raises(CheckpointError, match=r"with another recipe \(training\.batch_size was \d+, is 7\);"):
        resume("longer", "training.epochs=3", CONSTANT, "training.batch_size=7")
    with pytest.raises(CheckpointError, match=r"another recipe \(training\.epochs was 1, is 3\); give the"):
        resume("cosine", "training.epochs=3", "training.schedule=one-cycle")


def test_new_run_replaces_the_old_state(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", "training.epochs=1")
    trainer.run()
    new_trainer = make_trainer(tmp_path, "m3", "training.epochs=1")
    new_trainer.reporter = StopAfterSteps(1)
    with pytest.raises(StoppedError):
        new_trainer.run()
    assert resume_run(trainer).progress.epoch == 1


def test_nan_loss_stops_the_run_and_keeps_the_best(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", "training.epochs=3")

    class NanWeights(SilentReporter):
        def finished_epoch(self, result: Any) -> None:
            trainer.captioner.state_dict()["cell.word.weight"].fill_(float("nan"))

    trainer.reporter = NanWeights()
    with pytest.raises(TrainingError, match=r"the loss is nan in epoch 2, batch 1; .*best keeps epoch 1"):
        trainer.run()
    assert all(t.isfinite().all() for t in load_file(trainer.folder / "best" / WEIGHTS).values())


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killed_and_resumed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    feature_generator = torch.Generator().manual_seed(3)
    features, lines = {}, []
    for number in range(60):
        split = "train" if number % 3 else "val"
        features[f"v{number}"] = torch.randn(4, 12, generator=feature_generator)
        caption = f"a {NOUNS[number % 5]} {VERBS[number % 4]}"
        lines.append(json.dumps({"id": f"v{number}", "split": split, "captions": [caption] * 5}))
    save_file(features, tmp_path / "features.safetensors")
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    def command(run: str) -> list[object]:
        training_settings = ["batch_size=8", "epochs=14", "patience=99", "save_every=0.0005"]
        settings = [*SMALL_M3, *(f"training.{setting}" for setting in training_settings)]
        options = [part for setting in settings for part in ("--set", setting)]
        files = ["--data", f"jsonl:{tmp_path}/data.jsonl", "--features", f"{tmp_path}/features.safetensors"]
        run_options = ["-o", tmp_path / run, "--device", "cpu", "--resume"]
        return ["train", "m3-small", *files, *options, *run_options]

    generator, kills = random.Random(7), 0
    with CommandServer("torch._dynamo") as server:  # imported by optimizers
        server.start(command("undisturbed"))
        assert server.wait() == 0
        for _ in range(KILLS):
            kill = {"number": signal.SIGKILL, "event": "os.rename", "text": STATE, "count": 2}
            server.start(command("killed"), signal_at={**kill, "delay": generator.uniform(0, 0.1)})
            kills += server.wait() == -signal.SIGKILL
        assert kills == KILLS  # each kill hit a working process
        server.start(command("killed"))
        assert server.wait() == 0
    assert run_outcome(tmp_path / "undisturbed") == run_outcome(tmp_path / "killed")
