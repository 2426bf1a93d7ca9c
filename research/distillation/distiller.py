"""Training loop of the distillation: data preparation, epochs, validation and resuming.

Notation for tensor shapes: N images, B of a batch.
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
from capvid.errors import CheckpointError, DataError, TrainingError, UsageError
from capvid.features.feature_store import FeatureStore
from capvid.training.optimization import AveragedWeights, one_cycle, wants_bf16
from capvid.utils.files import atomic_path, atomic_write_text, open_regular
from capvid.utils.validation import parse_json
from distillation.images import (
    ImageSource,
    View,
    find_images,
    image_array,
    image_size,
    make_view,
    plain_name,
    random_views,
    resize_images,
)
from distillation.recipe import DistilRecipe
from distillation.student import fast_depthwise, initial_network, initialise
from distillation.targets import (
    BatchTargets,
    DistilData,
    DistillationLoss,
    Shown,
    TeacherLoss,
    caption_words,
    class_head,
    stored_features,
    teacher_features,
    video_of,
)

STATE = "state.safetensors"
CLIP_NORM = 5.0
# smallest share of an original image and of a view that the student sees if there are views: the crops lose
# so little that the teachers' targets still hold
WHOLE_AREA, VIEW_AREA = 0.8, 0.9
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class DistilReporter(Protocol):
    """Callbacks for the progress of a distillation."""

    def started(self, *, images: int, validation: int, batches: int, epoch: int) -> None:
        """Report the start of training at ``epoch``."""

    def stepped(self, *, epoch: int, batch: int, loss: float, images_per_second: float) -> None:
        """Report a finished batch."""

    def finished_epoch(self, record: Mapping[str, Any]) -> None:
        """Report an epoch that is trained, validated and saved."""


class Distiller:
    """Trainer of a backbone that predicts its teachers' features.

    The folder gets ``recipe.json``, ``metrics.jsonl``, ``state.safetensors`` after each epoch (to resume),
    and at the end the averaged weights in half precision under the backbone's file name.

    Raises:
        CheckpointError: ``resume`` is set and the folder holds no state of this recipe and data.
        DataError: fewer images than a batch.
    """

    def __init__(
        self,
        recipe: DistilRecipe,
        *,
        student: nn.Module,
        entry: BackboneEntry,
        lessons: DistillationLoss,
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
                f"{len(data.train)} training images do not fill a batch of {options.batch_size}",
                remedy="add images, or --set training.batch_size=8, say",
            )
        self.factor = one_cycle(options.warmup, options.epochs * self.batches)
        self.average = AveragedWeights(self.model, options.average)
        self.bf16 = wants_bf16(options.precision, device, self.student)
        self.epoch, self.step = 0, 0
        self.log: list[str] = []
        if resume:
            self._resume()

    def run(self) -> dict[str, Any]:
        """Train the remaining epochs, save the backbone and return the last record, empty if none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.folder / "recipe.json", json.dumps(self.recipe.to_dict(), indent=1))
        options = self.recipe.training
        self.reporter.started(
            images=len(self.data.train),
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
            loss = self._step(rows.sort().values, generator)  # sorted for sequential disk reads
            if math.isfinite(loss):
                total, taken = total + loss, taken + 1
            speed = number * options.batch_size / (time.monotonic() - start)
            self.reporter.stepped(
                epoch=self.epoch, batch=number, loss=total / max(1, taken), images_per_second=speed
            )
        if not taken:
            problem = f"no batch of epoch {self.epoch} has a finite loss"
            raise TrainingError(problem, remedy="lower training.learning_rate", kind="diverged")
        return total / taken

    def _step(self, rows: Tensor, generator: torch.Generator) -> float:
        """Take an optimizer step, skipped if a gradient is not finite, and return the loss."""
        fast: AbstractContextManager[None] = nullcontext()
        if self.bf16 and self.device.type == "cpu":
            fast = fast_depthwise(self.student, generator)
        with fast:
            loss, _ = self._loss(*self._augmented_batch(rows, generator), rows)
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

    def _augmented_batch(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Shown]:
        """Return augmented images (B, 3, h, w) from 0 to 255, and the view they come from."""
        shown, least_area = self.data.shown[0], self.recipe.training.least_area
        if len(self.data.shown) > 1:
            kind = int(torch.randint(len(self.data.shown), (), generator=generator))
            shown, least_area = self.data.shown[kind], VIEW_AREA if kind else WHOLE_AREA
        size = image_size(self.entry.preprocess)
        augmented = random_views(self._images(shown, rows), size, least_area=least_area, generator=generator)
        return augmented, shown

    def _images(self, shown: Shown, rows: Tensor) -> Tensor:
        """Return images (B, 3, H, W) uint8 on the device."""
        return torch.from_numpy(shown.images[rows.numpy()]).to(self.device)

    def _loss(self, images: Tensor, shown: Shown, rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of images (B, 3, h, w) from 0 to 255, rows (B,) of ``shown``."""
        inputs = normalise(images, self.entry.preprocess)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            embedding = self.student(inputs)
        words = self.data.words
        lesson = BatchTargets(
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
        """Return the mean of each loss term over the uncropped validation images."""
        size = image_size(self.entry.preprocess)
        self.model.eval()
        sums: dict[str, float] = defaultdict(float)
        for rows in self.data.val.split(self.recipe.training.batch_size):
            shown = self.data.shown[0]
            _, parts = self._loss(resize_images(self._images(shown, rows), size), shown, rows)
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
        """Save everything that the next epoch depends on."""
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
        if _without_epochs(recipe) != _without_epochs(json.loads(self._recipe())):
            raise CheckpointError(
                f"{path}: the state of another recipe",
                remedy="give the same recipe and --set; only training.epochs may differ",
            )
        try:
            self.model.load_state_dict({k[6:]: t for k, t in tensors.items() if k.startswith("model.")})
        except RuntimeError as error:
            raise CheckpointError(
                f"{path}: the state of a run on other data (tensors of other shapes)",
                remedy="use the data that the run was started with",
            ) from error
        for number, tensor in enumerate(self.average.weights):
            tensor.copy_(tensors[f"average.{number}"])
        for number, parameter in enumerate(p for p in self.model.parameters() if p.requires_grad):
            kept = {key: tensors[f"{key}.{number}"] for key in MOMENTS}
            for key in ("exp_avg", "exp_avg_sq"):  # same memory layout as the parameter
                kept[key] = torch.empty_like(parameter).copy_(kept[key])
            self.optimizer.state[parameter] = kept
        log = self.folder / "metrics.jsonl"  # may lag behind the state by an epoch
        self.log = log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def _without_epochs(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without its number of epochs, which may change when a run is resumed."""
    training = {key: value for key, value in recipe["training"].items() if key != "epochs"}
    return {**recipe, "training": training}


MARGIN = 1.125  # stored images are a little larger than the student's input, to allow random crops


class Progress(Protocol):
    """Callback for the preparation of images or of a teacher's features."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` images are prepared."""


@dataclass(frozen=True, kw_only=True)
class DistilInputs:
    """Inputs of a distillation.

    Attributes:
        images: folders and zip files.
        videos: captions and splits of images (by name) or of the videos they are frames of.
        features: precomputed teacher features; each store holds the streams of a set of videos.
        weights: folder with the teachers' weights; None searches the usual places. The student's
            initial weights are searched in both.
        workers: threads that decode images.
    """

    images: Sequence[Path]
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
    """Decode the images, compute the teachers' features, and build the student and the losses.

    Images, views and features are cached in ``folder / "cache"``.

    Raises:
        DataError: images cannot be read, or a split has none.
        UsageError: the student cannot start from the named weights, or a teacher does not accept views.
        WeightsError: a teacher's weights, or the student's initial weights, are missing.
        CheckpointError: there is nothing to resume.
    """
    torch.manual_seed(recipe.training.seed)
    entry = backbone_entry(recipe.backbone)
    network = None if recipe.begin is None or resume else initial_network(recipe, inputs.weights)
    if entry.kind != "capvid-small":
        raise UsageError(f"{recipe.name}: backbone = {entry.name}: only capvid-small can be distilled")
    height, width = image_size(entry.preprocess)
    stored = replace(entry.preprocess, size=(round(height * MARGIN), round(width * MARGIN)))
    cache = folder / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    images, train, val = _splits(find_images(inputs.images), inputs.videos)
    array = image_array(
        images,
        stored,
        cache / "pictures.u8",
        workers=inputs.workers,
        progress=lambda done: progress("images", done, len(images)),
    )
    see = _Teachers(recipe, inputs, images, cache, device, progress)
    shown = [
        Shown(array, see.images()),
        *(see.view(k, entry.preprocess) for k in range(recipe.training.views)),
    ]
    captions = {plain_name(video.id): video.captions for video in inputs.videos if video.split != "test"}
    words = caption_words(images, captions, recipe.training.words)
    data = DistilData(shown, words, train, val)
    student, lessons = build_network(entry, entry.default_layer), _lessons(recipe, inputs, data, entry)
    if network is not None:
        initialise(cast(Student, student), lessons, network, recipe=recipe, data=data, device=device)
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


def _lessons(
    recipe: DistilRecipe, inputs: DistilInputs, data: DistilData, entry: BackboneEntry
) -> DistillationLoss:
    """Return the losses of all teachers and of the words, standardised on the training split."""
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
    return DistillationLoss(
        losses,
        embedding=embedding,
        words=len(data.words.vocabulary),
        word_weight=recipe.training.word_weight,
    )


@dataclass(frozen=True)
class _Teachers:
    """Teacher features (N, D) float16: supplied, cached or computed."""

    recipe: DistilRecipe
    inputs: DistilInputs
    all: Sequence[ImageSource]
    cache: Path
    device: torch.device
    progress: Progress

    def images(self) -> dict[str, torch.Tensor]:
        """Return the features of the original images."""
        given = stored_features(self.all, self.inputs.features)
        return {
            name: self._features(name, known=given.get(f"{backbone_entry(name).name}:{options.layer}", {}))
            for name, options in self.recipe.teachers.items()
        }

    def view(self, number: int, how: Preprocess) -> Shown:
        """Return a view of each image, prepared for the student by ``how``, with its features."""
        view = make_view(
            self.all,
            number,
            how,
            self.cache / f"views-{number}.u8",
            workers=self.inputs.workers,
            progress=partial(self.progress, f"view {number}", total=len(self.all)),
        )
        return Shown(view.images, {name: self._features(name, view=view) for name in self.recipe.teachers})

    def _features(
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
    images: Sequence[ImageSource], videos: Sequence[CaptionedVideo]
) -> tuple[list[ImageSource], torch.Tensor, torch.Tensor]:
    """Return the images outside the test split, the training rows and the validation rows.

    Images without captions belong to the training split.
    """
    split = {plain_name(video.id): video.split for video in videos}
    of = {image.name: split.get(image.name, split.get(video_of(image.name), "train")) for image in images}
    kept = [image for image in images if of[image.name] != "test"]
    rows = {
        name: torch.tensor([row for row, p in enumerate(kept) if of[p.name] == name], dtype=torch.long)
        for name in ("train", "val")
    }
    for name, indices in rows.items():
        if not len(indices):
            raise DataError(f"no image belongs to the {name} split", remedy="give its images and its data")
    return kept, rows["train"], rows["val"]
