"""Recipes: every option of a training run, as TOML; the files are in ``capvid/recipes``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import UsageError
from capvid.text.tokenization import TOKENIZERS
from capvid.utils.files import read_regular
from capvid.utils.registry import did_you_mean
from capvid.utils.validation import LARGEST, MIB, checked_fields, option, parse_toml, short

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MAX_BYTES = 1 * MIB  # of a recipe file
_COPIES = 4  # of the weights in training: they, their gradients, and the optimizer's two moments
_SIZES = {"vocabulary_size": 4, "feature_width": 1}  # the smallest; in training the data decide


_count = partial(option, minimum=1, maximum=65_536)
_rate = partial(option, minimum=0, maximum=1)
_weight = partial(option, minimum=0, maximum=100)
_limit = partial(option, minimum=0, maximum=1e9)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Selection of frames, captions and words from the dataset."""

    max_frames: int = _count(28, "Maximum frames per video, or per segment of paragraphs.", maximum=10_000)
    frames: str = option(
        "spread",
        "If there are more: spread (random in training), even (at equal distances) or first.",
        choices=("spread", "even", "first"),
    )
    sampling: str = option("", "Sampling of the features that the recipe was made for; empty for any.")
    frame_dropout: float = _rate(0.0, "Rate of dropped frames in training; at least one is kept.")
    captions_per_video: int = option(20, "Captions, or paragraphs, per epoch for each video and view.")
    views: bool = option(True, "Train on augmented views of the videos, if the features hold any.")
    max_segments: int = option(12, "Paragraphs: maximum segments per video to learn from, from the first.")
    max_words: int = option(30, "Maximum length of training captions.")
    long_captions: str = option("drop", "drop or cut longer captions.", choices=("drop", "cut"))
    tokenizer: str = option(
        "scorer",
        "Words of training captions: the scorer's, or NLTK's word_tokenize (nltk; nltk-words without "
        "punctuation) or wordpunct_tokenize.",
        choices=tuple(TOKENIZERS),
    )
    min_count: int = option(1, "Minimum occurrences of a word in the training captions.")
    max_vocabulary: int = _count(20_000, "Maximum words; the most frequent are kept.", maximum=LARGEST - 4)
    vocabulary: str = option("", "Run folder or bundled captioner whose vocabulary to use instead.")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Optimization of the weights."""

    optimizer: str = option(
        "adam", "adam, adamw, bert-adam or adadelta.", choices=("adam", "adamw", "bert-adam", "adadelta")
    )
    learning_rate: float = _weight(1e-3, "Peak learning rate.")
    beta1: float = _rate(0.9, "First decay rate of adam, adamw and bert-adam.", maximum=0.999999)
    beta2: float = _rate(0.999, "Second decay rate of adam, adamw and bert-adam.", maximum=0.999999)
    rho: float = _rate(0.95, "Decay rate of adadelta.", maximum=0.999999)
    loss: str = option(
        "word",
        "Negative log-likelihood of a batch: its mean per word, its mean per sentence, or its sum.",
        choices=("word", "sentence", "sum"),
    )
    schedule: str = option(
        "constant",
        "constant, or linear warm-up and then a cosine (one-cycle) or a line (linear; bert, from 0) to 0.",
        choices=("constant", "one-cycle", "linear", "bert"),
    )
    warmup: float = _rate(0.1, "Fraction of all steps for the warm-up.")
    epochs: int = option(50, "Maximum number of epochs.")
    patience: int = option(10, "Epochs without a better validation CIDEr-D before stopping.")
    batch_size: int = _count(64, "Captions per batch, over all processes.")
    accumulate: int = _count(1, "Micro-batches per batch and process; more need less memory.")
    weight_decay: float = _weight(
        0.0,
        "Decoupled for adamw (matrices other than embeddings), an L2 term of all parameters for the others.",
    )
    label_smoothing: float = _rate(0.0, "Probability spread over the vocabulary.")
    own_memory: bool = option(
        False,
        "Paragraphs: build the memory from own sentences; learn the references that repeat them the least.",
    )
    init_range: float = _weight(0.0, "Initialize uniformly in [-value, value]; 0 keeps each layer's default.")
    clip_value: float = _limit(0.0, "Clip gradients element by element; 0 disables it.")
    clip_norm: float = _limit(0.0, "Scale gradients to at most this norm; 0 disables it.")
    average: float = _rate(0.0, "Decay of the weight average to validate and save; 0 disables it.")
    stored: str = option("float32", "Number type of checkpoints.", choices=("float32", "float16"))
    precision: str = option(
        "auto",
        "fp32, bf16 (autocast), or auto: as accelerate launched, else bf16 where the hardware multiplies it.",
        choices=("auto", "fp32", "bf16"),
    )
    save_every: float = _limit(5.0, "Minutes between saved states within an epoch.")
    seed: int = option(1, "Random seed of weights, batches and dropout.", minimum=0, maximum=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class SelfCriticalOptions:
    """Fine-tuning of a trained captioner on CIDEr-D, with Adam."""

    learning_rate: float = _weight(1e-4, "Constant learning rate.")
    epochs: int = option(5, "Maximum number of epochs.")
    patience: int = option(5, "Epochs without a better validation CIDEr-D before stopping.")
    batch_size: int = _count(64, "Videos per batch.")
    samples: int = _count(5, "Captions sampled per video.", maximum=1000)
    temperature: float = _weight(0.7, "Temperature of sampling and loss.")
    contrast: float = _weight(0.0, "Weight of a caption's mean CIDEr-D for other videos, as a penalty.")


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of numbers to search; of integers if both ends are."""

    low: float
    high: float
    log: bool = False  # sample the logarithm uniformly
    step: float | None = None  # between values, from low on; None: continuous


