"""Recipes of distillation: which student, which teachers, how."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capvid.errors import RecipeError, UsageError
from capvid.training.recipe import recipe_values
from capvid.utils.validation import bounded, checked_fields, choice, short


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """A teacher, and how much it counts.

    Attributes:
        layer: whose features the student is to tell.
        head: the tensors' names of the fully connected layers that lead from there to the class scores, with
            ReLU between them; none leaves the class distribution out.
        features: weight of the squared error of the features, each in units of its standard deviation.
        classes: weight of the divergence of the class distributions.
    """

    layer: str
    head: tuple[str, ...] = ()
    features: float = bounded(1.0, minimum=0, maximum=1e6)
    classes: float = bounded(0.5, minimum=0, maximum=1e6)


@dataclass(frozen=True, kw_only=True)
class DistilOptions:
    """How the student is trained.

    Attributes:
        words: most frequent words of the captions that the student learns to tell; 0 for none.
        word_weight: weight of that loss.
        temperature: by which class scores are divided.
        least_area: least share of the picture that an augmented view shows, where there are no ``views``, and
            that batch normalisation is measured on, where the student begins with known weights.
        views: views of each picture about which the teachers are asked, beside the whole; 0 for none.
        learning_rate: the highest one, of AdamW; one cycle over all epochs.
        warmup: share of all steps in which it rises.
        epochs: passes over the pictures.
        batch_size: pictures.
        weight_decay: of convolutions and fully connected layers.
        average: decay of the running average of the weights, which is validated and kept.
        precision: fp32, bf16, or auto (bf16 where the processor multiplies it in hardware).
        seed: of weights and views.
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

    ``begin`` names the backbone with whose weights it begins; without, it learns from scratch.
    """

    name: str
    backbone: str
    teachers: Mapping[str, TeacherOptions]
    training: DistilOptions
    begin: str | None = None
    description: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All values, as they are saved with a run."""
        return asdict(self)


def load_distil_recipe(name: str, overrides: Sequence[str] = ()) -> DistilRecipe:
    """Read a recipe of this folder by name, or any ``.toml`` file, with ``section.key=value`` overrides.

    Raises:
        RecipeError: no such recipe, or a value that does not fit.
    """
    path = Path(name if name.endswith(".toml") else Path(__file__).with_name(f"{name}.toml"))
    values = recipe_values(str(path), overrides)
    if "backbone" not in values:
        raise RecipeError(f"{name}: the recipe names no backbone", remedy='write backbone = "capvid-small"')
    return distil_recipe(path.stem, values)


def distil_recipe(name: str, values: Mapping[str, Any]) -> DistilRecipe:
    """Make a recipe of the tables of a TOML file.

    Raises:
        RecipeError: a table or value that does not fit.
    """
    unknown = set(values) - {"backbone", "begin", "description", "teachers", "training"}
    if unknown:
        raise RecipeError(f"{name}: unknown in a distillation recipe: {', '.join(sorted(unknown))}")
    if not isinstance(values.get("teachers", {}), Mapping):
        raise RecipeError(f"{name}: teachers must be a table, got {short(values['teachers'])}")
    teachers = {
        teacher: TeacherOptions(**_checked(TeacherOptions, f"teachers.{teacher}", table))
        for teacher, table in values.get("teachers", {}).items()
    }
    if not teachers:
        raise RecipeError(f"{name}: the recipe names no teacher", remedy="add a table [teachers.googlenet]")
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
        raise RecipeError(f"{section} must be a table, got {short(values)}")
    try:
        chosen = checked_fields(cls, values, prefix=f"{section}.")
    except UsageError as error:
        raise RecipeError(error.message, remedy=error.remedy) from error
    if cls is TeacherOptions and "layer" not in chosen:
        raise RecipeError(f"{section}: names no layer")
    return chosen
