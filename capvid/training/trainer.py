"""Training of a captioner: restoring, epochs, micro-batches, validation, checkpoints and early stopping.

A run that is killed at any moment and resumed ends with the same weights as an undisturbed one.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from capvid.backbones.catalog import BUNDLED
from capvid.captioners.base import CAPTIONERS, Captioner, Standardise, build
from capvid.captioners.checkpoint import Checkpoint, holds_checkpoint, load_checkpoint, save_checkpoint
from capvid.datasets.batches import FrameReader
from capvid.datasets.dataset import CaptionedVideo
from capvid.decoding.rescoring import check_specificity
from capvid.errors import (
    CapvidError,
    DataError,
    TrainingError,
    UsageError,
)
from capvid.features.feature_file import FeatureHeader
from capvid.features.feature_store import NO_VIEWS, FeatureStore, Views, views_of
from capvid.text.vocabulary import SPECIAL, Vocabulary, read_word_vectors
from capvid.training import run_folder
from capvid.training.evaluation import Evaluation, Prediction, Task, calibrate_run, evaluate_run
from capvid.training.objectives import (
    CrossEntropy,
    SelfCritical,
    TeacherForcedLoss,
)
from capvid.training.optimization import (
    OPTIMIZERS,
    AveragedWeights,
    Shard,
    accelerate_on,
    clip_gradients,
    gather_items,
    learning_rate_factor,
    shards_of,
    wants_bf16,
)
from capvid.training.recipe import DataOptions, Recipe
from capvid.training.reporters import EpochResult, Reporter
from capvid.training.run_folder import Progress
from capvid.utils.device import release_memory
from capvid.utils.files import atomic_path, atomic_write_text, open_regular
from capvid.utils.validation import parse_json

RELEASE_EVERY = 50  # batches
SYNC_EVERY = 10  # batches: reading the loss makes the CPU wait for the GPU
SAMPLES = 3  # validation captions in the log
LAST = "last"  # folder of the last checkpoint and of the state to resume from
STATE, STATE_FORMAT = "state.safetensors", 2
FREE = {"accumulate", "save_every", "patience"}  # options that may change when a run is resumed


class Trainer:
    """Trains one captioner by a recipe; keeps the best in ``folder / "best"`` and the last in ``"last"``.

    With ``start``, the objective is self-critical: that captioner is fine-tuned on CIDEr-D by the recipe's
    section ``self_critical``. It stays the best until an epoch beats it on the validation split.

    Args:
        recipe: recipe of the captioner.
        videos: dataset; train and val are required, a test split is scored at the end.
        store: features of all videos.
        folder: run folder; gets ``recipe.json``, ``metrics.jsonl``, ``best/``, ``last/``, the files of
            :mod:`capvid.training.run_folder` and, with a test split, ``test.json``.
        device: training device.
        reporter: receives every batch and epoch.
        value_width: number of last feature columns that are a captioner's values, not keys.
        views: augmented views of the videos; None uses those in the store.
        start: trained captioner to fine-tune.
        resume: continue the run in the folder, if it holds a state.
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
        views: Views | None = None,
        start: Checkpoint | None = None,
        resume: bool = False,
    ) -> None:
        recipe = SelfCritical.recipe_for(recipe, start, store.header) if start else recipe
        options, data, paragraphs = recipe.training, recipe.data, CAPTIONERS[recipe.captioner].paragraphs
        self.recipe, self.videos, self.store, self.folder, self.start = recipe, videos, store, folder, start
        self.reporter, self.reader = reporter, FrameReader(store)
        self.accelerator, self.device = accelerate_on(device, partial=paragraphs)
        self.main = self.accelerator.is_main_process
        train, self.val = split_of(videos, "train"), split_of(videos, "val")
        self.test = [video for video in videos if video.split == "test"]
        random.seed(options.seed)
        np.random.seed(options.seed % 2**32)
        torch.manual_seed(options.seed)
        store.header.check_alike()
        self.task = Task(data, paragraphs=paragraphs)
        self.task.check(videos, recipe.captioner)
        if start:
            self.vocabulary, self.captioner = start.vocabulary, start.captioner
        else:
            self.vocabulary = vocabulary_for(self.task.sentences(train), data)
            self.captioner = fresh_captioner(recipe, store.header, self.vocabulary, value_width)
        self.captioner.function_words = self.vocabulary.function_words
        views = views_of([v.id for v in videos], store.ids()) if views is None else views
        examples = self.task.examples(train, self.reader, self.vocabulary, views if data.views else NO_VIEWS)
        if not examples:
            raise DataError(f"no training caption has 1 to {data.max_words} words")
        self.validation = self.task.examples(self.val, self.reader, None)
        self.cider = self.task.cider(self.val)
        captioned = self.task.examples(self.val, self.reader, self.vocabulary)
        # no more captions at once than in training, so that validation needs no more memory
        micro_batch = -(-options.batch_size // options.accumulate)
        validation = self.task.validation_batches(captioned, micro_batch)
        self.validation_plans = list(validation.epoch(0)) if captioned else []
        if isinstance(self.captioner.standardise, Standardise) and not start:
            frames = (example.segments if paragraphs else [example.frames] for example in examples)
            self.captioner.standardise.fit(clip for clips in frames for clip in clips)
        self.captioner.to(self.device)
        self.bf16 = wants_bf16(options.precision, self.device, self.captioner)
        self.objective: CrossEntropy | SelfCritical
        processes = (self.accelerator, self.device)
        if start:
            references = {video.id: list(video.captions) for video in train}
            self.objective = SelfCritical(
                recipe, self.vocabulary, self.captioner, examples, references, *processes
            )
        else:
            self.objective = CrossEntropy(recipe, self.task, self.captioner, examples, *processes)
        self.batches = self.objective.batches
        self.loss = self.accelerator.prepare_model(self.objective.loss, device_placement=False)
        self.optimizer = OPTIMIZERS[options.optimizer](self.captioner, options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, learning_rate_factor(options, options.epochs * len(self.batches))
        )
        self.average = AveragedWeights(self.captioner, options.average) if options.average else None
        torch.manual_seed(torch.initial_seed() + self.accelerator.process_index)  # of each process's dropout
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # since the last sync
        self.state = folder / LAST / STATE
        self.progress = self._load_state() if resume and self.state.exists() else Progress()

    def _identity(self) -> dict[str, Any]:
        """Return what a resumed run must agree with: recipe, data and the captioner to fine-tune."""
        options = self.recipe.to_dict()
        # the other schedules have set the learning rate by the number of epochs
        free = FREE | ({"epochs"} if self.recipe.training.schedule == "constant" else set())
        for section in ("training", "self_critical"):
            options[section] = {k: v for k, v in options[section].items() if k not in free}
        names = [*self.vocabulary.words, *(video.id for video in self.videos), self.store.header.to_json()]
        data = "\n".join([*names, str(self.batches.captions)])
        identity = {"recipe": options, "data": hashlib.sha256(data.encode()).hexdigest()}
        return {**identity, "start": self.start.info} if self.start else identity

    def _save_state(self) -> None:
        """Save everything that the next step depends on, atomically; a collective call."""
        note = {
            "format": STATE_FORMAT,
            "run": self._identity(),
            "progress": asdict(self.progress),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "steps": self.schedule.last_epoch,
            "averaged": self.average.steps if self.average else 0,
        }
        tensors = {f"module.{name}": tensor for name, tensor in self.captioner.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in moments.items()}
        weights = self.average.weights if self.average else ()
        tensors |= {f"average.{number}": weight for number, weight in enumerate(weights)}
        generators = {"cpu": torch.get_rng_state()}  # of dropout; they differ between processes
        if self.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.device)
        for name, state in generators.items():  # (processes, bytes)
            tensors[f"generators.{name}"] = self.accelerator.gather(state.unsqueeze(0).to(self.device))
        if self.main:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            self.state.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.state) as temporary:
                save_file(tensors, temporary, metadata={"capvid": json.dumps(note)})

    def _load_state(self) -> Progress:
        """Restore the saved state and return the progress."""
        with run_folder.resuming(self.state, "state"):
            open_regular(self.state).close()
            with safe_open(self.state, "pt") as file:
                note = parse_json((file.metadata() or {})["capvid"])
            if note["format"] != STATE_FORMAT:
                raise ValueError(f"format {note['format']}")
            run_folder.check_identity(self.state, "the state of a run", note["run"], self._identity())
            self._restore(load_file(self.state), note)
            return Progress.from_dict(note["progress"])

    def _restore(self, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Restore weights, optimizer, schedule, average and random numbers."""
        groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            group, _, key = name.partition(".")
            groups[group][key] = tensor
        self.captioner.load_state_dict(groups["module"])
        state = self.optimizer.state_dict()
        state["state"] = {}
        weights = [weight for options in self.optimizer.param_groups for weight in options["params"]]
        for name, tensor in groups["optimizer"].items():
            number, _, key = name.partition(".")
            if tensor.shape not in (weights[int(number)].shape, ()):
                raise ValueError(f"optimizer.{name} is of another shape than its weight")
            state["state"].setdefault(int(number), {})[key] = tensor
        for options, rate in zip(state["param_groups"], note["rates"], strict=True):
            options["lr"] = rate
        self.optimizer.load_state_dict(state)
        self.schedule.last_epoch = note["steps"]
        self.schedule._last_lr = list(note["rates"])
        if self.average:
            for index, weight in enumerate(self.average.weights):
                weight.copy_(groups["average"][str(index)])
            self.average.steps = note["averaged"]
        rank, generators = self.accelerator.process_index, groups["generators"]
        if rank < len(generators["cpu"]):  # else it was saved by fewer processes
            torch.set_rng_state(generators["cpu"][rank].clone())
            if self.device.type == "cuda" and "cuda" in generators:
                torch.cuda.set_rng_state(generators["cuda"][rank].clone(), self.device)

    @property
    def over(self) -> bool:
        """Whether no epoch is left to train."""
        options, progress = self.recipe.training, self.progress
        waited = progress.epoch - 1 - progress.best.epoch if progress.best else 0
        return progress.epoch > options.epochs or waited >= options.patience

    def run(self) -> tuple[EpochResult, Evaluation | None]:
        """Train to the end; return the best epoch, and its scores on the test split if there is one."""
        with self._saving():
            self._begin()
        count = len({example.id for example in self.batches.examples})
        self.reporter.started(
            captions=self.batches.captions,
            videos=count,
            views=len(self.batches.examples) - count,
            validation=len(self.validation),
            words=len(self.vocabulary) - len(SPECIAL),
            min_count=self.recipe.data.min_count,
            batches=len(self.batches),
            epoch=self.progress.epoch,
            batch=self.progress.batch,
        )
        while not self.over:
            self._run_epoch()
        best = self.progress.best
        assert best is not None
        if not self.main:
            return best, None
        with self._saving():
            decoding = self.recipe.decoding
            uncalibrated = calibrate_run(self.folder, self.val, self.store, decoding)
            test = evaluate_run(self.folder, self.test, self.store, decoding) if self.test else None
            run_folder.end(self.folder, self.progress, uncalibrated=uncalibrated)
        self.reporter.finished(best, test.scores if test else {})
        return best, test

    def _begin(self) -> None:
        """Write the record of the run, and validate the captioner that is fine-tuned."""
        progress = self.progress
        if self.main:
            atomic_write_text(self.folder / "recipe.json", json.dumps(self.recipe.to_dict(), indent=1))
            if progress.rows:  # of a resumed run, whose file somebody may have changed
                self._write_metrics()
            if not self.over:
                header = self.store.header
                run_folder.begin(
                    self.folder, self.recipe, self.videos, self.vocabulary, header, self.device, progress
                )
        if progress == Progress():
            self.state.unlink(missing_ok=True)  # of a run that is overwritten
            if self.start:
                cider, samples = self._validate()
                self._save("best", 0, cider)
                progress.best = EpochResult(0, 0.0, None, cider, True, 0.0, 0.0, samples)

    def _write_metrics(self) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in self.progress.rows)
        atomic_write_text(self.folder / "metrics.jsonl", lines)

    def _run_epoch(self) -> None:
        """Train the rest of an epoch, validate, and save log, checkpoints and state."""
        start, progress = time.monotonic(), self.progress
        speed, waited = self._train()
        if self.average:
            self.average.swap(self.captioner)
        with self._memory(f"the validation of epoch {progress.epoch}"):
            cider, samples = self._validate()
            val_loss = self._validation_loss()
        best = progress.best is None or cider > progress.best.cider
        with self._saving():
            for name in ("best", LAST) if best else (LAST,):
                self._save(name, progress.epoch, cider)
        if self.average:
            self.average.swap(self.captioner)
        result = EpochResult(
            epoch=progress.epoch,
            loss=progress.loss / progress.words,
            val_loss=val_loss,
            cider=cider,
            best=best,
            seconds=time.monotonic() - start,
            captions_per_second=speed,
            samples=samples,
            waited=waited,
        )
        progress.rows.append(result.record())
        progress.best = result if best else progress.best
        progress.epoch, progress.batch, progress.loss, progress.words = progress.epoch + 1, 0, 0.0, 0
        with self._saving():
            if self.main:
                self._write_metrics()
            self.reporter.finished_epoch(result)
            self._save_state()

    def _train(self) -> tuple[float, float]:
        """Train the rest of an epoch; return captions per second, and seconds of waiting for input."""
        progress, options = self.progress, self.recipe.training
        sync_every = 1 if self.device.type == "cpu" else SYNC_EVERY
        shards = shards_of(self.batches, progress.epoch, progress.batch, options.accumulate, self.accelerator)
        self.captioner.train()
        captions, waited = 0, 0.0
        start = saved = time.monotonic()
        while True:
            asked = time.monotonic()
            with self._memory(f"the reading of epoch {progress.epoch}"), self._reading():
                shard = next(shards, None)
            waited += time.monotonic() - asked
            if shard is None:
                return captions / (time.monotonic() - start), waited
            with self._memory(f"epoch {progress.epoch}, batch {shard.number}"):
                self._step(shard)
            captions += shard.captions
            if shard.number % RELEASE_EVERY == 0:
                release_memory()
            if shard.number % sync_every and shard.number < len(self.batches):
                continue
            if self._sync(save=time.monotonic() - saved > 60 * options.save_every):
                saved = time.monotonic()
            self.reporter.stepped(
                epoch=progress.epoch,
                batch=shard.number,
                loss=progress.loss / progress.words,
                captions_per_second=captions / (time.monotonic() - start),
                learning_rate=self.optimizer.param_groups[0]["lr"],
            )

    def _step(self, shard: Shard) -> None:
        """Learn from one batch."""
        progress, accelerator = self.progress, self.accelerator
        micro_batches = self.objective.micro_batches(shard, progress.epoch, bf16=self.bf16)
        self.optimizer.zero_grad(set_to_none=True)
        losses = torch.zeros_like(self.loss_sum)
        for number, (batch, weights) in enumerate(micro_batches.pairs, 1):
            last = number == len(micro_batches.pairs)  # exchange gradients once
            with nullcontext() if last else accelerator.no_sync(self.loss):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                    loss = self.loss(batch, weights)
                # gradients are averaged over the processes, while the loss is a sum
                accelerator.backward(loss * (accelerator.num_processes / micro_batches.divisor))
            losses += loss.detach()
        clip_gradients(self.captioner, self.recipe.training)
        self.optimizer.step()
        self.schedule.step()
        if self.average:
            self.average.update(self.captioner)
        self.loss_sum = self.loss_sum + (losses if micro_batches.logged is None else micro_batches.logged)
        progress.batch, progress.words = shard.number, progress.words + micro_batches.count

    def _sync(self, *, save: bool) -> bool:
        """Add the losses since the last call to the progress; save the state if the first process asks to.

        Raises:
            TrainingError: a loss was not finite.
        """
        progress, wish = self.progress, save and self.main
        report = torch.stack([self.loss_sum, torch.full_like(self.loss_sum, float(wish))])
        loss, wishes = self.accelerator.reduce(report).tolist()
        self.loss_sum = torch.zeros_like(self.loss_sum)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} in epoch {progress.epoch}, batch {progress.batch}; "
                f"{self._describe_best()}",
                remedy="lower training.learning_rate, or clip gradients with training.clip_norm",
                kind="diverged",
            )
        progress.loss += loss
        saved = wishes > 0 and progress.batch < len(self.batches)
        if saved:
            with self._saving():
                self._save_state()
        return saved

    def _validate(self) -> tuple[float, dict[str, Prediction]]:
        """Return CIDEr-D on the validation split, and a few of its captions."""
        shard = self.validation[self.accelerator.process_index :: self.accelerator.num_processes]
        predicted = self.task.predict(self.captioner, self.vocabulary, shard, self.recipe.decoding)
        predicted = gather_items(self.accelerator, predicted)
        captions = {example.id: predicted[example.id] for example in self.validation}
        return self.cider(captions), {e.id: captions[e.id] for e in self.validation[:SAMPLES]}

    @torch.inference_mode()
    def _validation_loss(self) -> float | None:
        """Return the mean negative log-likelihood of the words of the validation captions."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        loss = TeacherForcedLoss(self.captioner.eval(), label_smoothing=0.0)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for plan in self.validation_plans:
            total += loss(plan.part(rank, ranks)().to(self.device))
        words = sum(plan.words for plan in self.validation_plans)
        return float(self.accelerator.reduce(total)) / words if words else None

    def _save(self, name: str, epoch: int, cider: float) -> None:
        """Write a checkpoint into the folder ``name`` of the run."""
        if self.main:
            info = {**self.recipe.for_captioning(), "epoch": epoch, "val_cider": cider}
            half = self.recipe.training.stored == "float16"
            target = self.folder / name
            save_checkpoint(target, self.captioner, self.vocabulary, self.store.header, info, half=half)

    def _describe_best(self) -> str:
        """Describe the checkpoint on disk, for messages."""
        best = self.progress.best
        return f"{self.folder / 'best'} keeps epoch {best.epoch}" if best else "no epoch is kept yet"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Save the state if features cannot be read any more, and say how to continue."""
        try:
            yield
        except CapvidError as error:
            if self.accelerator.num_processes == 1:  # others would have to save theirs at the same time
                self._sync(save=True)
            raise TrainingError(
                f"{error.message}; {self._describe_best()}", remedy="bring it back and go on with --resume"
            ) from error

    @contextmanager
    def _memory(self, where: str) -> Iterator[None]:
        """Translate out-of-memory errors into a one-line message."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"out of memory in {where}; {self._describe_best()}",
                remedy="split batches with --set training.accumulate=2 or more, and --resume",
                kind="memory",
            ) from error

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Translate disk errors into a one-line message."""
        kept = self._describe_best()
        try:
            yield
        except (OSError, SafetensorError) as error:
            text = str(error).splitlines()[0]
            system = re.search(r"I/O error: (.*?)(?: \(os error \d+\))?$", text)  # safetensors' wording
            reason = getattr(error, "strerror", None) or (system[1] if system else text)
            raise TrainingError(
                f"{self.folder}: the run cannot be saved ({reason}); {kept}",
                remedy="make room, and go on with --resume",
            ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error reports a lack of memory, on the host or an accelerator."""
    texts = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "alloc_failed")
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return full or any(text in str(error).lower() for text in texts)