Space = Mapping[str, Range | tuple[Any, ...]]  # ranges and choices by "section.option"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A captioner, its options, and the search space of some of them."""

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
        """Return all options as saved with a run, without the search space."""
        return {name: value for name, value in asdict(self).items() if name != "search"}

    def for_captioning(self) -> dict[str, Any]:
        """Return the options that captioning with a checkpoint depends on."""
        return {
            "recipe": self.name,
            "max_frames": self.data.max_frames,
            "frames": self.data.frames,
            "decoding": asdict(self.decoding),
        }


_SECTIONS: dict[str, type] = {
    "data": DataOptions,
    "training": TrainingOptions,
    "decoding": DecodingOptions,
    "self_critical": SelfCriticalOptions,
}
_SEARCHABLE = ("model", "data", "training", "decoding")


def recipe_names() -> list[str]:
    """Return the names of the bundled recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


@lru_cache(maxsize=1)
def all_recipes() -> dict[str, dict[str, Any]]:
    """Return the tables of all bundled recipes by name."""
    return {
        name: parse_toml((RECIPES / f"{name}.toml").read_text(encoding="utf-8")) for name in recipe_names()
    }


def recipe_values(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the unchecked tables of a bundled recipe or ``.toml`` file, with overrides."""
    if not name.endswith(".toml") and name not in recipe_names():
        names = ", ".join(recipe_names())
        meant = did_you_mean(name, recipe_names()) or f"choose {names}, or give a .toml file"
        raise UsageError(f"{name}: no such recipe", remedy=meant)
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        text = read_regular(path, max_bytes=MAX_BYTES).decode()
    except OSError as error:
        raise UsageError(f"{name}: the recipe cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{name}: the recipe is not UTF-8") from error
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{name}: not valid TOML ({error})") from error
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, option = key.strip().partition(".")
        if not equals or not dot or section not in (*_SECTIONS, "model", "search"):
            raise UsageError(
                f"--set {override}: not understood",
                remedy="write model|data|training|decoding|self_critical.KEY=VALUE, or "
                "search.SECTION.KEY=[A, B]",
            )
        table = values.setdefault(section, {})
        if not isinstance(table, dict):
            raise UsageError(f"{section} must be a table, got {short(table)}")
        try:
            table[option] = parse_toml(f"value = {text.strip()}")["value"]
        except ValueError:  # a bare word, such as adam
            table[option] = text.strip()
    return values


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a bundled recipe or a ``.toml`` file, with ``section.key=value`` overrides."""
    from capvid.captioners.base import CAPTIONERS, sketch  # slow; completion needs the names only
    from capvid.video.frame_sampling import parse_sampling

    values = recipe_values(name, overrides)
    name = Path(name).stem if name.endswith(".toml") else name
    captioner, model = values.get("captioner"), values.get("model", {})
    if not isinstance(captioner, str):
        raise UsageError(f"{name}: the recipe names no captioner", remedy='write captioner = "m3", say')
    if unknown := set(values) - {"captioner", "description", "model", "search", *_SECTIONS}:
        raise UsageError(f"{name}: unknown in a recipe: {', '.join(sorted(unknown))}")
    sections = {
        section: cls(**_checked(section, values.get(section, {}))) for section, cls in _SECTIONS.items()
    }
    for key in ("model", "search"):
        if not isinstance(values.get(key, {}), dict):
            raise UsageError(f"{name}: {key} must be a table, got {short(values[key])}")
    if not isinstance(values.get("description", ""), str):
        raise UsageError(f"{name}: description must be a string, got {short(values['description'])}")
    kind: Any = CAPTIONERS[captioner]
    try:
        config = kind.config_class.from_dict({**_SIZES, **model})
        width = 1 + getattr(config, "value_width", 0)
        features = {"feature_width": width, "locations": int(kind.needs_maps(config))}
        # raises an error where no machine like this could train it
        sketch(captioner, {**_SIZES, **features, **model}, copies=_COPIES)
    except UsageError as error:
        raise UsageError(f"model.{error.message}", remedy=error.remedy) from error
    if sampling := sections["data"].sampling:
        try:
            parse_sampling(sampling)
        except UsageError as error:
            raise UsageError(f"data.sampling: {error.message}", remedy=error.remedy) from error
    if sections["training"].own_memory and not kind.paragraphs:
        raise UsageError(
            f"training.own_memory = true: {captioner} writes single captions, and remembers none",
            remedy="choose a captioner of paragraphs, such as mart",
        )

    def check(section: str, option: str, value: Any) -> Any:
        """Return a value of the search space in the type of its option."""
        if section != "model":
            return _checked(section, {option: value}, prefix="search.")[option]
        try:
            kind.config_class.from_dict({**_SIZES, **model, option: value})
        except UsageError as error:
            raise UsageError(f"search.model.{error.message}", remedy=error.remedy) from error
        types = {field.name: str(field.type) for field in fields(kind.config_class)}
        return float(value) if types[option] == "float" else value

    return Recipe(
        name=name,
        captioner=captioner,
        description=values.get("description", ""),
        model=model,
        search=_search_space(values.get("search", {}), check),
        **sections,
    )


def _checked(section: str, values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Return the values of a section in the types of its options; ``prefix`` goes before it in messages."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{prefix}{section} must be a table, got {short(values)}")
    return checked_fields(_SECTIONS[section], values, prefix=f"{prefix}{section}.")


def _search_space(table: Mapping[str, Any], check: Callable[[str, str, Any], Any]) -> Space:
    """Return the search space of a recipe's section ``search``; ``check`` converts section, option, value."""
    space: dict[str, Range | tuple[Any, ...]] = {}
    for key, entry in table.items():
        section, dot, single = key.partition(".")
        if section not in _SEARCHABLE or not (dot or isinstance(entry, Mapping)):
            raise UsageError(
                f"search.{key}: not understood", remedy=f"write search.{'|'.join(_SEARCHABLE)}.OPTION"
            )
        for field_name, value in ({single: entry} if dot else entry).items():
            name, convert = f"{section}.{field_name}", partial(check, section, field_name)
            if isinstance(value, Mapping):
                space[name] = _range(f"search.{name}", value, convert)
            elif isinstance(value, list) and value:
                space[name] = tuple(map(convert, value))
            else:
                raise UsageError(
                    f"search.{name} = {value!r}: neither choices nor a range",
                    remedy="write choices [A, B, ...] or a range { low = A, high = B }",
                )
    return space


