"""The training loop: epochs, validation, the best checkpoint, early stopping."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capvid.captioners import Captioner, build, captioner_class
from capvid.captioners.checkpoint import load_checkpoint, save_checkpoint
from capvid.captioners.layers import Standardise
from capvid.data.captions import CaptionedVideo
from capvid.device import release_memory
from capvid.errors import DataError, TrainingError, UsageError
from capvid.features.store import FeatureStore
from capvid.files import atomic_write_text
from capvid.text.vocabulary import PAD, SPECIAL, Vocabulary
from capvid.training import provenance
from capvid.training.evaluate import Evaluation, evaluate
from capvid.training.optimise import (
    AveragedWeights,
    bf16_in_hardware,
    caption_loss,
    clip_gradients,
    learning_rate_factor,
    make_optimizer,
)
from capvid.training.progress import EpochResult, Progress, Reporter
from capvid.training.recipe import Recipe
from capvid.training.state import STATE, Learner, load_state, save_state
from capvid.training.tasks import Prediction, task_of

RELEASE_EVERY = 50  # batches
LAST = "last"  # folder of the last checkpoint, with the state to resume from


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Trainer:
    """Trains one captioner by a recipe and keeps the best in ``folder / "best"``, the last in ``"last"``.

    Args:
        recipe: what to train and how.
        videos: the data set; train and val are needed; a test split is scored at the end.
        store: features of all of them.
        folder: the run folder; gets ``recipe.json``, ``metrics.jsonl``, ``best/``, ``last/``, the files of
            :mod:`capvid.training.provenance` and, with a test split, ``test.json``.
        device: where to train.
        reporter: told of every batch and epoch.
        value_width: of the features, the last columns that are a captioner's values, not keys.
        resume: go on with the run in the folder, if it holds the state of one.

    Raises:
        CheckpointError: that state is damaged, or of another recipe or other data.
        DataError: a split is empty, or videos have no features, or not what the captioner writes.
        UsageError: the captioner cannot be made for such features.
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
        value_width: int = 0,
        resume: bool = False,
    ) -> None:
        self.recipe, self.videos, self.store, self.folder = recipe, videos, store, folder
        self.device, self.reporter = device, reporter
        options, data = recipe.training, recipe.data
        train = [video for video in videos if video.split == "train"]
        val = [video for video in videos if video.split == "val"]
        for name, split in (("train", train), ("val", val)):
            if not split:
                raise DataError(f"no video of the data is in the {name} split", remedy="add some to the data")
        seed_everything(options.seed)
        store.header.check_alike()
        self.task = task_of(captioner_class(recipe.captioner), data)
        self.task.check(videos, recipe.captioner)
        self.vocabulary = self._vocabulary(train)
        if len(self.vocabulary) == len(SPECIAL):
            raise DataError(
                f"no word comes {data.min_count} times in the training captions",
                remedy="lower data.min_count",
            )
        self.captioner = self._build(value_width)
        examples = self.task.examples(train, store, self.vocabulary)
        if not examples:
            raise DataError(f"no training caption has 1 to {data.max_words} words")
        self.batches = self._batches(examples)
        self.validation = self.task.examples(val, store, None)
        self.test = [video for video in videos if video.split == "test"]
        self.cider = self.task.cider(val)
        self._fit(examples)
        self.captioner.to(device)
        self.optimizer = make_optimizer(self.captioner, options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, learning_rate_factor(options, options.epochs * len(self.batches))
        )
        self.average = AveragedWeights(self.captioner, options.average) if options.average else None
        self.bf16 = options.precision == "bf16" or (options.precision == "auto" and bf16_in_hardware(device))
        self.learner = Learner(
            module=self.captioner,
            optimizer=self.optimizer,
            schedule=self.schedule,
            average=self.average,
            device=device,
        )
        self.progress = Progress()
        if resume and self.state.is_file():
            found = load_state(self.state, self.learner, self._run())
            best = found.pop("best")
            self.progress = Progress(**found, best=None if best is None else EpochResult(**best))

    @property
    def state(self) -> Path:
        """The file from which the run can be resumed."""
        return self.folder / LAST / STATE

    @property
    def over(self) -> bool:
        """Whether no epoch is left to train."""
        options, progress = self.recipe.training, self.progress
        return progress.epoch > options.epochs or progress.is_over(options.patience)

    def _run(self) -> Mapping[str, Any]:
        """What a state must agree with."""
        seen = [*self.vocabulary.words, *(video.id for video in self.videos), self.store.header.to_json()]
        return {
            "recipe": self.recipe.to_dict(),
            "data": hashlib.sha256("\n".join([*seen, str(self.batches.captions)]).encode()).hexdigest(),
        }

    def _vocabulary(self, train: Sequence[CaptionedVideo]) -> Vocabulary:
        data = self.recipe.data
        return Vocabulary.build(
            self.task.sentences(train), min_count=data.min_count, max_size=data.max_vocabulary
        )

    def _batches(self, examples: Sequence[Any]) -> Any:
        options = self.recipe.training
        return self.task.batches(examples, batch_size=options.batch_size, seed=options.seed)

    def _fit(self, examples: Sequence[Any]) -> None:
        """Measure the features, if the captioner standardises them."""
        if isinstance(self.captioner.standardise, Standardise):
            self.captioner.standardise.fit(self.task.features(examples))

    def _build(self, value_width: int) -> Captioner:
        """A fresh captioner for the features, its weights as the recipe wants them at the beginning."""
        header, kind = self.store.header, captioner_class(self.recipe.captioner)
        sizes = {
            "vocabulary_size": len(self.vocabulary),
            "feature_width": header.width,
            "locations": header.locations,
        }
        if value_width:
            sizes["value_width"] = value_width
            if "value_width" not in {field.name for field in fields(kind.config_class)}:
                raise UsageError(
                    f"{self.recipe.captioner} has no values beside its features",
                    remedy="leave out --values, or give the stream as --features",
                )
        captioner = build(self.recipe.captioner, {**sizes, **self.recipe.model})
        limit = self.recipe.training.init_range
        if limit:
            for parameter in captioner.parameters():
                torch.nn.init.uniform_(parameter, -limit, limit)
        return captioner

    def run(self) -> tuple[EpochResult, Evaluation | None]:
        """Train to the end; returns the best epoch and what it scores on the test split, if there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.folder / "recipe.json", json.dumps(self.recipe.to_dict(), indent=1))
        progress = self.progress
        self._write_provenance()
        if progress == Progress():
            self.state.unlink(missing_ok=True)  # that of a run that is overwritten
            self._begin()
        self.reporter.started(
            captions=self.batches.captions,
            videos=len(self.batches.examples),
            validation=len(self.validation),
            words=len(self.vocabulary),
            batches=len(self.batches),
            epoch=progress.epoch,
            batch=progress.batch,
        )
        while not self.over:
            result = self._epoch()
            progress.log.append(json.dumps(self._record(result)))
            atomic_write_text(self.folder / "metrics.jsonl", "\n".join(progress.log) + "\n")
            progress.next_epoch(result)
            self.reporter.finished_epoch(result)
            self._keep()
        assert progress.best is not None
        found = self._test(self.test) if self.test else None
        provenance.end(self.folder, progress)
        self.reporter.finished(progress.best, found.scores if found else {})
        return progress.best, found

    def _write_provenance(self) -> None:
        """Say what the run is made of and with, unless it is over already."""
        if not self.over:
            provenance.begin(
                self.folder,
                recipe=self.recipe,
                videos=self.videos,
                vocabulary=self.vocabulary,
                header=self.store.header,
                device=self.device,
                progress=self.progress,
            )

    def _begin(self) -> None:
        """What comes before the first epoch."""

    def _validate(self) -> tuple[float, dict[str, Prediction]]:
        """CIDEr-D on the validation split, and the captions."""
        captions = self.task.predict(self.captioner, self.vocabulary, self.validation, self.recipe.decoding)
        return self.cider(captions), captions

    def _epoch(self) -> EpochResult:
        """Train for an epoch, or what is left of it, validate, and save the weights if they are the best."""
        start, progress = time.monotonic(), self.progress
        speed = self._train()
        loss = progress.loss / progress.words
        if self.average:
            self.average.swap(self.captioner)
        cider, captions = self._validate()
        better = progress.best is None or cider > progress.best.cider
        if better:
            self._save("best", progress.epoch, cider)
        self._save(LAST, progress.epoch, cider)
        if self.average:
            self.average.swap(self.captioner)
        samples = dict(list(captions.items())[:3])
        return EpochResult(progress.epoch, loss, cider, better, time.monotonic() - start, speed, samples)

    def _save(self, name: str, epoch: int, cider: float) -> None:
        """Write a checkpoint into one of the run's folders."""
        info = {
            "recipe": self.recipe.name,
            "epoch": epoch,
            "val_cider": cider,
            "max_frames": self.recipe.data.max_frames,
            "frames": self.recipe.data.frames,
            "max_segments": self.recipe.data.max_segments,
            "decoding": self.recipe.to_dict()["decoding"],
        }
        half = self.recipe.training.stored == "float16"
        save_checkpoint(
            self.folder / name, self.captioner, self.vocabulary, self.store.header, info, half=half
        )

    def _keep(self) -> None:
        """Write the state from which the run can be resumed."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        save_state(self.state, self.learner, self._run(), asdict(self.progress))

    def _train(self) -> float:
        """What is left of one pass over the batches; returns captions per second."""
        options, progress = self.recipe.training, self.progress
        self.captioner.train()
        captions, start = 0, time.monotonic()
        kept = start
        for number, batch in enumerate(self.batches.epoch(progress.epoch), 1):
            if number <= progress.batch:  # done before the run was broken off
                continue
            loss, words = self._step(batch.to(self.device))
            progress.loss, progress.words = progress.loss + loss * words, progress.words + words
            progress.batch = number
            captions += len(batch)
            if number % RELEASE_EVERY == 0:
                release_memory()
            if time.monotonic() - kept > 60 * options.save_every and number < len(self.batches):
                self._keep()
                kept = time.monotonic()
            self.reporter.stepped(
                epoch=progress.epoch,
                batch=number,
                loss=progress.loss / progress.words,
                captions_per_second=captions / (time.monotonic() - start),
                learning_rate=self.optimizer.param_groups[0]["lr"],
            )
        return captions / (time.monotonic() - start)

    def _loss(self, batch: Any) -> tuple[Tensor, float, int]:
        """What a batch is learned by; the loss to log, a mean; and of how many words or samples."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = caption_loss(self.captioner, batch, self.recipe.training.label_smoothing)
        return loss, loss.item(), int((batch.targets != PAD).sum())

    def _step(self, batch: Any) -> tuple[float, int]:
        """Learn from one batch; returns the mean loss, and of how many words or samples.

        Raises:
            TrainingError: the loss is not finite.
        """
        options, progress = self.recipe.training, self.progress
        loss, value, count = self._loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradients(self.captioner, options)
        self.optimizer.step()
        self.schedule.step()
        if self.average:
            self.average.update(self.captioner)
        if not math.isfinite(value):
            best = f"; {self.folder / 'best'} keeps epoch {progress.best.epoch}" if progress.best else ""
            raise TrainingError(
                f"the loss is {value} in epoch {progress.epoch}, batch {progress.batch + 1}{best}",
                remedy="lower training.learning_rate, or clip gradients with training.clip_norm",
            )
        return value, count

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
