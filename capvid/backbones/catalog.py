"""Catalogue of backbones and captioners: ``models.toml`` and backbones declared in code.

Imports no deep learning library, since completion and help read it.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
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

_PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED = _PACKAGE / "bundled"  # weights in half precision, and model cards
MODELS_FILE = _PACKAGE / "models.toml"
if not MODELS_FILE.is_file():  # a source checkout, not an installed package
    MODELS_FILE = _PACKAGE.parent / "models.toml"
_FREE = re.compile(r"(apache-2\.0|bsd-[23]-clause|mit|cc0-1\.0|bvlc googlenet: unrestricted use)(?![\w.-])")
_CLIP_RATE = 30  # frames per second of the videos to which a clip's stride refers


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Output of a layer per frame: ``width`` numbers, for each of ``locations`` if it is a map."""

    width: int
    locations: int | None = None


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Preprocessing of a backbone's input: crop, resize, (value / scale - mean) / std."""

    resize: int = 0  # length of the short side before the centre crop; 0 with ``size``
    crop: int = 0  # side of the centre crop; 0 with ``size``
    order: str  # of the channels: RGB or BGR
    scale: float
    mean: tuple[float, float, float]  # by channel in ``order``
    std: tuple[float, float, float]  # by channel in ``order``
    size: tuple[int, int] | None = None  # (height, width) to squash to, instead of ``resize`` and ``crop``
    max_pixels: int | None = None  # only shrink larger frames to this area, keeping their aspect
    trim: bool = False  # whether to cut off black borders first
    aspects: tuple[float, float] | None = None  # range of width / height, kept by cropping centrally
    interpolation: str = "bilinear"  # or bicubic; always with antialiasing

    def __post_init__(self) -> None:
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError("preprocess: interpolation must be bilinear or bicubic")
        if self.max_pixels is None and self.size is None and not 0 < self.crop <= self.resize:
            raise ValueError("preprocess: needs size, or resize and a crop that is at most as large")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1 or self.resize or self.crop):
            raise ValueError("preprocess: size must be (height, width), without resize and crop")
        aspects = self.aspects
        if aspects is not None and not (len(aspects) == 2 and 0 < aspects[0] <= aspects[1]):
            raise ValueError("preprocess: aspects must be the minimum and maximum of width / height")


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Input of a clip network: C = ``frames`` frames, ``stride`` frames apart at 30 frames per second."""

    frames: int
    stride: int

    @property
    def offsets(self) -> tuple[float, ...]:
        """Times (C,) of the frames in seconds, relative to the middle of the clip."""
        interval = self.stride / _CLIP_RATE
        return tuple(interval * (number - (self.frames - 1) / 2) for number in range(self.frames))


@dataclass(frozen=True, kw_only=True)
class BackboneEntry:
    """One backbone. ``models.toml`` documents ``source``, ``sha256``, ``half``, ``bf16`` and ``layers``."""

    name: str
    kind: str  # name of the network's builder in NETWORKS
    source: str
    file: str  # name of the weights file
    licence: str
    origin: str
    description: str
    default_layer: str
    layers: Mapping[str, Layer]
    preprocess: Preprocess
    aliases: tuple[str, ...] = ()
    architecture: str | None = None  # name of the network in timm or torchvision
    sha256: str | None = None
    bytes: int | None = None
    clip: Clip | None = None  # None for a network of single frames
    half: bool | None = None
    bf16: bool = False
    alternatives: tuple[str, ...] = ()  # other files of the same Hub repository or web folder to try
    fingerprint: str | None = None  # file in ``bundled`` by which weights in other files are recognised
    config: Mapping[str, Any] = field(default_factory=dict)  # options of timm or transformers

    @property
    def is_free(self) -> bool:
        """Whether the licence of the weights is a free one."""
        return _FREE.match(self.licence.lower()) is not None

    @property
    def urls(self) -> dict[str, str]:
        """Addresses of the weights by file name, in the order to try them; empty unless on a web server."""
        folder, _, name = self.source.rpartition("/")
        names = (name, *self.alternatives) if self.source.startswith(("https://", "http://")) else ()
        return {name: f"{folder}/{name}" for name in names}

    def describe_input(self) -> str:
        """Return the description of the network's input that feature headers contain."""
        preprocess, clip = self.preprocess, self.clip
        words = ["black borders cut"] if preprocess.trim else []
        if preprocess.aspects is not None:
            words.append("cut to an aspect of {:g} to {:g}".format(*preprocess.aspects))
        if preprocess.size is not None:
            words.append("squashed to {} x {} {}".format(*preprocess.size, preprocess.interpolation))
        else:
            words.append(
                f"short side {preprocess.resize} {preprocess.interpolation}, centre {preprocess.crop}"
            )
        divided = "" if preprocess.scale == 1 else f" / {preprocess.scale:g}"
        words.append("{}{} minus ({:g}, {:g}, {:g})".format(preprocess.order, divided, *preprocess.mean))
        if set(preprocess.std) != {1.0}:
            words.append("over ({:g}, {:g}, {:g})".format(*preprocess.std))
        if clip is not None:
            words.append(f"{clip.frames} frames {clip.stride / _CLIP_RATE:g} s apart")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class CaptionerEntry:
    """One captioner of ``models.toml``: its paper and its module.

    A trained captioner has a ``source``: ``bundled:FOLDER``, with ``sha256`` and ``bytes`` of its weights
    file, or ``hub:OWNER/NAME``, with ``bytes`` of the download if they are known.
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
        """Whether the package contains its weights."""
        return (self.source or "").startswith("bundled:")

    @property
    def repository(self) -> str | None:
        """Its repository on the Hub (``OWNER/NAME``), if it has one."""
        source = self.source or ""
        return source.removeprefix("hub:").partition("@")[0] if source.startswith("hub:") else None


Builder = Callable[[BackboneEntry, str], "nn.Module"]
NETWORKS: Registry[Builder] = Registry("network", "capvid.backbones")  # builders by kind
_DECLARED: dict[str, BackboneEntry] = {}


def build_network(entry: BackboneEntry, layer: str) -> nn.Module:
    """Build the network of a backbone up to ``layer``, without weights."""
    return NETWORKS[entry.kind](entry, layer)


def declare_backbone(name: str, **fields: Any) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a network's builder together with its catalogue entry.

    The catalogue imports the module, so torch must be imported inside the builder, not at the top.

    Args:
        name: name of the backbone, and its ``kind``.
        fields: fields as in ``models.toml``; ``layers`` and ``preprocess`` are required. By default the first
            layer is the default layer and there are no weights.

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


@lru_cache(maxsize=8)
def _read_models(
    own_file: str,
) -> tuple[dict[str, BackboneEntry], dict[str, CaptionerEntry], tuple[str, ...], dict[str, str]]:
    """Return backbones, captioners, defaults and encoders of ``models.toml`` and the user's file."""
    package = importlib.import_module("capvid.backbones")
    for path in sorted([path for folder in package.__path__ for path in Path(folder).glob("*.py")]):
        # only modules that declare backbones: the others may import torch
        if re.search(r"^@declare_backbone\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(f"capvid.backbones.{path.stem}")
    backbones: dict[str, BackboneEntry] = {}
    captioners: dict[str, CaptionerEntry] = {}
    default: tuple[str, ...] = ()
    sources: dict[str, str] = {}  # of image-text encoders
    known = {field.name for field in dataclasses.fields(CaptionerEntry)} - {"name"}
    for file in [MODELS_FILE, *([Path(own_file)] if own_file else [])]:
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
            for name, table in tables.get("backbones", {}).items():
                backbones[name] = _backbone(name, table)
            for name, table in tables.get("captioners", {}).items():
                fields = {key: table[key] for key in known & table.keys()}
                captioners[name] = CaptionerEntry(name=name, **fields)
            sources |= {name: str(table["source"]) for name, table in tables.get("encoders", {}).items()}
            if not isinstance(listed := tables.get("default", default), list | tuple):
                raise TypeError("default must be a list of captioners")
            default = tuple(map(str, listed))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"CAPVID_MODELS={file}: not a file of models ({reason})",
                remedy="write it like models.toml, or unset CAPVID_MODELS",
            ) from error
    return backbones, captioners, default, sources


