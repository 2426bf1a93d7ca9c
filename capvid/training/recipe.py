"""Recipes: everything a training run depends on beside the data, as TOML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from capvid.captioners import captioner_class, sketch
from capvid.decoding import DecodingOptions
from capvid.errors import RecipeError, UsageError
from capvid.fields import LARGEST, bounded, checked_fields, choice, short
from capvid.files import read_regular
from capvid.limits import MIB
from capvid.names import did_you_mean
from capvid.parsing import parse_toml
from capvid.recipes import read_recipe, recipe_names
from capvid.training.distil.recipe import DistilRecipe, distil_recipe
from capvid.training.ranges import SMALLEST, Space, check_model, checked_space

RECIPE_BYTES = 1 * MIB  # of a recipe file
_COPIES = 4  # of the weights in training: they, their gradients, and the optimizer's two moments
_SEEDS = 2**32 - 1


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

    max_frames: int = bounded(28, most=10_000)
    frames: str = choice("spread", "first")
    frame_dropout: float = bounded(0.0, least=0, most=1)
    captions_per_video: int = 20
    views: bool = True
    max_segments: int = 12
    max_words: int = 30
    long_captions: str = choice("drop", "cut")
    min_count: int = 1
    max_vocabulary: int = bounded(20_000, most=LARGEST - 4)
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

    optimizer: str = choice("adam", "adamw", "adadelta")
    learning_rate: float = bounded(1e-3, least=0, most=100)
    beta1: float = bounded(0.9, least=0, most=0.999999)
    beta2: float = bounded(0.999, least=0, most=0.999999)
    schedule: str = choice("constant", "one-cycle", "linear")
    warmup: float = bounded(0.1, least=0, most=1)
    epochs: int = 50
    patience: int = 10
    batch_size: int = bounded(64, most=65_536)
    accumulate: int = bounded(1, most=65_536)
    weight_decay: float = bounded(0.0, least=0, most=100)
    label_smoothing: float = bounded(0.0, least=0, most=1)
    scheduled_sampling: float = bounded(0.0, least=0, most=1)
    own_memory: bool = False
    init_range: float = bounded(0.0, least=0, most=100)
    clip_value: float = bounded(0.0, least=0, most=1e9)
    clip_norm: float = bounded(0.0, least=0, most=1e9)
    average: float = bounded(0.0, least=0, most=1)
    stored: str = choice("float32", "float16")
    precision: str = choice("auto", "fp32", "bf16")
    save_every: float = bounded(5.0, least=0, most=1e9)
    seed: int = bounded(1, least=0, most=_SEEDS)


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

    learning_rate: float = bounded(1e-4, least=0, most=100)
    epochs: int = 5
    patience: int = 5
    batch_size: int = bounded(64, most=65_536)
    samples: int = bounded(5, most=1000)
    temperature: float = bounded(0.7, least=0, most=100)
    contrast: float = bounded(0.0, least=0, most=100)


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


_SECTIONS: dict[str, type] = {
    "data": DataOptions,
    "training": TrainingOptions,
    "decoding": DecodingOptions,
    "self_critical": SelfCriticalOptions,
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
            text = read_regular(path, max_bytes=RECIPE_BYTES).decode()
        except OSError as error:
            raise RecipeError(f"{path}: the recipe cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise RecipeError(f"{path}: the recipe is not UTF-8") from error
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
        values = parse_toml(text)
    except ValueError as error:
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
        value = parse_toml(f"value = {text.strip()}")["value"]
    except ValueError:
        value = text.strip()
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise RecipeError(f"{section} must be a table, got {short(table)}")
    table[option] = value


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
    captioner, model = values["captioner"], values.get("model", {})
    for key in ("model", "search"):
        if not isinstance(values.get(key, {}), dict):
            raise RecipeError(f"{name}: {key} must be a table, got {short(values[key])}")
    if not isinstance(values.get("description", ""), str):
        raise RecipeError(f"{name}: description must be a string, got {short(values['description'])}")
    _check_model(captioner, model)
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


def _check_model(captioner: str, model: Mapping[str, Any]) -> None:
    """Raise RecipeError where the captioner has no such options, or no machine like this could train it."""
    kind = captioner_class(captioner)
    try:
        known = kind.config_class.from_dict({**SMALLEST, **model})
        features = {
            "feature_width": 1 + getattr(known, "value_width", 0),
            "locations": int(kind.needs_maps(known)),
        }
        sketch(captioner, {**SMALLEST, **features, **model}, copies=_COPIES)
    except UsageError as error:
        raise RecipeError(f"model.{error.message}", remedy=error.remedy) from error


def _checked(section: str, said: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section, which messages call ``said``, if they fit."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{said} must be a table, got {short(values)}")
    try:
        return checked_fields(_SECTIONS[section], values, prefix=f"{said}.")
    except UsageError as error:
        raise RecipeError(error.message, remedy=error.remedy) from error
