"""From files on the disk to a distillation ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch

from capvid.data.captions import CaptionedVideo
from capvid.errors import DataError
from capvid.features.backbones import untrained
from capvid.features.registry import BackboneEntry, Preprocess, backbone_entry
from capvid.features.store import FeatureStore
from capvid.features.student import Student
from capvid.training.distil.beginning import begin, known_network
from capvid.training.distil.consistent import View, make_view
from capvid.training.distil.lessons import Lessons, TeacherLoss
from capvid.training.distil.loop import DistilData, Distiller, DistilReporter, Shown
from capvid.training.distil.pictures import (
    Picture,
    find_pictures,
    picture_array,
    picture_size,
    plain_name,
)
from capvid.training.distil.recipe import DistilRecipe
from capvid.training.distil.targets import (
    caption_words,
    class_head,
    given_features,
    teacher_features,
    video_of,
)

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
    student, lessons = untrained(entry), _lessons(recipe, inputs, data, entry)
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
    """The losses of all teachers and of the words, in units of the pictures to learn from."""
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
