"""Files of tensors: safetensors, and PyTorch's checkpoints, of which nothing but tensors is ever read."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capvid.errors import WeightsError

# under which names checkpoints keep the tensors, beside an epoch, an optimizer and so on
_NESTS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, on the CPU, by their names.

    Args:
        path: a safetensors file (``.safetensors``), or what ``torch.save`` writes, with tensors at the top
            or under one of the usual names.

    Raises:
        WeightsError: no such file, damaged, without tensors, or with more than tensors and plain values.
    """
    if not path.is_file():
        raise WeightsError(f"{path}: no such file")
    return _safetensors(path) if path.suffix == ".safetensors" else _checkpoint(path)


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: not a readable safetensors file ({error})", remedy="download the weights again"
        ) from error


def _checkpoint(path: Path) -> dict[str, Tensor]:
    try:
        found = _tensors(torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({match[1]})" if match else ""
        raise WeightsError(
            f"{path}: holds more than tensors{what}, and nothing else is ever unpickled",
            remedy="ask for a file of the tensors alone",
        ) from error
    except Exception as error:  # torch's reader raises whatever a damaged file leads it to
        lines = str(error).strip().splitlines()
        raise WeightsError(
            f"{path}: not a readable checkpoint ({lines[0] if lines else type(error).__name__})",
            remedy="download the file again",
        ) from error
    if not found:
        raise WeightsError(f"{path}: there are no tensors in it", remedy="give the checkpoint of a network")
    return found


def _tensors(content: Any) -> dict[str, Tensor]:
    """Find the tensors by name in what was unpickled, nested under a usual name or not."""
    if not isinstance(content, Mapping):
        return {}
    for name in _NESTS:
        if nested := _tensors(content.get(name)):
            return nested
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
