"""The backbones and captioners that ``models.toml`` describes. Imports no deep learning library."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from capvid.errors import UsageError
from capvid.names import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CLIP_RATE = 30  # frames a second of the videos by which a clip's stride is meant


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer gives per frame: ``width`` numbers, at each of ``locations`` places if it is a map."""

    width: int
    locations: int | None = None


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How a frame becomes a backbone's input: cut, resized, (value / scale - mean) / std.

    Attributes:
        resize: length of the short side before the centre is cut out; 0 with ``size``.
        crop: side of that centre; 0 with ``size``.
        order: of the channels, RGB or BGR.
        scale: by which values are divided first.
        mean: what is then subtracted, channel by channel in ``order``.
        std: by which the rest is divided.
        size: (height, width) to which the picture is squashed, instead of ``resize`` and ``crop``.
        trim: whether black borders are cut first.
        aspects: least and greatest width / height; pictures outside are cut centrally to it.
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
        """Say it in words, as feature headers do."""
        words = ["black borders cut"] if self.trim else []
        if self.aspects is not None:
            words.append("cut to an aspect of {:g} to {:g}".format(*self.aspects))
        if self.size is not None:
            words.append("squashed to {} x {} {}".format(*self.size, self.interpolation))
        else:
            words.append(f"short side {self.resize} {self.interpolation}, centre {self.crop}")
        divided = "" if self.scale == 1 else f" / {self.scale:g}"
        mean = ", ".join(f"{value:g}" for value in self.mean)
        words.append(f"{self.order}{divided} minus ({mean})")
        if set(self.std) != {1.0}:
            words.append(f"over ({', '.join(f'{value:g}' for value in self.std)})")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """What a network of clips sees at once: C = ``frames``, ``stride`` apart in videos of 30 a second."""

    frames: int
    stride: int

    @property
    def interval(self) -> float:
        """Seconds from one frame of the clip to the next, whatever the video's own rate."""
        return self.stride / _CLIP_RATE

    @property
    def offsets(self) -> tuple[float, ...]:
        """Times (C,) of the frames in seconds, from the middle of the clip."""
        return tuple(self.interval * (number - (self.frames - 1) / 2) for number in range(self.frames))

    def describe(self) -> str:
        """Say it in words, as feature headers do."""
        return f"{self.frames} frames {self.interval:g} s apart"


@dataclass(frozen=True, kw_only=True)
class BackboneEntry:
    """One backbone of ``models.toml``, which says what a ``source`` may be.

    ``file`` is the name of the weights file, ``alternatives`` are other files of the same Hub repository that
    will do where there is none of that name, ``sha256`` is its digest where known, ``bytes`` its size where
    known, ``architecture`` the name timm or torchvision knows the network by, ``config`` the sizes from which
    transformers builds it, ``clip`` the frames that it sees at once, ``None`` for a network of single frames.
    ``half`` says whether half precision is taken where it is fast (true), only when asked for (not given), or
    cannot be had (false).
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
        """Say in words what the network sees, as feature headers do."""
        words = self.preprocess.describe()
        return words if self.clip is None else f"{words}, {self.clip.describe()}"

    def layer(self, name: str | None) -> str:
        """Give ``name``, or the default layer for ``None``.

        Raises:
            UsageError: there is no such layer; the remedy lists those there are.
        """
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
    """One captioner of ``models.toml``: the paper it follows and the file that holds it.

    A captioner that comes trained has a ``source``: ``bundled:FOLDER``, with ``sha256`` and ``bytes`` of its
    weights file, or ``hub:OWNER/NAME``.
    """

    name: str
    paper: str
    description: str
    file: str
    source: str | None = None
    licence: str | None = None
    sha256: str | None = None
    bytes: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bundled(self) -> bool:
        """Whether it comes trained with capvid."""
        return (self.source or "").startswith("bundled:")

    @property
    def repository(self) -> str | None:
        """Where on the Hub it is (``OWNER/NAME``), if it is there."""
        source = self.source or ""
        return source.removeprefix("hub:").partition("@")[0] if source.startswith("hub:") else None


def backbones() -> Mapping[str, BackboneEntry]:
    """Give every backbone by its name."""
    return _registry(_extra_file())[0]


def captioners() -> Mapping[str, CaptionerEntry]:
    """Give every captioner by its name."""
    return _registry(_extra_file())[1]


def default_captioner() -> str:
    """Name the captioner that is taken when none is given."""
    return str(_tables()["default"])


def backbone_entry(name: str) -> BackboneEntry:
    """Give the backbone called ``name``, or one of whose aliases it is.

    Raises:
        UsageError: there is none; the remedy lists what there is.
    """
    entry = backbones().get(canonical_backbone(name) or "")
    if entry is None:
        meant = did_you_mean(name, backbones()) or f"use one of {', '.join(backbones())}"
        raise UsageError(f"unknown backbone {name!r}", remedy=meant)
    return entry


def canonical_backbone(name: str | None) -> str | None:
    """Give a backbone's own name for an alias; any other name, and ``None``, stays as it is."""
    for entry in backbones().values():
        if name in entry.aliases:
            return entry.name
    return name


