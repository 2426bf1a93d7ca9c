"""Which device to compute on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from typing import TYPE_CHECKING

from capvid.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

# how much longer processors take in half precision that they have no instructions for (AVX2, one core)
_SLOWDOWN = {
    "3D convolutions": "minutes for a clip",
    "2D convolutions": "20 times as long",
    "LSTMs": "several times as long, if they run at all",
    "matrix products": "40 times as long",
}

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


def has_fast_path(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether networks compute in ``dtype`` about as fast as in float32, or faster.

    On processors that is so for all kinds of layers or for none: oneDNN has kernels for a type or has not.
    The variables that restrict torch and oneDNN to fewer instructions are obeyed.
    """
    import torch

    if dtype not in (torch.float16, torch.bfloat16):
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("x86_64", "amd64") and not _has_avx512():
        return False
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")())


def _has_avx512() -> bool:
    import torch

    names = (os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"))
    limited = any(name.upper() in ("SSE41", "AVX", "AVX2", "AVX2_VNNI") for name in names)
    return not limited and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def check_precision(dtype: torch.dtype, device: torch.device, module: nn.Module, *, remedy: str) -> None:
    """Refuse a precision in which a network would take far longer than in float32.

    Args:
        dtype: of its numbers.
        device: where it computes.
        module: the network.
        remedy: what to do instead.

    Raises:
        UsageError: the device has no fast path for the precision.
    """
    if not has_fast_path(dtype, device):
        place = "this processor" if device.type == "cpu" else f"this {device.type} device"
        name, family = str(dtype).removeprefix("torch."), layer_family(module)
        raise UsageError(
            f"{place} has no instructions for {name}, and {family} would take {_SLOWDOWN[family]}",
            remedy=remedy,
        )


def layer_family(module: nn.Module) -> str:
    """Name the kind of layers that a network spends its time in."""
    from torch import nn

    ranks = {parameter.ndim for parameter in module.parameters()}
    for rank, family in ((5, "3D convolutions"), (4, "2D convolutions")):
        if rank in ranks:
            return family
    recurrent = any(isinstance(part, nn.RNNBase | nn.RNNCellBase) for part in module.modules())
    return "LSTMs" if recurrent else "matrix products"