def split_of(videos: Sequence[CaptionedVideo], name: str) -> list[CaptionedVideo]:
    """Return the videos of a split, at least one."""
    members = [video for video in videos if video.split == name]
    if not members:
        raise DataError(f"no video of the data is in the {name} split", remedy="add some to the data")
    return members


def vocabulary_for(sentences: Sequence[Sequence[str]], data: DataOptions) -> Vocabulary:
    """Return the vocabulary of tokenized training ``sentences``, or of the captioner that ``data`` names."""
    if data.vocabulary:
        bundled = BUNDLED / data.vocabulary
        return load_checkpoint(bundled if holds_checkpoint(bundled) else Path(data.vocabulary)).vocabulary
    vocabulary = Vocabulary.build(sentences, min_count=data.min_count, max_size=data.max_vocabulary)
    if len(vocabulary) == len(SPECIAL):
        raise DataError(
            f"no word comes {data.min_count} times in the training captions", remedy="lower data.min_count"
        )
    return vocabulary


def fresh_captioner(
    recipe: Recipe, header: FeatureHeader, vocabulary: Vocabulary, value_width: int
) -> Captioner:
    """Return a captioner with initial weights, for features with ``header`` and the words of a vocabulary."""
    sizes = {"vocabulary_size": len(vocabulary), "feature_width": header.width, "locations": header.locations}
    if value_width:
        sizes["value_width"] = value_width
        config_class = CAPTIONERS[recipe.captioner].config_class
        if "value_width" not in {field.name for field in fields(config_class)}:
            raise UsageError(
                f"{recipe.captioner} has no values beside its features",
                remedy="leave out --values, or give the stream as --features",
            )
    captioner = build(recipe.captioner, {**sizes, **recipe.model})
    check_specificity(captioner, recipe.decoding)
    if limit := recipe.training.init_range:
        for parameter in captioner.parameters():
            torch.nn.init.uniform_(parameter, -limit, limit)
    if path := getattr(captioner.config, "word_vectors", ""):
        embedding: Any = captioner.embedding
        # Words without a vector begin as random ones of the MART authors.
        torch.nn.init.normal_(embedding.weight, std=0.4)
        for number, vector in read_word_vectors(Path(path), vocabulary, embedding.embedding_dim):
            embedding.weight.data[number] = torch.tensor(vector)
        # The weights hold the vectors now, and a published checkpoint must not name a local path.
        captioner.config = replace(captioner.config, word_vectors="")
    return captioner
