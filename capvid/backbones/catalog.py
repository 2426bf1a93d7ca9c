"""Catalogue of backbones and captioners: ``models.toml`` and backbones declared in code.

Imports no deep learning library, since completion and help read it.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from capvid.errors import UsageError
from capvid.utils.registry import Registry, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from torch import nn

BUNDLED = Path(__file__).resolve().parents[1] / "bundled"  # weights in half precision, and model cards
_CLIP_RATE = 30  # frames a second of the videos by which a clip's stride is meant


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Output of a layer per frame: ``width`` numbers, for each of ``locations`` if it is a map."""

    width: int
    locations: int | None = None


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """From a frame to a backbone's input: crop, resize, (value / scale - mean) / std.

    Attributes:
        resize: length of the short side before the centre crop; 0 with ``size``.
        crop: side of the centre crop; 0 with ``size``.
        order: channel order, RGB or BGR.
        scale: divisor of the values.
        mean: then subtracted, by channel in ``order``.
        std: divisor of the difference.
        size: (height, width) to squash the frame to, instead of ``resize`` and ``crop``.
        trim: whether to cut black borders first.
        aspects: range of width / height; frames outside are cropped centrally to it.
        interpolation: bilinear or bicubic, always with antialiasing.
    """

    resize: int = 0
    crop: int = 0
    order: str
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: tuple[int, int] | None = None
    trim: bool = False
    aspects: tuple[float, float] | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError("preprocess: interpolation is bilinear or bicubic")
        if self.size is None and not 0 < self.crop <= self.resize:
            raise ValueError("preprocess: size is needed, or resize and a crop that is not larger")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1 or self.resize or self.crop):
            raise ValueError("preprocess: size is a height and a width, without resize and crop")
        if self.aspects is not None and not (
            len(self.aspects) == 2 and 0 < self.aspects[0] <= self.aspects[1]
        ):
            raise ValueError("preprocess: aspects are the least and the greatest width / height")

    def describe(self) -> str:
        """Return the description in feature headers."""
        words = ["black borders cut"] if self.trim else []
        if self.aspects is not None:
            words.append("cut to an aspect of {:g} to {:g}".format(*self.aspects))
        if self.size is not None:
            words.append("squashed to {} x {} {}".format(*self.size, self.interpolation))
        else:
            words.append(f"short side {self.resize} {self.interpolation}, centre {self.crop}")
        divided = "" if self.scale == 1 else f" / {self.scale:g}"
        words.append("{}{} minus ({:g}, {:g}, {:g})".format(self.order, divided, *self.mean))
        if set(self.std) != {1.0}:
            words.append("over ({:g}, {:g}, {:g})".format(*self.std))
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Input of a network of clips: C = ``frames``, ``stride`` frames apart at 30 per second."""

    frames: int
    stride: int

    @property
    def offsets(self) -> tuple[float, ...]:
        """Times (C,) of the frames in seconds, relative to the middle of the clip."""
        interval = self.stride / _CLIP_RATE
        return tuple(interval * (number - (self.frames - 1) / 2) for number in range(self.frames))

    def describe(self) -> str:
        """Return the description in feature headers."""
        return f"{self.frames} frames {self.stride / _CLIP_RATE:g} s apart"


@dataclass(frozen=True, kw_only=True)
class BackboneEntry:
    """One backbone. ``models.toml`` documents ``source``, ``sha256``, ``half`` and ``layers``.

    Attributes:
        kind: name of the network's builder in :data:`NETWORKS`.
        file: name of the weights file.
        alternatives: other files of the same Hub repository to try.
        architecture: name of the network in timm or torchvision.
        config: sizes from which transformers builds the network.
        clip: frames that the network sees at once; ``None`` for single frames.
    """

    name: str
    kind: str
    source: str
    file: str
    licence: str
    origin: str
    description: str
    default_layer: str
    layers: Mapping[str, Layer]
    preprocess: Preprocess
    aliases: tuple[str, ...] = ()
    architecture: str | None = None
    sha256: str | None = None
    bytes: int | None = None
    clip: Clip | None = None
    half: bool | None = None
    alternatives: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.clip is not None and self.preprocess.trim:
            raise ValueError("trim: black borders are not cut from the frames of a clip")

    def describe_input(self) -> str:
        """Return the description of the network's input in feature headers."""
        words = self.preprocess.describe()
        return words if self.clip is None else f"{words}, {self.clip.describe()}"

    def layer(self, name: str | None) -> str:
        """Return ``name``, or the default layer for ``None``."""
        if name is None:
            return self.default_layer
        if name not in self.layers:
            raise UsageError(
                f"the backbone {self.name} has no layer {name!r}",
                remedy=f"use one of {', '.join(self.layers)}",
            )
        return name