def backbones() -> Mapping[str, BackboneEntry]:
    """Return every backbone by name: of ``models.toml``, declared in code, and the user's own."""
    listed = _read_models(os.environ.get("CAPVID_MODELS", ""))[0]
    # listed entries come first, and replace declared ones of the same name
    return MappingProxyType({**listed, **_DECLARED, **listed})


def captioners() -> Mapping[str, CaptionerEntry]:
    """Return every captioner by name: of ``models.toml`` and the user's own."""
    return MappingProxyType(_read_models(os.environ.get("CAPVID_MODELS", ""))[1])


def default_captioners() -> tuple[str, ...]:
    """Return the captioners of which the first whose backbones can be had is the default."""
    return _read_models(os.environ.get("CAPVID_MODELS", ""))[2]


def encoders() -> Mapping[str, str]:
    """Return the source of every image-text encoder by name: of ``models.toml`` and the user's own."""
    return MappingProxyType(_read_models(os.environ.get("CAPVID_MODELS", ""))[3])


def backbone_entry(name: str) -> BackboneEntry:
    """Return the backbone with this name or alias.

    Raises:
        UsageError: there is no such backbone.
    """
    entries = backbones()
    entry = entries.get(canonical_backbone(name) or "")
    if entry is None:
        remedy = did_you_mean(name, entries) or f"use one of {', '.join(entries)}"
        raise UsageError(f"unknown backbone {name!r}", remedy=remedy)
    return entry


