"""Training of a captioner: epochs, validation, the best checkpoint, early stopping."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from capvid.captioners.base import CAPTIONERS, Captioner, Standardise
from capvid.captioners.checkpoint import save_checkpoint
from capvid.datasets.dataset import CaptionedVideo
from capvid.datasets.examples import FrameReader
from capvid.errors import (
    CapvidError,
    DataError,
    DivergedError,
    TrainingError,
    TrainingMemoryError,
)
from capvid.features.feature_store import NO_VIEWS, FeatureStore, Views, views_of
from capvid.text.vocabulary import Vocabulary
from capvid.training import run_folder
from capvid.training.evaluation import Evaluation, calibrate_run, evaluate_run
from capvid.training.objectives import Lessons, Objective, spoken, with_own_memory, with_own_words
from capvid.training.optimization import (
    AveragedWeights,
    Share,
    accelerator_on,
    clip_gradients,
    device_of,
    learning_rate_factor,
    make_optimizer,
    merged,
    shares_of,
    wants_bf16,
)
from capvid.training.recipe import Recipe
from capvid.training.reporters import EpochResult, Progress, Reporter
from capvid.training.run_folder import STATE, TrainerState, identity, load_state, save_state
from capvid.training.tasks import (
    Prediction,
    fresh_captioner,
    seed_everything,
    split_of,
    task_of,
    vocabulary_for,
)
from capvid.utils.device import release_memory
from capvid.utils.files import atomic_write_text

RELEASE_EVERY = 50  # batches
LOOK_EVERY = 10  # batches: reading the loss more often would make the CPU wait for the GPU
LAST = "last"  # folder of the last checkpoint, with the state to resume from


class Trainer:
    """Trains one captioner by a recipe and keeps the best in ``folder / "best"``, the last in ``"last"``.

    Args:
        recipe: what to train and how.
        videos: the dataset; train and val are needed; a test split is scored at the end.
        store: features of all of them.
        folder: run folder; gets ``recipe.json``, ``metrics.jsonl``, ``best/``, ``last/``, the files of
            :mod:`capvid.training.run_folder` and, with a test split, ``test.json``.
        device: where to train.
        reporter: receives every batch and epoch.
        value_width: last columns of the features that are a captioner's values, not keys.
        views: augmented views of the videos; None takes those in the store.
        resume: continue the run in the folder, if it holds the state of one.

    Raises:
        CheckpointError: that state is damaged, or of another recipe or other data.
        DataError: a split is empty, or videos have no features, or not what the captioner writes.
        UsageError: the captioner cannot be made for such features.
    """

    fine_tunes = False  # whether the captioner is trained already

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
        views: Views | None = None,
        resume: bool = False,
    ) -> None:
        self.recipe, self.videos, self.store, self.folder = recipe, videos, store, folder
        self.reporter, self.reader = reporter, FrameReader(store)
        self.accelerator = accelerator_on(device, partial=CAPTIONERS[recipe.captioner].paragraphs)
        self.device, self.main = device_of(self.accelerator, device), self.accelerator.is_main_process
        options, data = recipe.training, recipe.data
        train, val = split_of(videos, "train"), split_of(videos, "val")
        seed_everything(options.seed)
        store.header.check_alike()
        self.task = task_of(CAPTIONERS[recipe.captioner], data)
        self.task.check(videos, recipe.captioner)
        self.vocabulary, self.captioner = self._captioner(train, value_width)
        self.captioner.function_words = self.vocabulary.function_words()
        views = views_of([v.id for v in videos], store.ids()) if views is None else views
        examples = self.task.examples(train, self.reader, self.vocabulary, views if data.views else NO_VIEWS)
        if not examples:
            raise DataError(f"no training caption has 1 to {data.max_words} words")
        self.batches = self._batches(examples)
        self.validation = self.task.examples(val, self.reader, None)
        self.test = [video for video in videos if video.split == "test"]
        self.cider = self.task.cider(val)
        if isinstance(self.captioner.standardise, Standardise) and not self.fine_tunes:
            self.captioner.standardise.fit(self.task.features(examples))
        self.captioner.to(self.device)
        self.optimizer = make_optimizer(self.captioner, options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, learning_rate_factor(options, options.epochs * len(self.batches))
        )
        self.average = AveragedWeights(self.captioner, options.average) if options.average else None
        self.bf16 = wants_bf16(options.precision, self.device, self.captioner)
        self.objective = self.accelerator.prepare_model(self._objective(), device_placement=False)
        self.trainer_state = TrainerState(
            module=self.captioner,
            optimizer=self.optimizer,
            schedule=self.schedule,
            average=self.average,
            device=self.device,
            accelerator=self.accelerator,
        )
        torch.manual_seed(torch.initial_seed() + self.accelerator.process_index)  # dropout of its own
        self.unseen = torch.zeros((), dtype=torch.float64, device=self.device)  # losses since the last look
        self.progress = Progress()
        if resume and self.state.exists():
            saved = load_state(self.state, self.trainer_state, self._identity(), Progress.from_dict)
            self.progress = Progress.from_dict(saved)

    def _captioner(self, train: Sequence[CaptionedVideo], value_width: int) -> tuple[Vocabulary, Captioner]:
        """Return the vocabulary of the training split and a captioner with initial weights."""
        vocabulary = vocabulary_for(self.task.sentences(train), self.recipe.data)
        return vocabulary, fresh_captioner(self.recipe, self.store.header, len(vocabulary), value_width)

    def _batches(self, examples: Sequence[Any]) -> Any:
        """Return the batches of an epoch."""
        options = self.recipe.training
        return self.task.batches(examples, batch_size=options.batch_size, seed=options.seed)

    def _objective(self) -> Objective:
        """Return the module that computes the loss."""
        return Objective(self.captioner, self.recipe.training.label_smoothing)

    def _identity(self) -> Mapping[str, Any]:
        """Return what a state to resume from must agree with."""
        names = [*self.vocabulary.words, *(video.id for video in self.videos), self.store.header.to_json()]
        return identity(self.recipe, [*names, str(self.batches.captions)])

    @property
    def state(self) -> Path:
        """File from which the run can be resumed."""
        return self.folder / LAST / STATE

    @property
    def over(self) -> bool:
        """Whether no epoch is left to train."""
        options, progress = self.recipe.training, self.progress
        return progress.epoch > options.epochs or progress.is_over(options.patience)

    def run(self) -> tuple[EpochResult, Evaluation | None]:
        """Train to the end; return the best epoch, and its scores on the test split if there is one.

        Raises:
            TrainingError: the loss is not finite, memory or disk do not suffice, or features are gone; what
                was saved before is kept.
        """
        progress = self.progress
        with self._saving():
            if self.main:
                atomic_write_text(self.folder / "recipe.json", json.dumps(self.recipe.to_dict(), indent=1))
                if not self.over:
                    run_folder.begin(
                        self.folder,
                        recipe=self.recipe,
                        videos=self.videos,
                        vocabulary=self.vocabulary,
                        header=self.store.header,
                        device=self.device,
                        progress=progress,
                    )
            if progress == Progress():
                self.state.unlink(missing_ok=True)  # of a run that is overwritten
                if self.fine_tunes:  # the captioner as it is competes for the best
                    cider, captions = self._validate()
                    self._save("best", 0, cider)
                    progress.begin(cider, dict(list(captions.items())[:3]))
        count = len({example.id for example in self.batches.examples})
        self.reporter.started(
            captions=self.batches.captions,
            videos=count,
            views=len(self.batches.examples) - count,
            validation=len(self.validation),
            words=len(self.vocabulary),
            batches=len(self.batches),
            epoch=progress.epoch,
            batch=progress.batch,
        )
        while not self.over:
            result = self._epoch()
            progress.log.append(json.dumps(result.record()))
            progress.next_epoch(result)
            with self._saving():
                if self.main:
                    atomic_write_text(self.folder / "metrics.jsonl", "\n".join(progress.log) + "\n")
                self.reporter.finished_epoch(result)
                self._save_state()
        assert progress.best is not None
        if not self.main:
            return progress.best, None
        with self._saving():
            val, decoding = split_of(self.videos, "val"), self.recipe.decoding
            uncalibrated = calibrate_run(self.folder, val, self.store, decoding)
            test = evaluate_run(self.folder, self.test, self.store, decoding) if self.test else None
            run_folder.end(self.folder, progress, uncalibrated=uncalibrated)
        self.reporter.finished(progress.best, test.scores if test else {})
        return progress.best, test

    def _validate(self) -> tuple[float, dict[str, Prediction]]:
        """Return CIDEr-D on the validation split, and the captions."""
        mine = self.validation[self.accelerator.process_index :: self.accelerator.num_processes]
        predicted = self.task.predict(self.captioner, self.vocabulary, mine, self.recipe.decoding)
        predicted = merged(self.accelerator, predicted)
        captions = {example.id: predicted[example.id] for example in self.validation}
        return self.cider(captions), captions

    def _epoch(self) -> EpochResult:
        """Train for an epoch, or what is left of it, validate, and save the weights if they are the best."""
        start, progress = time.monotonic(), self.progress
        speed, waited = self._train()
        if self.average:
            self.average.swap(self.captioner)
        with self._memory(f"the validation of epoch {progress.epoch}"):
            cider, captions = self._validate()
        better = progress.best is None or cider > progress.best.cider
        with self._saving():
            for name in ("best", LAST) if better else (LAST,):
                self._save(name, progress.epoch, cider)
        if self.average:
            self.average.swap(self.captioner)
        return EpochResult(
            epoch=progress.epoch,
            loss=progress.loss / progress.words,
            cider=cider,
            best=better,
            seconds=time.monotonic() - start,
            captions_per_second=speed,
            samples=dict(list(captions.items())[:3]),
            waited=waited,
        )

    def _save(self, name: str, epoch: int, cider: float) -> None:
        """Write a checkpoint into one of the run's folders."""
        if self.main:
            info = {**self.recipe.for_captioning(), "epoch": epoch, "val_cider": cider}
            half = self.recipe.training.stored == "float16"
            target = self.folder / name
            save_checkpoint(target, self.captioner, self.vocabulary, self.store.header, info, half=half)

    def _save_state(self) -> None:
        """Write the state from which the run can be resumed; a collective call."""
        save_state(self.state, self.trainer_state, self._identity(), asdict(self.progress))

    def _train(self) -> tuple[float, float]:
        """Train on the rest of the epoch; return captions per second, and seconds of waiting."""
        progress, every = self.progress, 1 if self.device.type == "cpu" else LOOK_EVERY
        self.captioner.train()
        captions, waited, start = 0, 0.0, time.monotonic()
        shares = shares_of(
            self.batches, progress.epoch, progress.batch, self.recipe.training.accumulate, self.accelerator
        )
        saved = start
        while True:
            asked = time.monotonic()
            with self._memory(f"the reading of epoch {progress.epoch}"), self._reading():
                share = next(shares, None)
            waited += time.monotonic() - asked
            if share is None:
                break
            self._step(share)
            captions += share.captions
            if share.number % RELEASE_EVERY == 0:
                release_memory()
            if share.number % every and share.number < len(self.batches):
                continue
            if self._look(save=time.monotonic() - saved > 60 * self.recipe.training.save_every):
                saved = time.monotonic()
            self.reporter.stepped(
                epoch=progress.epoch,
                batch=share.number,
                loss=progress.loss / progress.words,
                captions_per_second=captions / (time.monotonic() - start),
                learning_rate=self.optimizer.param_groups[0]["lr"],
            )
        return captions / (time.monotonic() - start), waited

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Save the state when features cannot be read any more."""
        try:
            yield
        except CapvidError as error:
            if self.accelerator.num_processes == 1:  # others would have to save theirs at the same time
                self._look(save=True)
            raise TrainingError(
                f"{error.message}; {self._kept()}", remedy="bring it back and go on with --resume"
            ) from error

    def _look(self, *, save: bool) -> bool:
        """Add the losses since the last call to the progress; save if the first process wants to.

        Raises:
            DivergedError: a loss was not finite.
        """
        progress, wish = self.progress, save and self.main
        report = torch.stack([self.unseen, torch.full_like(self.unseen, float(wish))])
        loss, wishes = self.accelerator.reduce(report).tolist()
        self.unseen = torch.zeros_like(self.unseen)
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {loss} in epoch {progress.epoch}, batch {progress.batch}; {self._kept()}",
                remedy="lower training.learning_rate, or clip gradients with training.clip_norm",
            )
        progress.loss += loss
        saved = wishes > 0 and progress.batch < len(self.batches)
        if saved:
            with self._saving():
                self._save_state()
        return saved

    def _lessons(self, share: Share) -> Lessons:
        """Return the micro-batches of this process's share of a batch."""
        options, progress = self.recipe.training, self.progress
        parts = [part.to(self.device) for part in share.parts]
        words = share.words
        if options.own_memory and progress.epoch > 1:  # in the first it has little to say
            most = self.recipe.decoding.max_length
            parts = [with_own_memory(self.captioner, part, max_length=most) for part in parts]
            words = spoken(parts, self.accelerator)
        done = (progress.epoch - 1) * len(self.batches) + share.number - 1
        rate = options.scheduled_sampling * done / (options.epochs * len(self.batches))
        if rate:
            with self._autocast():
                parts = [with_own_words(self.captioner, part, rate) for part in parts]
        return Lessons([(part, None) for part in parts], words, words)

    def _step(self, share: Share) -> None:
        """Learn from one batch.

        Raises:
            TrainingMemoryError: there is not enough memory.
        """
        options, progress, accelerator = self.recipe.training, self.progress, self.accelerator
        with self._memory(f"epoch {progress.epoch}, batch {share.number}"):
            lessons = self._lessons(share)
            self.optimizer.zero_grad(set_to_none=True)
            losses = torch.zeros_like(self.unseen)
            for number, (batch, weights) in enumerate(lessons.parts, 1):
                whole = number == len(lessons.parts)  # gradients are exchanged once
                with nullcontext() if whole else accelerator.no_sync(self.objective):
                    with self._autocast():
                        loss = self.objective(
                            batch.features, batch.mask, batch.inputs, batch.targets, weights, batch.remembered
                        )
                    # they are averaged over the processes, while the loss is a sum
                    accelerator.backward(loss * (accelerator.num_processes / lessons.divisor))
                losses += loss.detach()
            clip_gradients(self.captioner, options)
            self.optimizer.step()
        self.schedule.step()
        if self.average:
            self.average.update(self.captioner)
        self.unseen = self.unseen + (losses if lessons.shown is None else lessons.shown)
        progress.batch, progress.words = share.number, progress.words + lessons.count

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def _kept(self) -> str:
        """Describe what the disk holds of the run, for messages."""
        best = self.progress.best
        return f"{self.folder / 'best'} keeps epoch {best.epoch}" if best else "no epoch is kept yet"

    @contextmanager
    def _memory(self, where: str) -> Iterator[None]:
        """Turn a lack of memory into one line."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            if not is_out_of_memory(error):
                raise
            raise TrainingMemoryError(
                f"out of memory in {where}; {self._kept()}",
                remedy="take the batches in parts, with --set training.accumulate=2 or more, and --resume",
            ) from error

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Turn a file that cannot be written into one line."""
        kept = self._kept()
        try:
            yield
        except (OSError, SafetensorError) as error:
            text = str(error).splitlines()[0]
            system = re.search(r"I/O error: (.*?)(?: \(os error \d+\))?$", text)  # as safetensors words it
            reason = getattr(error, "strerror", None) or (system[1] if system else text)
            raise TrainingError(
                f"{self.folder}: the run cannot be saved ({reason}); {kept}",
                remedy="make room, and go on with --resume",
            ) from error


_FULL = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "alloc_failed")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is not enough memory, on the host or an accelerator."""
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return full or any(text in str(error).lower() for text in _FULL)
