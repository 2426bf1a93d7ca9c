"""What a training run begins with: its splits, a seed, its words, and a fresh captioner."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from capvid.bundled import FOLDER
from capvid.captioners import Captioner, build, captioner_class
from capvid.captioners.checkpoint import holds_checkpoint, load_checkpoint
from capvid.data.captions import CaptionedVideo
from capvid.decoding.specificity import check_specificity
from capvid.errors import DataError, UsageError
from capvid.features.file import FeatureHeader
from capvid.text.vocabulary import SPECIAL, Vocabulary
from capvid.training.recipe import DataOptions, Recipe


def split_of(videos: Sequence[CaptionedVideo], name: str) -> list[CaptionedVideo]:
    """The videos of a split.

    Raises:
        DataError: there are none.
    """
    found = [video for video in videos if video.split == name]
    if not found:
        raise DataError(f"no video of the data is in the {name} split", remedy="add some to the data")
    return found


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def vocabulary_for(sentences: Iterable[Sequence[str]], data: DataOptions) -> Vocabulary:
    """The words of tokenised training ``sentences`` that ``data`` keeps, or those of the captioner it names.

    Raises:
        DataError: no word is kept.
        CheckpointError: the captioner is not there, or damaged.
    """
    if data.vocabulary:
        bundled = FOLDER / data.vocabulary
        return load_checkpoint(bundled if holds_checkpoint(bundled) else Path(data.vocabulary)).vocabulary
    found = Vocabulary.build(sentences, min_count=data.min_count, max_size=data.max_vocabulary)
    if len(found) == len(SPECIAL):
        raise DataError(
            f"no word comes {data.min_count} times in the training captions", remedy="lower data.min_count"
        )
    return found


def fresh_captioner(recipe: Recipe, header: FeatureHeader, words: int, value_width: int) -> Captioner:
    """A captioner for such features, its weights as the recipe wants them at the beginning.

    Args:
        recipe: what to train.
        header: of the features.
        words: in the vocabulary.
        value_width: of the features, the last columns that are a captioner's values, not keys.

    Raises:
        UsageError: the captioner cannot be made for such features, or not be validated as the recipe wants.
    """
    sizes = {"vocabulary_size": words, "feature_width": header.width, "locations": header.locations}
    if value_width:
        sizes["value_width"] = value_width
        kind = captioner_class(recipe.captioner)
        if "value_width" not in {field.name for field in fields(kind.config_class)}:
            raise UsageError(
                f"{recipe.captioner} has no values beside its features",
                remedy="leave out --values, or give the stream as --features",
            )
    captioner = build(recipe.captioner, {**sizes, **recipe.model})
    check_specificity(captioner, recipe.decoding)
    limit = recipe.training.init_range
    if limit:
        for parameter in captioner.parameters():
            torch.nn.init.uniform_(parameter, -limit, limit)
    return captioner
