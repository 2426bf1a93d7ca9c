"""Recipes: everything a training run depends on beside the data, as TOML."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from capvid.captioners.base import CAPTIONERS, sketch
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import RecipeError, UsageError
from capvid.training.recipe_files import read_recipe, recipe_names
from capvid.utils.files import read_regular
from capvid.utils.limits import MIB
from capvid.utils.registry import did_you_mean
from capvid.utils.validation import LARGEST, bounded, checked_fields, choice, parse_toml, short

RECIPE_BYTES = 1 * MIB  # of a recipe file
_COPIES = 4  # of the weights in training: they, their gradients, and the optimizer's two moments
_SEEDS = 2**32 - 1
SMALLEST = {"vocabulary_size": 4, "feature_width": 1}  # sizes that the data decide
SECTIONS = ("model", "data", "training", "decoding")


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
class Range:
    """Numbers from ``low`` to ``high``, integers where both are.

    Attributes:
        low: smallest value.
        high: largest value.
        log: whether the logarithm is uniform.
        step: distance of neighbours, beginning with ``low``; None for a continuous range.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None


Space = Mapping[str, Range | tuple[Any, ...]]  # by "section.option": a range, or choices


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


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or from a ``.toml`` file, with ``section.key=value`` overrides.

    Raises:
        RecipeError: no such recipe, or a value that does not fit.
    """
    return _recipe(Path(name).stem if name.endswith(".toml") else name, recipe_values(name, overrides))


def recipe_values(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tables of a recipe, by name or from a ``.toml`` file, with overrides, before any check.

    Raises:
        RecipeError: no such recipe, not TOML, or an override that is none.
    """
    if name.endswith(".toml"):
        try:
            text = read_regular(Path(name), max_bytes=RECIPE_BYTES).decode()
        except OSError as error:
            raise RecipeError(f"{name}: the recipe cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise RecipeError(f"{name}: the recipe is not UTF-8") from error
    elif name in recipe_names():
        text = read_recipe(name)
    else:
        names = ", ".join(recipe_names())
        meant = did_you_mean(name, recipe_names()) or f"choose {names}, or give a .toml file"
        raise RecipeError(f"{name}: no such recipe", remedy=meant)
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"{name}: not valid TOML ({error})") from error
    for override in overrides:
        _set(values, override)
    return values


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
    kind = CAPTIONERS[captioner]
    try:
        config = kind.config_class.from_dict({**SMALLEST, **model})
        width = 1 + getattr(config, "value_width", 0)
        features = {"feature_width": width, "locations": int(kind.needs_maps(config))}
        # raises an error where no machine like this could train it
        sketch(captioner, {**SMALLEST, **features, **model}, copies=_COPIES)
    except UsageError as error:
        raise RecipeError(f"model.{error.message}", remedy=error.remedy) from error
    if sections["training"].own_memory and not kind.paragraphs:
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
    if not isinstance(values, Mapping):
        raise RecipeError(f"{said} must be a table, got {short(values)}")
    try:
        return checked_fields(_SECTIONS[section], values, prefix=f"{said}.")
    except UsageError as error:
        raise RecipeError(error.message, remedy=error.remedy) from error


def checked_space(table: Mapping[str, Any], check: Callable[[str, str, Any], Any]) -> Space:
    """Return the search space of a recipe's section ``search``.

    Args:
        table: by section and option, a list of choices or a table with ``low`` and ``high``.
        check: takes section, option and a value, and returns the value in the option's type.

    Raises:
        RecipeError: an unknown option, a value that it does not take, or a range that is none.
    """
    space: dict[str, Range | tuple[Any, ...]] = {}
    for key, entry in table.items():
        section, dot, single = key.partition(".")
        if section not in SECTIONS or not (dot or isinstance(entry, Mapping)):
            raise RecipeError(
                f"search.{key}: not understood", remedy=f"write search.{'|'.join(SECTIONS)}.OPTION"
            )
        for option, value in ({single: entry} if dot else entry).items():
            name, taken = f"{section}.{option}", partial(check, section, option)
            if isinstance(value, Mapping):
                space[name] = _range(f"search.{name}", value, taken)
            elif isinstance(value, list) and value:
                space[name] = tuple(map(taken, value))
            else:
                raise RecipeError(
                    f"search.{name} = {value!r}: not what can be drawn from",
                    remedy="write choices [A, B, ...] or a range { low = A, high = B }",
                )
    return space


def _range(name: str, table: Mapping[str, Any], check: Callable[[Any], Any]) -> Range:
    """Return the range of an option, called ``name`` in messages."""
    known = [field.name for field in fields(Range)]
    if unknown := [key for key in table if key not in known]:
        raise RecipeError(f"{name}.{unknown[0]}: no part of a range", remedy=f"known are {', '.join(known)}")
    if not {"low", "high"} <= set(table):
        raise RecipeError(f"{name}: a range has two ends", remedy="write { low = A, high = B }")
    low, high = check(table["low"]), check(table["high"])
    log, step = table.get("log", False), table.get("step")
    if type(low) not in (int, float):
        raise RecipeError(f"{name}: only numbers have a range", remedy="write choices [A, B, ...]")
    if not low < high < math.inf:
        raise RecipeError(f"{name}: low = {low} must be below high = {high}, and both finite")
    if type(log) is not bool:
        raise RecipeError(f"{name}.log = {log!r}: expected true or false")
    if log and (low == 0 or step is not None):
        raise RecipeError(f"{name}: with log = true, low must be above 0, and there is no step")
    if step is not None:
        if type(step) not in (int, type(low)):
            kind = "a whole number" if type(low) is int else "a number"
            raise RecipeError(f"{name}.step = {step!r}: expected {kind}")
        steps = (high - low) / step if step else 0.0
        if not steps >= 1 or abs(steps - round(steps)) > 1e-6:
            raise RecipeError(
                f"{name}.step = {step!r}: must be positive and lead from low = {low} to high = {high}"
            )
    return Range(low=low, high=high, log=log, step=step)


def check_model(captioner: str, model: Mapping[str, Any], option: str, value: Any) -> Any:
    """Return a value as the captioner takes it beside the other options of ``model``.

    Raises:
        RecipeError: it has no such option, or does not take the value.
        UsageError: the other options do not fit.
    """
    kind: Any = CAPTIONERS[captioner].config_class
    others = {**SMALLEST, **model}
    kind.from_dict(others)
    try:
        kind.from_dict({**others, option: value})
    except UsageError as error:
        raise RecipeError(f"search.model.{error.message}", remedy=error.remedy) from error
    wanted = {field.name: str(field.type) for field in fields(kind)}[option]
    return float(value) if wanted == "float" else value
