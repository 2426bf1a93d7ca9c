"""From files on the disk to a distillation ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from capvid.data.captions import CaptionedVideo
from capvid.errors import DataError
from capvid.features.backbones import untrained
from capvid.features.registry import backbone_entry
from capvid.features.store import FeatureStore
from capvid.training.distil.lessons import Lessons, TeacherLoss
from capvid.training.distil.loop import DistilData, Distiller, DistilReporter
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

    Pictures and features are kept in ``folder / "cache"`` and found there again.

    Raises:
        DataError: pictures cannot be read, or there are none to learn from or to validate on.
        WeightsError: a teacher's weights are missing.
        CheckpointError: there is nothing to resume.
    """
    torch.manual_seed(recipe.training.seed)
    entry = backbone_entry(recipe.backbone)
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
    student = untrained(entry)
    embedding = entry.layers[entry.default_layer].width
    features = _teachers_see(recipe, inputs, pictures, cache, device, progress)
    losses = {
        name: TeacherLoss(
            features[name][train],
            class_head(name, options, inputs.weights),
            options,
            embedding=embedding,
            temperature=recipe.training.temperature,
        )
        for name, options in recipe.teachers.items()
    }
    captions = {plain_name(video.id): video.captions for video in inputs.videos if video.split != "test"}
    words = caption_words(pictures, captions, recipe.training.words)
    lessons = Lessons(
        losses,
        embedding=embedding,
        words=len(words.vocabulary),
        word_weight=recipe.training.word_weight,
    )
    return Distiller(
        recipe,
        student=student,
        entry=entry,
        lessons=lessons,
        data=DistilData(array, features, words, train, val),
        folder=folder,
        device=device,
        reporter=reporter,
        resume=resume,
    )


def _teachers_see(
    recipe: DistilRecipe,
    inputs: DistilInputs,
    pictures: Sequence[Picture],
    cache: Path,
    device: torch.device,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Each teacher's features of all pictures (N, D) float16: given, kept from before, or computed."""
    given = given_features(pictures, inputs.features)
    features = {}
    for name, options in recipe.teachers.items():
        known = given.get(f"{backbone_entry(name).name}:{options.layer}", {})
        values = teacher_features(
            pictures,
            name,
            options.layer,
            known=known,
            path=cache / f"{name}.safetensors",
            weights=inputs.weights,
            device=device,
            workers=inputs.workers,
            progress=partial(progress, name, total=len(pictures) - len(known)),
        )
        features[name] = torch.from_numpy(values)
    return features


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
