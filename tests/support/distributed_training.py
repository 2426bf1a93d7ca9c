"""Train several captioners in the launched processes; the first process writes results.json.

``python distributed_training.py FOLDER``, or the same by ``accelerate launch``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from small_training import (
    SIZES,
    SMALL_M3,
    TRAINING,
    SilentReporter,
    StopAfterSteps,
    StoppedError,
    resume_run,
    write_dataset,
)

from capvid.captioners.checkpoint import load_checkpoint
from capvid.training.recipe import load_recipe
from capvid.training.reporters import Reporters
from capvid.training.trainer import Trainer

# 20 captions in batches of 7, 7 and 6: two processes have unequal shards
STEPS = ["training.batch_size=7", "training.epochs=7", "training.patience=7", "training.average=0.9"]


def summarise(trainer: Trainer) -> dict[str, Any]:
    """Return the losses and CIDEr-D of every epoch, the sum of each weight tensor and the last samples."""
    rows = trainer.progress.rows
    return {
        "losses": [row["loss"] for row in rows],
        "ciders": [row["val_cider"] for row in rows],
        "weights": {name: p.double().sum().item() for name, p in trainer.captioner.named_parameters()},
        "samples": rows[-1]["samples"],
    }


def start_run(folder: Path, name: str, *settings: str) -> Trainer:
    """Return a trainer of a run in ``folder``; every process writes its own dataset."""
    data_folder = folder / f"data{os.environ.get('RANK', '0')}"
    data_folder.mkdir(parents=True)
    videos, store = write_dataset(data_folder, paragraphs=name == "mart")
    sizes = [f"model.{option}={value}" for option, value in SIZES[name].items()]
    return Trainer(
        load_recipe(f"{name}-small", [*TRAINING, *sizes, *STEPS, *settings]),
        videos=videos,
        store=store,
        folder=folder / "run",
        device=torch.device("cpu"),
        reporter=Reporters(),
    )


def fine_tune(trained: Trainer) -> Trainer:
    """Fine-tune a trained captioner self-critically."""
    settings = ["self_critical.learning_rate=4e-3", "self_critical.epochs=3", "self_critical.batch_size=7"]
    trainer = Trainer(
        load_recipe("m3-small", [*SMALL_M3, *settings]),
        start=load_checkpoint(trained.folder),
        videos=trained.videos,
        store=trained.store,
        folder=trained.folder.parent / "fine",
        device=torch.device("cpu"),
        reporter=Reporters(),
    )
    trainer.run()
    return trainer


def main(folder: Path) -> None:
    results: dict[str, Any] = {}
    for name, settings in (
        ("m3", ()),
        # element-wise clipping, because Adam alone does not see how large gradients are
        ("soft-attention", ("training.accumulate=4", "training.optimizer=adam", "training.clip_value=0.01")),
        ("mart", ("training.accumulate=2", "training.own_memory=true")),
    ):
        trainer = start_run(folder / name, name, *settings)
        trainer.run()
        results[name] = summarise(trainer)
        if name == "m3":
            results["self-critical"] = summarise(fine_tune(trainer))
    settings = ["model.dropout=0.3", "training.save_every=0.0"]
    trainer = start_run(folder / "undisturbed", "m3", *settings)
    trainer.run()
    results["undisturbed"] = summarise(trainer)
    trainer = start_run(folder / "resumed", "m3", *settings)
    trainer.reporter = StopAfterSteps(11)
    try:
        trainer.run()
    except StoppedError:
        trainer.accelerator.wait_for_everyone()  # until the state is written
        trainer = resume_run(trainer)
        trainer.run()
        assert isinstance(trainer.reporter, SilentReporter) and trainer.reporter.steps == 10
    results["resumed"] = summarise(trainer)
    results["processes"] = trainer.accelerator.num_processes
    if trainer.main:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
