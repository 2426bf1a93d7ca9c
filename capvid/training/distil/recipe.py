"""Recipes of distillation: which student, which teachers, how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from capvid.errors import RecipeError
from capvid.training.options import checked


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
    features: float = 1.0
    classes: float = 0.5


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

    words: int = 1000
    word_weight: float = 0.05
    temperature: float = 2.0
    least_area: float = 0.4
    views: int = 0
    learning_rate: float = 3e-3
    warmup: float = 0.05
    epochs: int = 40
    batch_size: int = 128
    weight_decay: float = 0.05
    average: float = 0.999
    precision: str = "auto"
    seed: int = 1


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


def distil_recipe(name: str, values: Mapping[str, Any]) -> DistilRecipe:
    """Make a recipe of the tables of a TOML file.

    Raises:
        RecipeError: a table or value that does not fit.
    """
    unknown = set(values) - {"backbone", "begin", "description", "teachers", "training"}
    if unknown:
        raise RecipeError(f"{name}: unknown in a distillation recipe: {', '.join(sorted(unknown))}")
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


_CHOICES = {"precision": ("auto", "fp32", "bf16")}
_MAY_BE_ZERO = {
    "average",
    "classes",
    "features",
    "seed",
    "views",
    "warmup",
    "weight_decay",
    "word_weight",
    "words",
}


def _checked(cls: type, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    chosen = checked(cls, section, values, choices=_CHOICES, may_be_zero=_MAY_BE_ZERO)
    if cls is TeacherOptions and "layer" not in chosen:
        raise RecipeError(f"{section}: names no layer")
    return chosen
