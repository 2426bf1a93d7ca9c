"""The training loop: epochs, validation, the best checkpoint, early stopping."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from capvid.captioners import Captioner, build
from capvid.captioners.checkpoint import load_checkpoint, save_checkpoint
from capvid.captioners.layers import Standardise
from capvid.data.batches import Example, TrainingBatches, make_examples, tokenised
from capvid.data.captions import CaptionedVideo
from capvid.errors import DataError
from capvid.features.store import FeatureStore
from capvid.files import atomic_write_text
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import SPECIAL, Vocabulary
from capvid.training.evaluate import Evaluation, caption_frames, evaluate
from capvid.training.optimise import (
    AveragedWeights,
    bf16_in_hardware,
    caption_loss,
    clip_gradients,
    learning_rate_factor,
    make_optimizer,
)
from capvid.training.recipe import Recipe


@dataclass(frozen=True)
class EpochResult:
    """What one epoch gave.

    Attributes:
        epoch: its number, from 1.
        loss: mean training loss per word.
        cider: CIDEr-D on the validation split.
        best: whether that is the best so far.
        seconds: of training and validation together.
        captions_per_second: in training.
        samples: a few validation captions, by video id.
    """

    epoch: int
    loss: float
    cider: float
    best: bool
    seconds: float
    captions_per_second: float
    samples: dict[str, str]


class Reporter(Protocol):
    """Is told how training goes on."""

    def started(self, *, captions: int, videos: int, validation: int, words: int, batches: int) -> None:
        """Training begins: ``batches`` in an epoch."""

    def stepped(self, *, epoch: int, batch: int, loss: float, captions_per_second: float) -> None:
        """One batch is done."""

    def finished_epoch(self, result: EpochResult) -> None:
        """One epoch is done, validated and saved."""


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Trainer:
    """Trains one captioner by a recipe and keeps the best in ``folder / "best"``.

    Args:
        recipe: what to train and how.
        videos: the data set; train and val are needed; a test split is scored at the end.
        store: features of all of them.
        folder: the run folder; gets ``recipe.json``, ``metrics.jsonl``, ``best/`` and, with a
            test split, ``test.json``.
        device: where to train.
        reporter: told of every batch and epoch.

    Raises:
        DataError: a split is empty, or videos have no features.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        videos: Sequence[CaptionedVideo],
        store: FeatureStore,
        folder: Path,
        device: torch.device,
        reporter: Reporter,
    ) -> None:
        self.recipe, self.store, self.folder = recipe, store, folder
        self.device, self.reporter = device, reporter
        options, data = recipe.training, recipe.data
        train = [video for video in videos if video.split == "train"]
        val = [video for video in videos if video.split == "val"]
        for name, split in (("train", train), ("val", val)):
            if not split:
                raise DataError(f"no video of the data is in the {name} split", remedy="add some to the data")
        seed_everything(options.seed)
        spoken = tokenised(train, data.max_words)
        self.vocabulary = Vocabulary.build(
            (caption for captions in spoken.values() for caption in captions),
            min_count=data.min_count,
            max_size=data.max_vocabulary,
        )
        if len(self.vocabulary) == len(SPECIAL):
            raise DataError(
                f"no word comes {data.min_count} times in the training captions",
                remedy="lower data.min_count",
            )
        examples = make_examples(train, store, self.vocabulary, max_words=data.max_words)
        if not examples:
            raise DataError(f"no training caption has 1 to {data.max_words} words")
        self.batches = TrainingBatches(
            examples,
            batch_size=options.batch_size,
            captions_per_video=data.captions_per_video,
            max_frames=data.max_frames,
            frame_dropout=data.frame_dropout,
            seed=options.seed,
        )
        self.validation = make_examples(val, store, self.vocabulary, max_words=10**9)
        self.test = [video for video in videos if video.split == "test"]
        self.scorer = CiderD({video.id: list(video.captions) for video in val})
        self.captioner = self._build(examples).to(device)
        self.optimizer = make_optimizer(self.captioner, options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, learning_rate_factor(options, options.epochs * len(self.batches))
        )
        self.average = AveragedWeights(self.captioner, options.average) if options.average else None
        self.bf16 = options.precision == "bf16" or (options.precision == "auto" and bf16_in_hardware(device))

    def _build(self, examples: Sequence[Example]) -> Captioner:
        captioner = build(
            self.recipe.captioner,
            {
                "vocabulary_size": len(self.vocabulary),
                "feature_width": self.store.header.width,
                **self.recipe.model,
            },
        )
        if isinstance(captioner.standardise, Standardise):
            captioner.standardise.fit(torch.cat([example.frames for example in examples]))
        return captioner

    def run(self) -> tuple[EpochResult, Evaluation | None]:
        """Train to the end; returns the best epoch and what it scores on the test split, if there is one."""
        options = self.recipe.training
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.folder / "recipe.json", json.dumps(self.recipe.to_dict(), indent=1))
        log: list[str] = []
        self.reporter.started(
            captions=self.batches.captions,
            videos=len(self.batches.examples),
            validation=len(self.validation),
            words=len(self.vocabulary),
            batches=len(self.batches),
        )
        best: EpochResult | None = None
        for epoch in range(1, options.epochs + 1):
            result = self._epoch(epoch, best)
            if result.best:
                best = result
            log.append(json.dumps(self._record(result)))
            atomic_write_text(self.folder / "metrics.jsonl", "\n".join(log) + "\n")
            self.reporter.finished_epoch(result)
            if best is None or epoch - best.epoch >= options.patience:
                break
        if best is None:
            raise DataError("training gave no finite loss", remedy="lower training.learning_rate")
        return best, self._test(self.test) if self.test else None

    def _epoch(self, epoch: int, best: EpochResult | None) -> EpochResult:
        start = time.monotonic()
        loss, speed = self._train(epoch)
        if self.average:
            self.average.swap(self.captioner)
        captions = self._captions()
        cider, _ = self.scorer.score(captions)
        better = np.isfinite(loss) and (best is None or cider > best.cider)
        if better:
            info = {
                "recipe": self.recipe.name,
                "epoch": epoch,
                "val_cider": cider,
                "max_frames": self.recipe.data.max_frames,
                "decoding": self.recipe.to_dict()["decoding"],
            }
            save_checkpoint(
                self.folder / "best",
                self.captioner,
                self.vocabulary,
                self.store.header,
                info,
                half=self.recipe.training.stored == "float16",
            )
        if self.average:
            self.average.swap(self.captioner)
        samples = dict(list(captions.items())[:3])
        return EpochResult(epoch, loss, cider, bool(better), time.monotonic() - start, speed, samples)

    def _train(self, epoch: int) -> tuple[float, float]:
        """One pass over the batches: mean loss per word, captions per second."""
        options = self.recipe.training
        self.captioner.train()
        total, words, captions, start = 0.0, 0, 0, time.monotonic()
        for number, batch in enumerate(self.batches.epoch(epoch), 1):
            batch = batch.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = caption_loss(self.captioner, batch, options.label_smoothing)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            clip_gradients(self.captioner, options)
            self.optimizer.step()
            self.schedule.step()
            if self.average:
                self.average.update(self.captioner)
            count = int((batch.targets != 0).sum())
            total, words = total + loss.item() * count, words + count
            captions += len(batch.targets)
            self.reporter.stepped(
                epoch=epoch,
                batch=number,
                loss=total / words,
                captions_per_second=captions / (time.monotonic() - start),
            )
        return total / words, captions / (time.monotonic() - start)

    def _captions(self) -> dict[str, str]:
        """The validation split's captions as they are now."""
        captions = caption_frames(
            self.captioner,
            self.vocabulary,
            [example.frames for example in self.validation],
            max_frames=self.recipe.data.max_frames,
            options=self.recipe.decoding,
        )
        return {example.id: text for example, text in zip(self.validation, captions, strict=True)}

    def _test(self, videos: Sequence[CaptionedVideo]) -> Evaluation:
        """Score the best checkpoint on the test split, once, at the end."""
        found = evaluate(load_checkpoint(self.folder), videos, self.store, self.recipe.decoding)
        record = {"scores": found.scores, "captions": found.captions}
        atomic_write_text(self.folder / "test.json", json.dumps(record, ensure_ascii=False, indent=1))
        return found

    @staticmethod
    def _record(result: EpochResult) -> Mapping[str, Any]:
        return {
            "epoch": result.epoch,
            "loss": result.loss,
            "val_cider": result.cider,
            "best": result.best,
            "seconds": round(result.seconds, 3),
            "captions_per_second": round(result.captions_per_second, 1),
            "samples": result.samples,
        }
