"""Reading of safetensors files and PyTorch checkpoints; nothing but tensors is ever unpickled."""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from capvid.errors import WeightsError
from capvid.utils.files import open_regular
from capvid.utils.validation import GIB, limits

_MAX_TENSORS = 50_000
_MAX_EXPANSION = 10  # times the size of a zip file; torch does not compress

# names under which checkpoints keep the tensors, beside an epoch, an optimizer and so on
_MAX_NESTS = 100
_NESTS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, on the CPU, by name.

    Args:
        path: a safetensors file (``.safetensors``), or a checkpoint of ``torch.save`` with tensors at the top
            level or under one of the usual names.

    Raises:
        WeightsError: no such file, damaged, too large, without tensors, or with more than tensors and plain
            values.
    """
    _check_file(path)
    if path.suffix != ".safetensors":
        return _read_checkpoint(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            _check_count(path, len(file.keys()))
        return load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise WeightsError(
            f"{path}: not a readable safetensors file ({error})", remedy="download the weights again"
        ) from error


def load_plain(path: Path, stand_ins: Mapping[str, type] = MappingProxyType({})) -> Any:
    """Read a checkpoint of ``torch.save`` that holds tensors, plain values and named classes.

    Args:
        path: the file.
        stand_ins: inert class to build for each ``module.Class`` in the file.

    Raises:
        WeightsError: as :func:`read_tensors`.
    """
    _check_file(path)
    return _unpickle(path, stand_ins)


def _check_file(path: Path) -> None:
    """Raise WeightsError if there is no such file, or it exceeds the limits for weights."""
    try:
        with open_regular(path) as file:
            _check_size(path, file, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file") from None
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror or error})") from error


def _check_size(path: Path, file: BinaryIO, size: int) -> None:
    """Raise WeightsError if a file, or the contents of a zip file, exceed the limits for weights."""
    entries: list[zipfile.ZipInfo] = []
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise WeightsError(
            f"{path}: not a readable checkpoint ({error})", remedy="download the file again"
        ) from error
    _check_count(path, len(entries))
    unpacked = max(size, sum([entry.file_size for entry in entries]))
    if unpacked > limits().model_bytes or unpacked > _MAX_EXPANSION * size + GIB:
        raise WeightsError(
            f"{path}: holds {unpacked} bytes, more than weights may",
            remedy="see the limits in the configuration",
        )


def _check_count(path: Path, count: int) -> None:
    if count > _MAX_TENSORS:
        raise WeightsError(f"{path}: {count} tensors, more than any network has ({_MAX_TENSORS})")


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    tensors = _collect_tensors(_unpickle(path, {}), set())
    _check_count(path, len(tensors))
    if not tensors:
        raise WeightsError(f"{path}: there are no tensors in it", remedy="give the checkpoint of a network")
    return tensors


def _unpickle(path: Path, stand_ins: Mapping[str, type]) -> Any:
    names: Any = [(cls, name) for name, cls in stand_ins.items()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols that torch does not expect
            with torch.serialization.safe_globals(names):
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({match[1]})" if match else ""
        raise WeightsError(
            f"{path}: holds more than tensors{what}, and nothing else is ever unpickled",
            remedy="ask for a file of the tensors alone",
        ) from error
    except Exception as error:  # torch's reader raises all kinds of errors for damaged files
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if "weights_only" in str(error):  # torch suggests unpickling everything, which runs foreign code
            reason = "its format can hold more than tensors, and nothing else is ever unpickled"
        raise WeightsError(
            f"{path}: not a readable checkpoint ({reason})", remedy="download the file again"
        ) from error


def _collect_tensors(content: Any, visited: set[int]) -> dict[str, Tensor]:
    """Return the tensors by name in unpickled content, nested under a usual name or not."""
    if not isinstance(content, Mapping) or id(content) in visited or len(visited) > _MAX_NESTS:
        return {}
    visited.add(id(content))  # a pickled dictionary may hold itself
    for name in _NESTS:
        if nested := _collect_tensors(content.get(name), visited):
            return nested
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
