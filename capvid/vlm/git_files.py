"""The files of a GIT as transformers publishes it. Imports no deep learning library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capvid.backbones.catalog import Preprocess
from capvid.errors import CheckpointError
from capvid.utils.files import read_regular
from capvid.utils.limits import MIB
from capvid.utils.validation import LARGEST, parse_json, short

GIT = "git"  # transformers' name of the type
GIT_CONFIG = "config.json"
GIT_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_PREPROCESS = ("preprocessor_config.json", "processor_config.json")
GIT_REQUIRED = (_PREPROCESS, ("tokenizer.json", "vocab.txt"), GIT_WEIGHTS)  # the first of each that exists
GIT_OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json")
_TEXT_BYTES = 64 * MIB  # of a configuration or a vocabulary
_SIZES = ("_size", "_heads", "_channels", "_position_embeddings", "_dim")
_MOST = {"num_hidden_layers": 256, "num_image_with_embedding": 1000, "image_size": 4096}
_FILTERS = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers


def model_type(folder: Path) -> str | None:
    """Return transformers' type of the model in a folder; None if it is no such model."""
    try:
        config = read_json(folder / GIT_CONFIG)
    except (OSError, ValueError):
        return None
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) and kind else None


def read_json(path: Path) -> Any:
    """Read a JSON file of a model."""
    return parse_json(read_regular(path, max_bytes=_TEXT_BYTES).decode())


def check_files(folder: Path) -> None:
    """Check that the library, which opens them by name, finds regular files of bounded size and depth."""
    path = folder / GIT_CONFIG
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix in (".txt", ".jinja", ".model"):
                read_regular(path, max_bytes=_TEXT_BYTES)
        path = folder / GIT_CONFIG
        _check_sizes(read_json(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: {reason}", remedy="copy it anew, or ask who published it") from error


def _check_sizes(config: Any, prefix: str = "") -> None:
    """Raise ValueError if a size of the network has the wrong type or is out of range."""
    if not isinstance(config, dict):
        raise ValueError(f"{prefix or 'the file'} must be an object, got {short(config)}")
    for name, value in config.items():
        limit = _MOST.get(name, LARGEST if name.endswith(_SIZES) else 0)
        if limit and not ((type(value) is int and 1 <= value <= limit) or value is None):
            raise ValueError(f"{prefix}{name} must be an integer between 1 and {limit}, got {short(value)}")
    if "vision_config" in config and not prefix:
        _check_sizes(config["vision_config"], "vision_config.")


def weights_file(folder: Path) -> Path:
    """Return the weights file of the GIT in a folder, preferably safetensors."""
    return _first(folder, GIT_WEIGHTS)


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(f"{folder}: not all of a GIT ({names[0]} is missing)", remedy="copy it anew")
    return path


def read_preprocess(folder: Path) -> Preprocess:
    """Read the preprocessing of the GIT in a folder (``CLIPImageProcessor`` or ``VideoMAEImageProcessor``).

    Raises:
        CheckpointError: the file is missing, damaged, or needs what capvid does not support.
    """
    path = _first(folder, _PREPROCESS)
    try:
        values = read_json(path)
        values = values.get("image_processor", values)
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if not values.get(step, True):
                raise ValueError(f"{step} is off")
        size, crop = _sides(values["size"]), _sides(values.get("crop_size", values["size"]))
        crops = values.get("do_center_crop", True)
        mean, std = (tuple(map(float, values[name])) for name in ("image_mean", "image_std"))
        how: dict[str, Any] = {
            "order": "RGB",
            "scale": round(1 / values.get("rescale_factor", 1 / 255), 9),
            "mean": mean,
            "std": std,
            "interpolation": _FILTERS[values["resample"]],
        }
        if len(mean) != 3 or len(std) != 3:
            raise ValueError("three colours are expected")
        if len(size) == 2 and (not crops or crop == size):
            return Preprocess(size=size, **how)
        if len(size) == 1 and crops and len(set(crop)) == 1:
            return Preprocess(resize=size[0], crop=crop[0], **how)
        raise ValueError(f"size {values['size']}, crop {values.get('crop_size')}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: no way of cutting and resizing frames that capvid knows ({error})",
            remedy="choose another GIT, such as microsoft/git-base-vatex",
        ) from error


def _sides(size: int | Mapping[str, int]) -> tuple[int, ...]:
    """Return the shorter edge, or the side of a square in old files; otherwise height and width."""
    if isinstance(size, int):
        return (size,)
    if "shortest_edge" in size:
        return (int(size["shortest_edge"]),)
    return int(size["height"]), int(size["width"])
