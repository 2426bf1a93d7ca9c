"""The loop of distillation: epochs, validation, resume.

Notation for tensor shapes: N pictures, B of a batch.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from capvid.backbones.capvid_small import Student
from capvid.backbones.catalog import BackboneEntry, Preprocess, backbone_entry, build_network
from capvid.backbones.preprocessing import normalise
from capvid.datasets.dataset import CaptionedVideo
from capvid.errors import CheckpointError, DataError, DivergedError, RecipeError
from capvid.features.feature_store import FeatureStore
from capvid.training.optimization import AveragedWeights, one_cycle, wants_bf16
from capvid.utils.files import atomic_path, atomic_write_text, open_regular
from capvid.utils.validation import parse_json
from distillation.pictures import (
    Picture,
    View,
    find_pictures,
    make_view,
    picture_array,
    picture_size,
    plain_name,
    views,
    whole,
)
from distillation.recipe import DistilRecipe
from distillation.student import begin, fast_depthwise, known_network
from distillation.targets import (
    DistilData,
    Lesson,
    Lessons,
    Shown,
    TeacherLoss,
    caption_words,
    class_head,
    given_features,
    teacher_features,
    video_of,
)

STATE = "state.safetensors"
CLIP_NORM = 5.0
# least share of a whole picture and of a view that is shown where there are views: so little is cut off that
# what the teachers saw still holds
WHOLE_AREA, VIEW_AREA = 0.8, 0.9
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class DistilReporter(Protocol):
    """Is told how distillation goes on."""

    def started(self, *, pictures: int, validation: int, batches: int, epoch: int) -> None:
        """Training begins with ``epoch``."""

    def stepped(self, *, epoch: int, batch: int, loss: float, pictures_per_second: float) -> None:
        """One batch is done."""

    def finished_epoch(self, record: Mapping[str, Any]) -> None:
        """One epoch is done, validated and saved."""


class Distiller:
    """Trains a backbone to tell what its teachers see.

    The folder gets ``recipe.json``, ``metrics.jsonl``, ``state.safetensors`` after each epoch, from which
    ``resume`` goes on, and at the end the averaged weights in half precision under the backbone's file name.

    Raises:
        CheckpointError: ``resume`` is asked for and the folder holds no state of this recipe and data.
        DataError: fewer pictures than a batch takes.
    """

    def __init__(
        self,
        recipe: DistilRecipe,
        *,
        student: nn.Module,
        entry: BackboneEntry,
        lessons: Lessons,
        data: DistilData,
        folder: Path,
        device: torch.device,
        reporter: DistilReporter,
        resume: bool = False,
    ) -> None:
        self.recipe, self.data, self.folder, self.reporter = recipe, data, folder, reporter
        self.entry, self.student = entry, student.to(memory_format=torch.channels_last)
        self.model = nn.ModuleDict({"student": self.student, "lessons": lessons}).to(device)
        self.device = device
        self.lessons = lessons
        options = recipe.training
        learned = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in learned if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in learned if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, fused=True)
        self.batches = len(data.train) // options.batch_size
        if not self.batches:
            raise DataError(
                f"{len(data.train)} pictures to learn from do not fill a batch of {options.batch_size}",
                remedy="give more, or --set training.batch_size=8, say",
            )
        self.factor = one_cycle(options.warmup, options.epochs * self.batches)
        self.average = AveragedWeights(self.model, options.average)
        self.bf16 = wants_bf16(options.precision, device, self.student)
        self.epoch, self.step = 0, 0
        self.log: list[str] = []
        if resume:
            self._resume()

    def run(self) -> dict[str, Any]:
        """Train to the end and keep the backbone; returns the last epoch's record, empty if none was left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.folder / "recipe.json", json.dumps(self.recipe.to_dict(), indent=1))
        options = self.recipe.training
        self.reporter.started(
            pictures=len(self.data.train),
            validation=len(self.data.val),
            batches=self.batches,
            epoch=self.epoch + 1,
        )
        record: dict[str, Any] = {}
        while self.epoch < options.epochs:
            self.epoch += 1
            start = time.monotonic()
            loss = self._train()
            self.average.swap(self.model)
            record = {"epoch": self.epoch, "loss": loss, **self._validate()}
            self.average.swap(self.model)
            record["seconds"] = round(time.monotonic() - start, 1)
            self.log.append(json.dumps(record))
            self._save()
            self.reporter.finished_epoch(record)
        self.average.swap(self.model)
        self._export()
        self.average.swap(self.model)
        return record

    def _train(self) -> float:
        options = self.recipe.training
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + self.epoch)
        order = self.data.train[torch.randperm(len(self.data.train), generator=generator)]
        self.model.train()
        total, taken, start = 0.0, 0, time.monotonic()
        for number, rows in enumerate(
            order[: self.batches * options.batch_size].split(options.batch_size), 1
        ):
            loss = self._step(rows.sort().values, generator)  # neighbours on the disk together
            if math.isfinite(loss):
                total, taken = total + loss, taken + 1
            speed = number * options.batch_size / (time.monotonic() - start)
            self.reporter.stepped(
                epoch=self.epoch, batch=number, loss=total / max(1, taken), pictures_per_second=speed
            )
        if not taken:
            raise DivergedError(
                f"no batch of epoch {self.epoch} has a finite loss", remedy="lower training.learning_rate"
            )
        return total / taken

    def _step(self, rows: Tensor, generator: torch.Generator) -> float:
        """Learn from a batch; the weights stay as they are if a gradient is not finite. Returns the loss."""
        fast: AbstractContextManager[None] = nullcontext()
        if self.bf16 and self.device.type == "cpu":
            fast = fast_depthwise(self.student, generator)
        with fast:
            loss, _ = self._loss(*self._seen(rows, generator), rows)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.training.learning_rate * self.factor(self.step)
        self.step += 1
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
            self.average.update(self.model)
        return float(loss.detach())

    def _seen(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Shown]:
        """Return the images of a batch, (B, 3, h, w) from 0 to 255, and their pictures or views."""
        shown, least_area = self.data.shown[0], self.recipe.training.least_area
        if len(self.data.shown) > 1:
            kind = int(torch.randint(len(self.data.shown), (), generator=generator))
            shown, least_area = self.data.shown[kind], VIEW_AREA if kind else WHOLE_AREA
        size = picture_size(self.entry.preprocess)
        seen = views(self._pictures(shown, rows), size, least_area=least_area, generator=generator)
        return seen, shown

    def _pictures(self, shown: Shown, rows: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) uint8 on the device."""
        return torch.from_numpy(shown.pictures[rows.numpy()]).to(self.device)

    def _loss(self, pictures: Tensor, shown: Shown, rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of pictures (B, 3, h, w) from 0 to 255, the rows (B,) of what is shown."""
        inputs = normalise(pictures, self.entry.preprocess)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            embedding = self.student(inputs)
        words = self.data.words
        lesson = Lesson(
            {
                name: values[rows].to(self.device).float().clamp_min(0)
                for name, values in shown.features.items()
            },
            torch.from_numpy(words.shares[rows.numpy()]).to(self.device).float(),
            torch.from_numpy(words.known[rows.numpy()]).to(self.device),
        )
        return self.lessons(embedding.float(), lesson)

    @torch.inference_mode()
    def _validate(self) -> dict[str, float]:
        """Mean of each part of the loss over the validation pictures, seen whole."""
        size = picture_size(self.entry.preprocess)
        self.model.eval()
        sums: dict[str, float] = defaultdict(float)
        for rows in self.data.val.split(self.recipe.training.batch_size):
            shown = self.data.shown[0]
            _, parts = self._loss(whole(self._pictures(shown, rows), size), shown, rows)
            for name, value in parts.items():
                sums[f"val_{name}"] += value * len(rows)
        return {name: value / len(self.data.val) for name, value in sums.items()}

    def _export(self) -> None:
        tensors = {
            name: (tensor.half() if tensor.is_floating_point() else tensor).cpu().contiguous()
            for name, tensor in self.student.state_dict().items()
        }
        with atomic_path(self.folder / self.entry.file) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})

    def _save(self) -> None:
        """Keep everything that the next epoch depends on."""
        learned = [p for p in self.model.parameters() if p.requires_grad]
        tensors = {f"model.{name}": t.contiguous() for name, t in self.model.state_dict().items()}
        tensors |= {f"average.{n}": t.contiguous() for n, t in enumerate(self.average.weights)}
        for number, parameter in enumerate(learned):
            kept = self.optimizer.state[parameter]
            tensors |= {f"{key}.{number}": kept[key].contiguous() for key in MOMENTS}
        counts = {"epoch": self.epoch, "step": self.step, "averaged": self.average.steps}
        note = {"recipe": self._recipe(), **{name: str(count) for name, count in counts.items()}}
        with atomic_path(self.folder / STATE) as temporary:
            save_file(tensors, temporary, metadata=note)
        atomic_write_text(self.folder / "metrics.jsonl", "\n".join(self.log) + "\n")

    def _recipe(self) -> str:
        return json.dumps(self.recipe.to_dict())

    def _resume(self) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.folder / STATE
        try:
            open_regular(path).close()
            with safe_open(path, "pt") as file:
                note = file.metadata() or {}
            tensors = load_file(path)
            recipe, self.epoch, self.step = parse_json(note["recipe"]), int(note["epoch"]), int(note["step"])
            self.average.steps = int(note["averaged"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: no state to resume from ({error})") from error
        if _but_epochs(recipe) != _but_epochs(json.loads(self._recipe())):
            raise CheckpointError(
                f"{path}: the state of another recipe",
                remedy="give the same recipe and --set; only training.epochs may differ",
            )
        try:
            self.model.load_state_dict({k[6:]: t for k, t in tensors.items() if k.startswith("model.")})
        except RuntimeError as error:
            raise CheckpointError(
                f"{path}: the state of a run on other data (tensors of other shapes)",
                remedy="give the data that it was begun with",
            ) from error
        for number, tensor in enumerate(self.average.weights):
            tensor.copy_(tensors[f"average.{number}"])
        for number, parameter in enumerate(p for p in self.model.parameters() if p.requires_grad):
            kept = {key: tensors[f"{key}.{number}"] for key in MOMENTS}
            for key in ("exp_avg", "exp_avg_sq"):  # laid out in memory as the parameter is
                kept[key] = torch.empty_like(parameter).copy_(kept[key])
            self.optimizer.state[parameter] = kept
        log = self.folder / "metrics.jsonl"  # may lag behind the state by an epoch
        self.log = log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def _but_epochs(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without its number of epochs, which may change when a run is resumed."""
    training = {key: value for key, value in recipe["training"].items() if key != "epochs"}
    return {**recipe, "training": training}


MARGIN = 1.125  # pictures are kept a little larger than the student sees them, to cut views from


class Progress(Protocol):
    """Is told how far the preparation of pictures or of a teacher's features is."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` pictures are done."""


@dataclass(frozen=True, kw_only=True)
class DistilInputs:
    """What a distillation learns from.

    Attributes:
        pictures: folders and zip files.
        videos: captions and splits of pictures (by name) or of the videos they are frames of.
        features: teachers' features that were computed before, each store with the streams of some videos.
        weights: folder with the teachers' weights; None looks where backbones' weights are always sought.
            Those that the student begins with are sought in both.
        workers: threads that decode pictures.
    """

    pictures: Sequence[Path]
    videos: Sequence[CaptionedVideo]
    features: Sequence[FeatureStore] = ()
    weights: Path | None = None
    workers: int = 2


def make_distiller(
    recipe: DistilRecipe,
    inputs: DistilInputs,
    *,
    folder: Path,
    device: torch.device,
    reporter: DistilReporter,
    progress: Progress = lambda what, done, total: None,
    resume: bool = False,
) -> Distiller:
    """Decode the pictures, compute what the teachers see of them, and build student and losses.

    Pictures, views and features are kept in ``folder / "cache"`` and found there again.

    Raises:
        DataError: pictures cannot be read, or there are none to learn from or to validate on.
        RecipeError: the student cannot begin with the weights named, or a teacher not see views.
        WeightsError: a teacher's weights, or those to begin with, are missing.
        CheckpointError: there is nothing to resume.
    """
    torch.manual_seed(recipe.training.seed)
    entry = backbone_entry(recipe.backbone)
    network = None if recipe.begin is None or resume else known_network(recipe, inputs.weights)
    if entry.kind != "capvid-small":
        raise RecipeError(f"{recipe.name}: backbone = {entry.name}: only capvid-small can be distilled")
    height, width = picture_size(entry.preprocess)
    stored = replace(entry.preprocess, size=(round(height * MARGIN), round(width * MARGIN)))
    cache = folder / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    pictures, train, val = _splits(find_pictures(inputs.pictures), inputs.videos)
    array = picture_array(
        pictures,
        stored,
        cache / "pictures.u8",
        workers=inputs.workers,
        progress=lambda done: progress("pictures", done, len(pictures)),
    )
    see = _Teachers(recipe, inputs, pictures, cache, device, progress)
    shown = [
        Shown(array, see.pictures()),
        *(see.view(k, entry.preprocess) for k in range(recipe.training.views)),
    ]
    captions = {plain_name(video.id): video.captions for video in inputs.videos if video.split != "test"}
    words = caption_words(pictures, captions, recipe.training.words)
    data = DistilData(shown, words, train, val)
    student, lessons = build_network(entry, entry.default_layer), _lessons(recipe, inputs, data, entry)
    if network is not None:
        begin(cast(Student, student), lessons, network, recipe=recipe, data=data, device=device)
    return Distiller(
        recipe,
        student=student,
        entry=entry,
        lessons=lessons,
        data=data,
        folder=folder,
        device=device,
        reporter=reporter,
        resume=resume,
    )


def _lessons(recipe: DistilRecipe, inputs: DistilInputs, data: DistilData, entry: BackboneEntry) -> Lessons:
    """Return the losses of all teachers and of the words, in units of the pictures to learn from."""
    embedding = entry.layers[entry.default_layer].width
    losses = {
        name: TeacherLoss(
            data.shown[0].features[name][data.train],
            class_head(name, options, inputs.weights),
            options,
            embedding=embedding,
            temperature=recipe.training.temperature,
        )
        for name, options in recipe.teachers.items()
    }
    return Lessons(
        losses,
        embedding=embedding,
        words=len(data.words.vocabulary),
        word_weight=recipe.training.word_weight,
    )


@dataclass(frozen=True)
class _Teachers:
    """What the teachers see, in features of each (N, D) float16: given, kept from before, or computed."""

    recipe: DistilRecipe
    inputs: DistilInputs
    all: Sequence[Picture]
    cache: Path
    device: torch.device
    progress: Progress

    def pictures(self) -> dict[str, torch.Tensor]:
        """In the whole pictures."""
        given = given_features(self.all, self.inputs.features)
        return {
            name: self._see(name, known=given.get(f"{backbone_entry(name).name}:{options.layer}", {}))
            for name, options in self.recipe.teachers.items()
        }

    def view(self, number: int, how: Preprocess) -> Shown:
        """In a view of each picture, that the student gets by ``how``."""
        view = make_view(
            self.all,
            number,
            how,
            self.cache / f"views-{number}.u8",
            workers=self.inputs.workers,
            progress=partial(self.progress, f"view {number}", total=len(self.all)),
        )
        return Shown(view.pictures, {name: self._see(name, view=view) for name in self.recipe.teachers})

    def _see(
        self, teacher: str, *, known: Mapping[int, np.ndarray] | None = None, view: View | None = None
    ) -> torch.Tensor:
        known = known or {}
        what = teacher if view is None else f"view {view.number}, {teacher}"
        file = teacher if view is None else f"views-{view.number}-{teacher}"
        values = teacher_features(
            self.all,
            teacher,
            self.recipe.teachers[teacher].layer,
            known=known,
            path=self.cache / f"{file}.safetensors",
            view=view,
            weights=self.inputs.weights,
            device=self.device,
            workers=self.inputs.workers,
            progress=partial(self.progress, what, total=len(self.all) - len(known)),
        )
        return torch.from_numpy(values)


def _splits(
    pictures: Sequence[Picture], videos: Sequence[CaptionedVideo]
) -> tuple[list[Picture], torch.Tensor, torch.Tensor]:
    """Leave out pictures of the test split; rows to learn from, rows to validate on.

    Pictures without captions are learned from.
    """
    split = {plain_name(video.id): video.split for video in videos}
    of = {
        picture.name: split.get(picture.name, split.get(video_of(picture.name), "train"))
        for picture in pictures
    }
    kept = [picture for picture in pictures if of[picture.name] != "test"]
    rows = {
        name: torch.tensor([row for row, p in enumerate(kept) if of[p.name] == name], dtype=torch.long)
        for name in ("train", "val")
    }
    for name, found in rows.items():
        if not len(found):
            raise DataError(
                f"no picture belongs to the {name} split", remedy="give its pictures and its data"
            )
    return kept, rows["train"], rows["val"]
