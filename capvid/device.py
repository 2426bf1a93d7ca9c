"""Which device to compute on."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

from capvid.errors import UsageError

if TYPE_CHECKING:
    import torch

DEVICE_NAMES = "auto, cpu, cuda, cuda:N or mps"


def resolve_device(name: str) -> torch.device:
    """Give the torch device that a name stands for.

    Args:
        name: ``auto`` (CUDA, else Apple's MPS, else the CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises:
        UsageError: the name is none of these, or this machine has no such device.
    """
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, colon, number = name.partition(":")
    if kind not in {"cpu", "cuda", "mps"} or (colon and (kind != "cuda" or not number.isdecimal())):
        raise UsageError(f"{name}: no such device", remedy=f"use {DEVICE_NAMES}")
    if kind == "cuda":
        _check_cuda(name, int(number) if number else 0)
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("mps: this machine has no MPS device", remedy="use --device cpu")
    return torch.device(name)


def _check_cuda(name: str, index: int) -> None:
    """Raise UsageError unless CUDA device ``index`` is there."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(f"{name}: torch finds no CUDA device", remedy="use --device cpu")
    count = torch.cuda.device_count()
    if index >= count:
        there = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UsageError(f"{name}: no such CUDA device", remedy=f"there is {there}")


def release_memory() -> None:
    """Give freed memory back to the system, where the C library keeps it for itself (glibc).

    Buffers of ever different sizes, as batches of different lengths need them, would otherwise fill the heap
    with gaps that nothing fits into.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
