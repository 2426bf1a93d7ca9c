from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ready import Ready
from safetensors.torch import load_file, save_file
from test_loop import NOUNS, SMALL, TRAINING, VERBS, Silent, trainer

from capvid.captioners.checkpoint import WEIGHTS
from capvid.errors import CheckpointError, TrainingError
from capvid.training.recipe import load_recipe
from capvid.training.trainer import STATE, Trainer

KILLS = 10


class BrokenError(Exception):
    pass


class Breaks(Silent):
    """Breaks the run off after a number of steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def stepped(self, **values: Any) -> None:
        super().stepped(**values)
        self.left -= 1
        if not self.left:
            raise BrokenError


def resumed(made: Trainer, *, after: int | None = None) -> Trainer:
    """The same run anew, from the state in its folder."""
    torch.manual_seed(999)  # what was drawn before must not matter
    return Trainer(
        made.recipe,
        videos=made.videos,
        store=made.store,
        folder=made.folder,
        device=made.device,
        reporter=Silent() if after is None else Breaks(after),
        resume=True,
    )


def outcome(folder: Path) -> dict[str, Any]:
    """Weights, and what was measured on the way but the time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timeless = [
        {k: v for k, v in row.items() if "seconds" not in k and k != "captions_per_second"} for row in lines
    ]
    tensors = {
        f"{name}/{key}": tensor.numpy().tobytes()
        for name in ("best", "last")
        for key, tensor in load_file(folder / name / WEIGHTS).items()
    }
    return {"log": timeless, **tensors}


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
def test_a_run_that_is_broken_off_ends_as_an_unbroken_one(
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
    folders = [tmp_path / "whole", tmp_path / "broken"]
    for folder in folders:
        folder.mkdir()
    trainer(folders[0], name, *settings).run()  # 16 steps
    made = trainer(folders[1], name, *settings)
    made.reporter = Breaks(6)
    runs = 0
    while True:
        try:
            made.run()
            break
        except BrokenError:
            runs += 1
            # without states within an epoch, one must be reached at least
            made = resumed(made, after=3 if save_every == 0 else 5)
    assert runs >= 2
    assert outcome(folders[0] / "run") == outcome(folders[1] / "run")


def test_a_run_that_is_over_is_left_as_it_is(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", "training.epochs=2")
    best, _ = made.run()
    before = outcome(made.folder)
    again = resumed(made)
    assert again.run()[0] == best
    assert isinstance(again.reporter, Silent) and again.reporter.steps == 0
    assert outcome(made.folder) == before


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", "training.epochs=1")
    made.run()
    options: dict[str, Any] = {
        "store": made.store,
        "folder": made.folder,
        "device": made.device,
        "reporter": Silent(),
        "resume": True,
    }
    with pytest.raises(CheckpointError, match="the state of a run with another data; give the data"):
        Trainer(made.recipe, videos=made.videos[2:], **options)
    other = load_recipe("m3-small", [*TRAINING, "training.epochs=3"])
    with pytest.raises(CheckpointError, match="the state of a run with another recipe"):
        Trainer(other, videos=made.videos, **options)
    state = made.folder / "last" / STATE
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged, no state to resume from") as error:
        resumed(made)
    assert "\n" not in str(error.value)


def test_a_new_run_forgets_the_state_of_an_old_one(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", "training.epochs=1")
    made.run()
    anew = trainer(tmp_path, "m3", "training.epochs=1")
    anew.reporter = Breaks(1)
    with pytest.raises(BrokenError):
        anew.run()
    assert resumed(made).progress.epoch == 1


def test_a_loss_that_is_no_number_ends_the_run_and_the_best_stays(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", "training.epochs=3")

    class Spoils(Silent):
        def finished_epoch(self, result: Any) -> None:
            made.captioner.state_dict()["cell.word.weight"].fill_(float("nan"))

    made.reporter = Spoils()
    with pytest.raises(TrainingError, match=r"the loss is nan in epoch 2, batch 1; .*best keeps epoch 1"):
        made.run()
    assert all(t.isfinite().all() for t in load_file(made.folder / "best" / WEIGHTS).values())


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_after_ten_kills_the_weights_are_those_of_an_unbroken_run(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    features, lines = {}, []
    for number in range(60):
        split = "train" if number % 3 else "val"
        features[f"v{number}"] = torch.randn(4, 12, generator=generator)
        caption = f"a {NOUNS[number % 5]} {VERBS[number % 4]}"
        lines.append(json.dumps({"id": f"v{number}", "split": split, "captions": [caption] * 5}))
    save_file(features, tmp_path / "features.safetensors")
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    def command(run: str) -> list[object]:
        settings = ["batch_size=8", "epochs=14", "patience=99", "save_every=0.0005"]
        chosen = [*SMALL, *(f"training.{setting}" for setting in settings)]
        options = [part for setting in chosen for part in ("--set", setting)]
        files = ["--data", f"jsonl:{tmp_path}/data.jsonl", "--features", f"{tmp_path}/features.safetensors"]
        where = ["-o", tmp_path / run, "--device", "cpu", "--resume"]
        return ["train", "m3-small", *files, *options, *where]

    chance, kills = random.Random(7), 0
    state = tmp_path / "broken" / "last" / STATE
    with Ready("torch._dynamo") as ready:  # which optimizers import
        ready.start(command("whole"))
        assert ready.wait() == 0
        for _ in range(KILLS):
            before = state.stat().st_mtime_ns if state.exists() else 0
            process, start = ready.start(command("broken")), time.monotonic()
            while not state.exists() or state.stat().st_mtime_ns == before:
                assert time.monotonic() - start < 60
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.1))
            os.kill(process, signal.SIGKILL)
            kills += ready.wait() == -signal.SIGKILL
        assert kills == KILLS  # it was killed at work, each time
        ready.start(command("broken"))
        assert ready.wait() == 0
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "broken")
