"""Training runs small enough for tests, and reporters that stop them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from capvid.captioners.base import CAPTIONERS
from capvid.captioners.checkpoint import WEIGHTS
from capvid.datasets.dataset import CaptionedVideo, Segment
from capvid.features.feature_store import FeatureStore
from capvid.training.recipe import load_recipe
from capvid.training.reporters import EpochResult, Reporter
from capvid.training.trainer import Trainer

NOUNS = ["man", "woman", "dog", "cat", "girl"]
VERBS = ["runs very fast", "sings slowly", "is cooking rice", "jumps over a wall"]
TRAINING = [
    "data.min_count=1",
    "data.frame_dropout=0.0",
    "training.batch_size=10",
    "training.label_smoothing=0.0",
    "training.precision=fp32",
    "training.learning_rate=0.01",
    "training.average=0.9",
    "decoding.beam_size=2",
]
LSTM = {"embedding": 24, "hidden": 48, "attention": 16, "projection": 32, "dropout": 0.0}
STACK = {"hidden": 48, "heads": 2, "feed_forward": 64, "word_width": 24, "dropout": 0.0}
SIZES: dict[str, dict[str, Any]] = {
    "soft-attention": {**LSTM, "output": 48},
    "m3": {**LSTM, "output": 48, "memory_rows": 6, "memory_width": 16},
    "kv-memory": {**LSTM, "encoder_hidden": 32},
    "ham": {**LSTM, "memory_width": 24, "bottleneck": 16},
    "dense-lstm": {**LSTM, "encoder": 24},
    "mart": STACK,
    "vanilla-transformer": STACK,
    "transformer-xl": STACK,
}
SMALL_M3 = [*TRAINING, *(f"model.{name}={value}" for name, value in SIZES["m3"].items())]
MAP_CAPTIONERS = {"ham"}


class SilentReporter(Reporter):
    """Counts the steps and keeps the results of the epochs, without any output."""

    def __init__(self) -> None:
        self.results: list[EpochResult] = []
        self.steps = 0

    def stepped(self, **_: Any) -> None:
        self.steps += 1

    def finished_epoch(self, result: EpochResult) -> None:
        self.results.append(result)


def write_dataset(
    folder: Path, *, maps: bool = False, paragraphs: bool = False
) -> tuple[list[CaptionedVideo], FeatureStore]:
    """Write random features of 20 training videos, each with its own caption, and of equal validation videos.

    Args:
        folder: where the features file is written.
        maps: whether to write feature maps instead of vectors.
        paragraphs: whether to describe each video by two segments with a sentence each.
    """
    generator = torch.Generator().manual_seed(0)
    videos, tensors = [], {}
    for n in range(20):
        caption = f"a {NOUNS[n % 5]} {VERBS[n // 5]}"
        frames = torch.randn(3, 12, generator=generator)
        for split in ("train", "val"):
            video = CaptionedVideo(f"{split}{n}", split, (caption,))
            if paragraphs:
                sentences = (caption, f"then the {NOUNS[n % 5]} stops")
                segments = (Segment(0, 1), Segment(1, 3))
                video = CaptionedVideo(f"{split}{n}", split, (), segments, (sentences,))
            videos.append(video)
            tensors[f"{split}{n}"] = frames.clone().view(3, 4, 3) if maps else frames.clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "features.safetensors"
    )
    return videos, FeatureStore([folder / "features.safetensors"])


def make_trainer(folder: Path, name: str, *settings: str) -> Trainer:
    """Return the trainer of a small captioner on the dataset of :func:`write_dataset`."""
    videos, store = write_dataset(folder, maps=name in MAP_CAPTIONERS, paragraphs=CAPTIONERS[name].paragraphs)
    return small_trainer(folder, name, videos, store, *settings)


def small_trainer(
    folder: Path,
    name: str,
    videos: Sequence[CaptionedVideo],
    store: FeatureStore,
    *settings: str,
    device: torch.device | None = None,
    reporter: Reporter | None = None,
    resume: bool = False,
) -> Trainer:
    """Return the trainer of a small captioner in ``folder / "run"``."""
    sizes = [f"model.{option}={value}" for option, value in SIZES[name].items()]
    return Trainer(
        load_recipe(f"{name}-small", [*TRAINING, *sizes, *settings]),
        videos=videos,
        store=store,
        folder=folder / "run",
        device=device or torch.device("cpu"),
        reporter=reporter or SilentReporter(),
        resume=resume,
    )


class StoppedError(Exception):
    """Raised by :class:`StopAfterSteps`."""


class StopAfterSteps(SilentReporter):
    """Stops the run with an error after a number of steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.remaining = steps

    def stepped(self, **values: Any) -> None:
        super().stepped(**values)
        self.remaining -= 1
        if not self.remaining:
            raise StoppedError


def resume_run(trainer: Trainer, *, after: int | None = None) -> Trainer:
    """Return a trainer that resumes a run from the state in its folder.

    Args:
        trainer: the trainer of the interrupted run.
        after: number of steps after which the resumed run is stopped; None lets it finish.
    """
    torch.manual_seed(999)  # the random state must come from the saved run
    return Trainer(
        trainer.recipe,
        videos=trainer.videos,
        store=trainer.store,
        folder=trainer.folder,
        device=trainer.device,
        reporter=SilentReporter() if after is None else StopAfterSteps(after),
        resume=True,
    )


def run_outcome(folder: Path) -> dict[str, Any]:
    """Return the weights and the metrics of a run, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {k: v for k, v in row.items() if "seconds" not in k and k != "captions_per_second"} for row in lines
    ]
    tensors = {
        f"{name}/{key}": tensor.numpy().tobytes()
        for name in ("best", "last")
        for key, tensor in load_file(folder / name / WEIGHTS).items()
    }
    return {"log": rows, **tensors}