def canonical_backbone(name: str | None) -> str | None:
    """Return the name of the backbone with this alias; any other name, and ``None``, unchanged."""
    for entry in backbones().values():
        if name in entry.aliases:
            return entry.name
    return name


def _backbone(name: str, table: Mapping[str, Any]) -> BackboneEntry:
    """Return the entry for a table of ``models.toml``."""
    fields: dict[str, Any]
    preprocess: dict[str, Any]
    fields, preprocess = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        for values in (table, table["preprocess"])
    ]
    layers = {
        layer: Layer(width=size) if isinstance(size, int) else Layer(locations=size[0], width=size[1])
        for layer, size in table["layers"].items()
    }
    fields |= {"layers": MappingProxyType(layers), "preprocess": Preprocess(**preprocess)}
    fields["file"] = fields.get("file") or fields["source"].partition(":")[2]
    if "clip" in fields:
        fields["clip"] = Clip(**fields["clip"])
        if fields["preprocess"].trim:
            raise ValueError("trim: black borders cannot be cut from the frames of a clip")
    return BackboneEntry(name=name, **fields)


@dataclass(frozen=True, kw_only=True)
class StreamHeader:
    """Everything that one stream of features depends on; ``None`` if unknown.

    Attributes:
        backbone: name of the backbone.
        layer: name of the layer.
        width: D, the numbers per vector; always known.
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

    def mismatches(self, other: StreamHeader) -> list[str]:
        """Describe each field in which ``other`` differs from this header; unknown fields never differ."""
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

    def with_defaults(self, other: StreamHeader) -> StreamHeader:
        """Return this header with its unknown fields taken from ``other``."""
        known = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(other, **known)


def model_card(name: str) -> str | None:
    """Return the card of a bundled model in Markdown; None if it has none."""
    path = BUNDLED / f"{name}.md"
    return path.read_text(encoding="utf-8") if path.is_file() else None