@dataclass(frozen=True, kw_only=True)
class CaptionerEntry:
    """One captioner of ``models.toml``: its paper and its source file.

    A trained one has a ``source``: ``bundled:FOLDER``, with ``sha256`` and ``bytes`` of its weights file, or
    ``hub:OWNER/NAME``.
    """

    name: str
    paper: str
    description: str
    file: str
    source: str | None = None
    licence: str | None = None
    sha256: str | None = None
    bytes: int | None = None

    @property
    def bundled(self) -> bool:
        """Whether its weights come with capvid."""
        return (self.source or "").startswith("bundled:")

    @property
    def repository(self) -> str | None:
        """Its repository on the Hub (``OWNER/NAME``), if it has one."""
        source = self.source or ""
        return source.removeprefix("hub:").partition("@")[0] if source.startswith("hub:") else None


Builder = Callable[[BackboneEntry, str], "nn.Module"]
NETWORKS: Registry[Builder] = Registry("network", "capvid.backbones")  # builders of a network up to a layer
_DECLARED: dict[str, BackboneEntry] = {}


def build_network(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build the network of a backbone up to ``layer``, without weights."""
    return NETWORKS[entry.kind](entry, layer)


def declare_backbone(name: str, **fields: Any) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a network's builder together with its catalogue entry.

    The module must not import torch at its top, but in the builder: the catalogue imports it.

    Args:
        name: name of the backbone and of its ``kind``.
        fields: those of ``models.toml``; ``layers`` and ``preprocess`` are required. By default the first
            layer is the default one and there are no weights.

    Example:
        >>> @declare_backbone("mean-colour", layers={"colour": 3}, preprocess={"size": (8, 8), ...})
        ... def build_mean_colour(entry, layer): ...
    """

    def decorator(builder: Builder) -> Builder:
        description = (builder.__doc__ or name).strip().splitlines()[0]
        defaults = {"kind": name, "source": "none", "licence": "none needed", "description": description}
        defaults |= {"origin": builder.__module__, "default_layer": next(iter(fields["layers"]))}
        NETWORKS.register(name)(builder)
        _DECLARED[name] = _backbone(name, {**defaults, **fields})
        return builder

    return decorator


@lru_cache(maxsize=1)
def _import_declarations() -> None:
    """Import the modules of this package that declare backbones, and no others: those may import torch."""
    package = importlib.import_module("capvid.backbones")
    for path in sorted([path for folder in package.__path__ for path in Path(folder).glob("*.py")]):
        if re.search(r"^@declare_backbone\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(f"capvid.backbones.{path.stem}")


@lru_cache(maxsize=1)
def models_file() -> Path:
    """Return ``models.toml``: inside an installed package, or at the top of a source checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "models.toml"
    return packaged if packaged.is_file() else package.parent / "models.toml"


_Models = tuple[dict[str, BackboneEntry], dict[str, CaptionerEntry], str]


@lru_cache(maxsize=8)
def _read_models(file: Path) -> _Models:
    """Read the backbones, the captioners and the name of the default captioner."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    backbones = {name: _backbone(name, table) for name, table in tables.get("backbones", {}).items()}
    known = {field.name for field in dataclasses.fields(CaptionerEntry)} - {"name"}
    captioners = {
        name: CaptionerEntry(name=name, **{key: table[key] for key in known & table.keys()})
        for name, table in tables.get("captioners", {}).items()
    }
    return backbones, captioners, str(tables.get("default", ""))


def _models() -> _Models:
    """Return the models of ``models.toml`` and those of the user's own file, ``CAPVID_MODELS``."""
    backbones, captioners, default = _read_models(models_file())
    file = os.environ.get("CAPVID_MODELS")
    if not file:
        return backbones, captioners, default
    try:
        own_backbones, own_captioners, _ = _read_models(Path(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"CAPVID_MODELS={file}: not a file of models ({reason})",
            remedy="write it like models.toml, or unset CAPVID_MODELS",
        ) from error
    return {**backbones, **own_backbones}, {**captioners, **own_captioners}, default


def backbones() -> Mapping[str, BackboneEntry]:
    """Return every backbone by name: of ``models.toml``, declared in code, and the user's own."""
    _import_declarations()
    listed = _models()[0]
    return MappingProxyType({**listed, **_DECLARED, **listed})  # listed ones first, and before declared ones


def captioners() -> Mapping[str, CaptionerEntry]:
    """Return every captioner by name: of ``models.toml`` and the user's own."""
    return MappingProxyType(_models()[1])


def default_captioner() -> str:
    """Return the name of the captioner to use when none is given."""
    return _models()[2]


def backbone_entry(name: str) -> BackboneEntry:
    """Return the backbone with this name or alias.

    Raises:
        UsageError: no such backbone.
    """
    known = backbones()
    entry = known.get(canonical_backbone(name) or "")
    if entry is None:
        meant = did_you_mean(name, known) or f"use one of {', '.join(known)}"
        raise UsageError(f"unknown backbone {name!r}", remedy=meant)
    return entry


def canonical_backbone(name: str | None) -> str | None:
    """Return a backbone's name for its alias; any other name, and ``None``, unchanged."""
    for entry in backbones().values():
        if name in entry.aliases:
            return entry.name
    return name


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def _backbone(name: str, table: Mapping[str, Any]) -> BackboneEntry:
    values = _with_tuples(table)
    layers = {
        layer: Layer(width=size) if isinstance(size, int) else Layer(locations=size[0], width=size[1])
        for layer, size in values.pop("layers").items()
    }
    preprocess = Preprocess(**_with_tuples(values.pop("preprocess")))
    clip = values.pop("clip", None)
    return BackboneEntry(
        name=name,
        file=values.pop("file", None) or values["source"].partition(":")[2],
        layers=MappingProxyType(layers),
        preprocess=preprocess,
        clip=None if clip is None else Clip(**clip),
        **values,
    )


# in names: control characters, and halves of characters but those that stand for bytes of a file name
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, kw_only=True)
class StreamHeader:
    """Everything that one stream of features depends on; ``None`` if unknown.

    Attributes:
        backbone: name of the backbone.
        layer: name of the layer.
        width: D, numbers per vector; always known.
        locations: L for feature maps (T, L, D); None for vectors (T, D).
        weights_sha256: digest of the weights.
        preprocess: description of crop, size and normalisation.
        precision: type in which the backbone computed; may differ between training and captioning.
    """

    backbone: str | None
    layer: str | None
    width: int
    locations: int | None = None
    weights_sha256: str | None = None
    preprocess: str | None = None
    precision: str | None = None

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of one frame: (D,) or (L, D)."""
        return (self.width,) if self.locations is None else (self.locations, self.width)

    def check_types(self, prefix: str) -> None:
        """Raise ValueError, naming the field after ``prefix``, if a field has the wrong type."""
        for name in ("backbone", "layer", "weights_sha256", "preprocess", "precision"):
            check_text(prefix + name, getattr(self, name), optional=True)
        for name in ("width", "locations"):
            value = getattr(self, name)
            if not (name == "locations" and value is None) and (type(value) is not int or value < 1):
                raise ValueError(f"{prefix}{name} is {reprlib.repr(value)}, not a positive whole number")

    def mismatches(self, other: StreamHeader) -> list[str]:
        """Describe each field in which ``other`` differs from this one; unknown fields never differ."""
        pairs: list[tuple[str, Any, Any]] = [
            ("backbone", canonical_backbone(self.backbone), canonical_backbone(other.backbone)),
            ("layer", self.layer, other.layer),
            ("weights_sha256", self.weights_sha256, other.weights_sha256),
            ("preprocess", self.preprocess, other.preprocess),
            ("width", self.width, other.width),
            ("locations", self.locations or "none", other.locations or "none"),
        ]
        return [
            f"{name}: trained on {trained}, got {got}"
            for name, trained, got in pairs
            if trained != got and None not in (trained, got)
        ]

    def filled(self, other: StreamHeader) -> StreamHeader:
        """Return this header with unknown fields taken from ``other``."""
        known = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return StreamHeader(**{**dataclasses.asdict(other), **known})


def check_text(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise ValueError unless the field ``name`` is printable text, or ``None`` if ``optional``."""
    if optional and value is None:
        return
    if not isinstance(value, str):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not text")
    if UNPRINTABLE.search(value):
        raise ValueError(f"{name} {ascii(value)[:60]} holds characters that cannot be printed")


def model_card(name: str) -> str | None:
    """Return the card of a bundled model, in Markdown; None if it has none."""
    path = BUNDLED / f"{name}.md"
    return path.read_text(encoding="utf-8") if path.is_file() else None
