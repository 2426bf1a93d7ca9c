"""Training throughput from feature files, compared with a plain loop, as the dataset grows.

Random features of N videos are written in the format of ``capvid extract``, one file each; then ``m3-small``
(or another caption recipe) is trained on them for a number of steps. The plain loop reads one file, takes one
caption, and runs forward and backward passes, with an optimizer step per batch size of the recipe.
``python benchmarks/training_loop.py --help`` for options.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from capvid.backbones.catalog import StreamHeader
from capvid.datasets import examples as frames
from capvid.datasets.dataset import CaptionedVideo
from capvid.features.feature_file import FeatureHeader, Features, load_features, save_features
from capvid.features.feature_store import FeatureStore
from capvid.text.vocabulary import BOS, EOS
from capvid.training.optimization import clip_gradients
from capvid.training.recipe import Recipe, load_recipe
from capvid.training.reporters import EpochResult, Reporters
from capvid.training.trainer import Trainer

FRAMES, WIDTH, WORDS, CAPTIONS = 28, 1024, 4000, 20
VALIDATION = 4


def write_data(folder: Path, count: int) -> list[CaptionedVideo]:
    """Write features (28, 1024) of ``count`` videos; return the videos with 20 captions each."""
    draw, chance = np.random.default_rng(0), random.Random(0)
    stream = StreamHeader(backbone="made", layer="top", width=WIDTH)
    header = FeatureHeader(
        streams=(stream,), sampling="uniform:28", reader=None, dtype="float16", capvid_version="0"
    )
    videos = []
    for number in range(count):
        name = f"video{number}"
        values = draw.random((FRAMES, WIDTH), dtype=np.float32)
        times = np.arange(FRAMES, dtype=np.float64)
        save_features(
            folder / f"{name}.safetensors",
            Features(header=header, streams=(values,), times=times, video=name),
        )
        captions = tuple(
            " ".join(f"w{chance.randrange(WORDS)}" for _ in range(chance.randrange(5, 14)))
            for _ in range(CAPTIONS)
        )
        videos.append(CaptionedVideo(name, "val" if number < VALIDATION else "train", captions))
    return videos


class Timed:
    """Reporter that records the time of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.result: EpochResult | None = None

    def started(self, **_: int) -> None:
        """Record the start."""
        self.times.append(time.perf_counter())

    def stepped(self, **_: Any) -> None:
        """Record a step."""
        self.times.append(time.perf_counter())

    def finished_epoch(self, result: EpochResult) -> None:
        """Keep the result of the epoch."""
        self.result = result

    def finished(self, *_: Any) -> None:
        """Do nothing."""


def train(
    recipe: Recipe, folder: Path, videos: list[CaptionedVideo], steps: int, device: torch.device
) -> None:
    """Train for at least ``steps`` steps and print their times."""
    draws = -(-steps * recipe.training.batch_size // len(videos))
    chosen = load_recipe(recipe.name, [*SETTINGS, f"data.captions_per_video={min(CAPTIONS, max(1, draws))}"])
    assert isinstance(chosen, Recipe)
    timed = Timed()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as run:
        trainer = Trainer(
            chosen,
            videos=videos,
            store=FeatureStore([folder]),
            folder=Path(run),
            device=device,
            reporter=Reporters(timed),
        )
        ready = time.perf_counter()
        trainer.captioner.train()
        timed.started()
        _, waited = trainer._train()
    spent = np.diff(timed.times)
    median = float(np.median(spent))
    early, late = np.median(spent[: len(spent) // 2]), np.median(spent[len(spent) // 2 :])
    print(
        f"{len(videos):7} videos  {ready - begun:6.1f} s set-up  {len(spent):4} steps of "
        f"{1000 * median:6.1f} ms (median; first half {1000 * early:6.1f}, second {1000 * late:6.1f})  "
        f"{chosen.training.batch_size / median:6.0f} captions/s  waited {100 * waited / spent.sum():4.1f} %",
        flush=True,
    )


def plain(
    recipe: Recipe, folder: Path, videos: list[CaptionedVideo], captions: int, device: torch.device
) -> None:
    """Train on one caption and one file at a time, with a step per batch size of captions."""
    with tempfile.TemporaryDirectory() as run:
        trainer = Trainer(
            recipe,
            videos=videos[:200],
            store=FeatureStore([folder]),
            folder=Path(run),
            device=device,
            reporter=Reporters(),
        )
    captioner, options, vocabulary = trainer.captioner.train(), recipe.training, trainer.vocabulary
    chance = random.Random(1)
    begun = time.perf_counter()
    for number in range(1, captions + 1):
        video = chance.choice(videos[VALIDATION:200])
        words = vocabulary.encode(chance.choice(video.captions).split())
        read = torch.from_numpy(load_features(folder / f"{video.id}.safetensors").concatenated())
        features = (
            read[torch.randperm(len(read))[: recipe.data.max_frames].sort().values].unsqueeze(0).to(device)
        )
        mask = torch.ones(features.shape[:2], dtype=torch.bool, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=trainer.bf16):
            z = captioner.teacher_forced(features, mask, torch.tensor([[BOS, *words]], device=device))
            logits = captioner.logits(z[0]).float()
        targets = torch.tensor([*words, EOS], device=device)
        loss = F.cross_entropy(logits, targets, label_smoothing=options.label_smoothing)
        (loss / options.batch_size).backward()
        if number % options.batch_size == 0:
            clip_gradients(captioner, options)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
        loss.item()
    speed = captions / (time.perf_counter() - begun)
    print(f"plain loop, one caption after another: {speed:6.0f} captions/s", flush=True)


SETTINGS = ["training.epochs=1", "data.min_count=1"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="m3-small")
    parser.add_argument("--videos", type=int, nargs="+", default=[300, 3000])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plain", type=int, default=256, help="captions of the plain loop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    recipe = load_recipe(options.recipe, SETTINGS)
    assert isinstance(recipe, Recipe)
    print(f"{recipe.name}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        for count in options.videos:
            made = Path(folder) / str(count)
            made.mkdir()
            videos = write_data(made, count)
            if count == options.videos[0]:
                plain(recipe, made, videos, options.plain, device)
            for share, kept in (
                (frames.SHARE, "cached after first read"),
                (0.0, "read for every batch"),
            ):
                frames.SHARE = share
                print(f"features {kept}:", end=" ")
                train(recipe, made, videos, options.steps, device)
            frames.SHARE = 0.25


if __name__ == "__main__":
    main()