def _range(name: str, table: Mapping[str, Any], check: Callable[[Any], Any]) -> Range:
    """Return the range of an option, called ``name`` in messages."""
    known = [field.name for field in fields(Range)]
    if unknown := [key for key in table if key not in known]:
        raise UsageError(
            f"{name}.{unknown[0]}: no such key of a range", remedy=f"known are {', '.join(known)}"
        )
    if not {"low", "high"} <= set(table):
        raise UsageError(f"{name}: a range has two ends", remedy="write { low = A, high = B }")
    low, high = check(table["low"]), check(table["high"])
    log, step = table.get("log", False), table.get("step")
    if type(low) not in (int, float):
        raise UsageError(f"{name}: only numbers have a range", remedy="write choices [A, B, ...]")
    if not low < high < math.inf:
        raise UsageError(f"{name}: low = {low} must be below high = {high}, and both finite")
    if type(log) is not bool:
        raise UsageError(f"{name}.log = {log!r}: expected true or false")
    if log and (low == 0 or step is not None):
        raise UsageError(f"{name}: with log = true, low must be above 0, and there is no step")
    if step is not None:
        if type(step) not in (int, type(low)):
            expected = "an integer" if type(low) is int else "a number"
            raise UsageError(f"{name}.step = {step!r}: expected {expected}")
        steps = (high - low) / step if step else 0.0
        if not steps >= 1 or abs(steps - round(steps)) > 1e-6:
            raise UsageError(
                f"{name}.step = {step!r}: must be positive and lead from low = {low} to high = {high}"
            )
    return Range(low=low, high=high, log=log, step=step)
