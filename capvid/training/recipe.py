"""Recipes: everything a training run depends on beside the data, as TOML."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from capvid.captioners import captioner_class
from capvid.decoding import DecodingOptions
from capvid.errors import RecipeError
from capvid.names import did_you_mean
from capvid.recipes import read_recipe, recipe_names
from capvid.training.distil.recipe import DistilRecipe, distil_recipe
from capvid.training.options import checked
from capvid.training.ranges import Space, check_model, checked_space

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is taken from the data set.

    Attributes:
        max_frames: frames per video; from longer ones as many are drawn at random in training, evenly spread
            otherwise.
        frames: which of them: spread (as above), or the first ones.
        frame_dropout: rate at which frames are left out in training; one at least stays.
        captions_per_video: captions, or paragraphs, drawn for each video per epoch, and as many for each
            view of it.
        views: whether augmented views of the training videos are learned from, where the features hold some.
        max_segments: segments per video at most, the first ones (paragraphs only; ``max_frames`` is then the
            number of frames per segment).
        max_words: the length of captions that are trained on.
        long_captions: what becomes of longer ones: drop or cut.
        min_count: words seen less often in the training captions are unknown.
        max_vocabulary: words kept at most, the most frequent ones.
        vocabulary: a trained captioner whose words are taken instead: a run's folder, or the name of one that
            comes with capvid.
    """

    max_frames: int = 28
    frames: str = "spread"
    frame_dropout: float = 0.0
    captions_per_video: int = 20
    views: bool = True
    max_segments: int = 12
    max_words: int = 30
    long_captions: str = "drop"
    min_count: int = 1
    max_vocabulary: int = 20_000
    vocabulary: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How the weights are learned.

    Attributes:
        optimizer: adam, adamw or adadelta.
        learning_rate: the highest one.
        beta1: of adam and adamw.
        beta2: of adam and adamw.
        schedule: constant; one-cycle: linear warm-up over ``warmup`` of all steps, then a cosine to 0;
            linear: the same, then a straight line to 0.
        warmup: share of all steps.
        epochs: at most.
        patience: epochs without a better validation CIDEr-D before stopping.
        batch_size: captions, of all processes together.
        accumulate: parts that a process takes its share of a batch in, one after another; more of them need
            less memory, and learn the same.
        weight_decay: decoupled for adamw, an L2 term for the others.
        label_smoothing: probability spread over the vocabulary.
        scheduled_sampling: rate at which input words are replaced by the captioner's own; it grows from 0 to
            this in the course of training.
        own_memory: whether the memory of a captioner of paragraphs is made, from the second epoch on, from
            the sentences that it writes itself, and each segment learns the sentence that repeats the least.
        init_range: all weights begin uniformly in [-value, value]; 0 leaves each layer its own beginning.
        clip_value: gradients are clipped to [-value, value] element by element; 0 leaves them.
        clip_norm: gradients are scaled to at most this norm; 0 leaves them.
        average: decay of the running average of the weights that is validated and saved; 0 saves the weights.
        stored: numbers in which checkpoints are stored, float32 or float16 (half the size).
        precision: fp32, bf16 (autocast), or auto (what accelerate was launched with, else bf16 where the
            processor multiplies it in hardware).
        save_every: minutes after which the state of a run is saved in the midst of an epoch.
        seed: of weights, batches and dropout.
    """

    optimizer: str = "adam"
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    schedule: str = "constant"
    warmup: float = 0.1
    epochs: int = 50
    patience: int = 10
    batch_size: int = 64
    accumulate: int = 1
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    scheduled_sampling: float = 0.0
    own_memory: bool = False
    init_range: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    average: float = 0.0
    stored: str = "float32"
    precision: str = "auto"
    save_every: float = 5.0
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class SelfCriticalOptions:
    """How a trained captioner is fine-tuned on CIDEr-D, with Adam.

    Attributes:
        learning_rate: it stays the same.
        epochs: at most.
        patience: epochs without a better validation CIDEr-D before stopping.
        batch_size: videos.
        samples: captions drawn for each of them.
        temperature: at which they are drawn, and made likelier.
        contrast: how much of a caption's mean CIDEr-D for other videos is subtracted from that for its own.
    """

    learning_rate: float = 1e-4
    epochs: int = 5
    patience: int = 5
    batch_size: int = 64
    samples: int = 5
    temperature: float = 0.7
    contrast: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A captioner with its options, and what a search draws some of them from."""

    name: str
    captioner: str
    description: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    data: DataOptions = field(default_factory=DataOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    self_critical: SelfCriticalOptions = field(default_factory=SelfCriticalOptions)
    search: Space = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All values, as they are saved with a run, which does not depend on ``search``."""
        return {name: value for name, value in asdict(self).items() if name != "search"}

    def for_captioning(self) -> dict[str, Any]:
        """What a checkpoint must know of the recipe."""
        return {
            "recipe": self.name,
            "max_frames": self.data.max_frames,
            "frames": self.data.frames,
            "max_segments": self.data.max_segments,
            "decoding": asdict(self.decoding),
        }


_SHARES = {  # options that are at most 1
    "data": {"frame_dropout"},
    "training": {"average", "label_smoothing", "scheduled_sampling", "warmup"},
}
_SECTIONS: dict[str, type] = {
    "data": DataOptions,
    "training": TrainingOptions,
    "decoding": DecodingOptions,
    "self_critical": SelfCriticalOptions,
}
_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "data": {"frames": ("spread", "first"), "long_captions": ("drop", "cut")},
    "training": {
        "optimizer": ("adam", "adamw", "adadelta"),
        "schedule": ("constant", "one-cycle", "linear"),
        "stored": ("float32", "float16"),
        "precision": ("auto", "fp32", "bf16"),
    },
}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe | DistilRecipe:
    """A recipe by name or from a ``.toml`` file, with ``section.key=value`` overrides.

    It trains a captioner, or distils a backbone.

    Raises:
        RecipeError: no such recipe, or a value that does not fit.
    """
    if name.endswith(".toml"):
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"{path}: the recipe cannot be read ({error.strerror})") from error
        stem = path.stem
    else:
        if name not in recipe_names():
            meant = did_you_mean(name, recipe_names()) or (
                f"choose {', '.join(recipe_names())}, or give a .toml file"
            )
            raise RecipeError(f"{name}: no such recipe", remedy=meant)
        text = read_recipe(name)
        stem = name
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{name}: not valid TOML ({error})") from error
    for override in overrides:
        _set(values, override)
    return distil_recipe(stem, values) if "backbone" in values else _recipe(stem, values)


def _set(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, option = key.strip().partition(".")
    if not equals or not dot or section not in (*_SECTIONS, "model", "search"):
        raise RecipeError(
            f"--set {override}: not understood",
            remedy="write model|data|training|decoding|self_critical.KEY=VALUE, or search.SECTION.KEY=[A, B]",
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    values.setdefault(section, {})[option] = value


def _recipe(name: str, values: Mapping[str, Any]) -> Recipe:
    if not isinstance(values.get("captioner"), str):
        raise RecipeError(f"{name}: the recipe names no captioner", remedy='write captioner = "m3", say')
    unknown = set(values) - {"captioner", "description", "model", "search", *_SECTIONS}
    if unknown:
        raise RecipeError(f"{name}: unknown in a recipe: {', '.join(sorted(unknown))}")
    sections = {
        section: cls(**_checked(section, section, values.get(section, {})))
        for section, cls in _SECTIONS.items()
    }
    captioner, model = values["captioner"], dict(values.get("model", {}))
    if sections["training"].own_memory and not captioner_class(captioner).paragraphs:
        raise RecipeError(
            f"training.own_memory = true: {captioner} writes single captions, and has none to remember",
            remedy="choose a captioner of paragraphs, such as mart",
        )

    def drawn(section: str, option: str, value: Any) -> Any:
        if section == "model":
            return check_model(captioner, model, option, value)
        return _checked(section, f"search.{section}", {option: value})[option]

    return Recipe(
        name=name,
        captioner=captioner,
        description=values.get("description", ""),
        model=model,
        search=checked_space(values.get("search", {}), drawn),
        **sections,
    )


def _checked(section: str, said: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section, which messages call ``said``, if they fit."""
    cls, choices = _SECTIONS[section], _CHOICES.get(section, {})
    chosen = checked(cls, said, values, choices=choices, may_be_zero=_may_be_zero(cls))
    for option in _SHARES.get(section, set()) & set(chosen):
        if chosen[option] > 1:
            raise RecipeError(f"{said}.{option} = {chosen[option]}: must be at most 1")
    return chosen


def _may_be_zero(cls: type) -> set[str]:
    """Options that may be 0: seeds, numbers that need not be whole, and those that are 0 by default."""
    return {
        option.name
        for option in fields(cls)
        if option.type == "float" or option.default == 0 or option.name == "seed"
    }
