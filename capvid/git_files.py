"""The files of a GIT as transformers publishes it, and what they say. Imports no deep learning library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capvid.errors import CheckpointError
from capvid.features.registry import Preprocess

GIT = "git"  # as transformers calls the type
GIT_CONFIG = "config.json"
GIT_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_PREPROCESS = ("preprocessor_config.json", "processor_config.json")
GIT_REQUIRED = (_PREPROCESS, ("tokenizer.json", "vocab.txt"), GIT_WEIGHTS)  # of each the first that there is
GIT_OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json")
_FILTERS = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers


def model_type(folder: Path) -> str | None:
    """Say of which type the model in a folder is, as transformers calls it; None if it is no such model."""
    try:
        config = json.loads((folder / GIT_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) and kind else None


def weights_file(folder: Path) -> Path:
    """Give the weights of the GIT in a folder; that of safetensors where there are two."""
    return _first(folder, GIT_WEIGHTS)


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{folder}: not all of a GIT ({names[0]} is missing)", remedy="copy it anew")
    return found


def read_preprocess(folder: Path) -> Preprocess:
    """Read how the GIT in a folder has frames cut and resized.

    Raises:
        CheckpointError: the file is missing, damaged, or asks for what capvid does not do.
    """
    path = _first(folder, _PREPROCESS)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return _preprocess(values.get("image_processor", values))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: no way of cutting and resizing frames that capvid knows ({error})",
            remedy="choose another GIT, such as microsoft/git-base-vatex",
        ) from error


def _preprocess(values: Mapping[str, Any]) -> Preprocess:
    """The same of the values of an image processor (``CLIPImageProcessor`` or ``VideoMAEImageProcessor``)."""
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if not values.get(step, True):
            raise ValueError(f"{step} is off")
    size, crop = _sides(values["size"]), _sides(values.get("crop_size", values["size"]))
    cut = values.get("do_center_crop", True)
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
    if len(size) == 2 and (not cut or crop == size):
        return Preprocess(size=size, **how)
    if len(size) == 1 and cut and len(set(crop)) == 1:
        return Preprocess(resize=size[0], crop=crop[0], **how)
    raise ValueError(f"size {values['size']}, crop {values.get('crop_size')}")


def _sides(size: int | Mapping[str, int]) -> tuple[int, ...]:
    """One side of a shorter edge, or of a square in old files; otherwise height and width."""
    if isinstance(size, int):
        return (size,)
    if "shortest_edge" in size:
        return (int(size["shortest_edge"]),)
    return int(size["height"]), int(size["width"])