def _extra_file() -> str | None:
    """Name the file of the user's own entries, from the environment variable ``CAPVID_MODELS``."""
    return os.environ.get("CAPVID_MODELS") or None


@lru_cache(maxsize=8)
def _registry(extra: str | None) -> tuple[Mapping[str, BackboneEntry], Mapping[str, CaptionerEntry]]:
    """Read ``models.toml``, then the entries of the ``extra`` file over them."""
    tables = _tables()
    known = {name: _backbone(name, table) for name, table in tables["backbones"].items()}
    writers = {name: _captioner(name, table) for name, table in tables["captioners"].items()}
    if extra is not None:
        try:
            tables = tomllib.loads(Path(extra).read_text(encoding="utf-8"))
            known |= {name: _backbone(name, table) for name, table in tables.get("backbones", {}).items()}
            writers |= {name: _captioner(name, table) for name, table in tables.get("captioners", {}).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"CAPVID_MODELS={extra}: not a file of models ({reason})",
                remedy="write it like models.toml, or unset CAPVID_MODELS",
            ) from error
    return MappingProxyType(known), MappingProxyType(writers)


@lru_cache(maxsize=1)
def _tables() -> dict[str, Any]:
    """Read ``models.toml``."""
    return tomllib.loads(models_file().read_text(encoding="utf-8"))


def models_file() -> Path:
    """Find ``models.toml``: inside an installed package, at the top of a source checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "models.toml"
    return packaged if packaged.is_file() else package.parent / "models.toml"


def _backbone(name: str, table: Mapping[str, Any]) -> BackboneEntry:
    values = dict(table)
    layers = {
        layer: Layer(width=size) if isinstance(size, int) else Layer(locations=size[0], width=size[1])
        for layer, size in values.pop("layers").items()
    }
    numbers: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.pop("preprocess").items()
    }
    preprocess = Preprocess(**numbers)
    file = values.pop("file", None) or values["source"].partition(":")[2]
    aliases = tuple(values.pop("aliases", ()))
    alternatives = tuple(values.pop("alternatives", ()))
    clip = values.pop("clip", None)
    return BackboneEntry(
        name=name,
        file=file,
        layers=MappingProxyType(layers),
        preprocess=preprocess,
        aliases=aliases,
        alternatives=alternatives,
        clip=None if clip is None else Clip(**clip),
        **values,
    )


def _captioner(name: str, table: Mapping[str, Any]) -> CaptionerEntry:
    own = {"paper", "description", "file", "source", "licence", "sha256", "bytes"}
    extra = {key: value for key, value in table.items() if key not in own}
    return CaptionerEntry(name=name, extra=extra, **{k: v for k, v in table.items() if k in own})
