"""Trains in as many processes as were launched; the first one writes down what came out.

``python together.py FOLDER``, or the same by ``accelerate launch``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("support", "training")]

from test_loop import SIZES, SMALL, TRAINING, Silent, data  # noqa: E402
from test_resume import Breaks, BrokenError, resumed  # noqa: E402

from capvid.captioners.checkpoint import load_checkpoint  # noqa: E402
from capvid.training.recipe import load_recipe  # noqa: E402
from capvid.training.reporters import Reporters  # noqa: E402
from capvid.training.trainer import Trainer  # noqa: E402

# 20 captions in batches of 7, 7 and 6: two processes have unequal shares
STEPS = ["training.batch_size=7", "training.epochs=7", "training.patience=7", "training.average=0.9"]


def outcome(made: Trainer) -> dict[str, Any]:
    """The losses and CIDEr-D of every epoch, and a few numbers of all weights."""
    rows = made.progress.rows
    return {
        "losses": [row["loss"] for row in rows],
        "ciders": [row["val_cider"] for row in rows],
        "weights": {name: p.double().sum().item() for name, p in made.captioner.named_parameters()},
        "samples": rows[-1]["samples"],
    }


def begun(folder: Path, name: str, *settings: str) -> Trainer:
    """A trainer whose run is in ``folder``; every process writes data of its own."""
    own = folder / f"data{os.environ.get('RANK', '0')}"
    own.mkdir(parents=True)
    videos, store = data(own, paragraphs=name == "mart")
    sizes = [f"model.{option}={value}" for option, value in SIZES[name].items()]
    return Trainer(
        load_recipe(f"{name}-small", [*TRAINING, *sizes, *STEPS, *settings]),
        videos=videos,
        store=store,
        folder=folder / "run",
        device=torch.device("cpu"),
        reporter=Reporters(),
    )


def fine_tuned(before: Trainer) -> Trainer:
    """Self-critical, from a captioner that is trained already."""
    settings = ["self_critical.learning_rate=4e-3", "self_critical.epochs=3", "self_critical.batch_size=7"]
    made = Trainer(
        load_recipe("m3-small", [*SMALL, *settings]),
        start=load_checkpoint(before.folder),
        videos=before.videos,
        store=before.store,
        folder=before.folder.parent / "fine",
        device=torch.device("cpu"),
        reporter=Reporters(),
    )
    made.run()
    return made


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    for name, settings in (
        ("m3", ()),
        # element-wise clipping, because Adam alone does not see how large gradients are
        ("soft-attention", ("training.accumulate=4", "training.optimizer=adam", "training.clip_value=0.01")),
        ("mart", ("training.accumulate=2", "training.own_memory=true")),
    ):
        made = begun(folder / name, name, *settings)
        made.run()
        found[name] = outcome(made)
        if name == "m3":
            found["self-critical"] = outcome(fine_tuned(made))
    dropped = ["model.dropout=0.3", "training.save_every=0.0"]
    made = begun(folder / "whole", "m3", *dropped)
    made.run()
    found["whole"] = outcome(made)
    made = begun(folder / "broken", "m3", *dropped)
    made.reporter = Breaks(11)
    try:
        made.run()
    except BrokenError:
        made.accelerator.wait_for_everyone()  # the state is written
        made = resumed(made)
        made.run()
        assert isinstance(made.reporter, Silent) and made.reporter.steps == 10
    found["broken"] = outcome(made)
    found["processes"] = made.accelerator.num_processes
    if made.main:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
