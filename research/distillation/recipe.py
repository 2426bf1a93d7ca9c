"""Distillation recipes: student, teachers and options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capvid.errors import UsageError
from capvid.training.recipe import recipe_values
from capvid.utils.validation import bounded, checked_fields, choice, short


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """A teacher and the weights of its losses.

    Attributes:
        layer: layer whose features the student predicts.
        head: tensor names of the fully connected layers from there to the class scores, with ReLU between
            them; empty omits the class distribution.
        features: weight of the squared error of the features, in units of their standard deviations.
        classes: weight of the divergence of the class distributions.
    """

    layer: str
    head: tuple[str, ...] = ()
    features: float = bounded(1.0, minimum=0, maximum=1e6)
    classes: float = bounded(0.5, minimum=0, maximum=1e6)


@dataclass(frozen=True, kw_only=True)
class DistilOptions:
    """Training options of the student.

    Attributes:
        words: number of frequent caption words that the student predicts; 0 for none.
        word_weight: weight of the word loss.
        temperature: divisor of the class scores.
        least_area: smallest share of the image that an augmented view covers, if ``views`` is 0, and in the
            batches that re-estimate batch normalisation, if the student starts from pretrained weights.
        views: views of each image with teacher targets, besides the original; 0 for none.
        learning_rate: peak learning rate of AdamW; one cycle over all epochs.
        warmup: share of all steps in which the learning rate rises.
        epochs: passes over the images.
        batch_size: images per step.
        weight_decay: weight decay of convolutions and fully connected layers.
        average: decay of the running average of the weights, which are validated and saved.
        precision: fp32, bf16, or auto (bf16 if the processor multiplies it in hardware).
        seed: random seed for weights and views.
    """

    words: int = bounded(1000, minimum=0)
    word_weight: float = bounded(0.05, minimum=0, maximum=1e6)
    temperature: float = bounded(2.0, minimum=0.01, maximum=1000)
    least_area: float = bounded(0.4, minimum=0.01, maximum=1)
    views: int = bounded(0, minimum=0, maximum=1000)
    learning_rate: float = bounded(3e-3, minimum=1e-12, maximum=math.inf)
    warmup: float = bounded(0.05, minimum=0, maximum=1)
    epochs: int = 40
    batch_size: int = bounded(128, maximum=65_536)
    weight_decay: float = bounded(0.05, minimum=0, maximum=100)
    average: float = bounded(0.999, minimum=0, maximum=1)
    precision: str = choice("auto", "fp32", "bf16")
    seed: int = bounded(1, minimum=0, maximum=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class DistilRecipe:
    """A backbone to train, its teachers and options.

    ``begin`` names the backbone whose weights initialise it; None trains from scratch.
    """

    name: str
    backbone: str
    teachers: Mapping[str, TeacherOptions]
    training: DistilOptions
    begin: str | None = None
    description: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all values as saved with a run."""
        return asdict(self)


def load_distil_recipe(name: str, overrides: Sequence[str] = ()) -> DistilRecipe:
    """Read a recipe of this folder by name, or any ``.toml`` file, with ``section.key=value`` overrides.

    Raises:
        UsageError: no such recipe, or an invalid value.
    """
    path = Path(name if name.endswith(".toml") else Path(__file__).with_name(f"{name}.toml"))
    values = recipe_values(str(path), overrides)
    if "backbone" not in values:
        raise UsageError(f"{name}: the recipe names no backbone", remedy='write backbone = "capvid-small"')
    return distil_recipe(path.stem, values)


def distil_recipe(name: str, values: Mapping[str, Any]) -> DistilRecipe:
    """Build a recipe from the tables of a TOML file.

    Raises:
        UsageError: an invalid table or value.
    """
    unknown = set(values) - {"backbone", "begin", "description", "teachers", "training"}
    if unknown:
        raise UsageError(f"{name}: unknown in a distillation recipe: {', '.join(sorted(unknown))}")
    if not isinstance(values.get("teachers", {}), Mapping):
        raise UsageError(f"{name}: teachers must be a table, got {short(values['teachers'])}")
    teachers = {
        teacher: TeacherOptions(**_checked(TeacherOptions, f"teachers.{teacher}", table))
        for teacher, table in values.get("teachers", {}).items()
    }
    if not teachers:
        raise UsageError(f"{name}: the recipe names no teacher", remedy="add a table [teachers.googlenet]")
    training = DistilOptions(**_checked(DistilOptions, "training", values.get("training", {})))
    return DistilRecipe(
        name=name,
        backbone=str(values["backbone"]),
        teachers=teachers,
        training=training,
        begin=str(values["begin"]) if "begin" in values else None,
        description=str(values.get("description", "")),
    )


def _checked(cls: type, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise UsageError(f"{section} must be a table, got {short(values)}")
    chosen = checked_fields(cls, values, prefix=f"{section}.")
    if cls is TeacherOptions and "layer" not in chosen:
        raise UsageError(f"{section}: names no layer")
    return chosen
