"""Compute device, precision and memory policy; imports torch only when a function needs it."""

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

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt(3)
_MAX_KEPT_BLOCK = 1 << 30  # bytes; larger blocks are returned to the system as usual
_MAX_KEPT_BLOCK_ANYWHERE = 32 << 20  # accepted by every version of glibc
_HEAP_GROWTH = 64 << 20  # bytes

# With one of these in the environment the user has decided.
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a name.

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
        raise UsageError(f"{name}: no such device", remedy="use auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"{name}: torch finds no CUDA device", remedy="use --device cpu")
        count = torch.cuda.device_count()
        if int(number or 0) >= count:
            available = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            raise UsageError(f"{name}: no such CUDA device", remedy=f"there is {available}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("mps: this machine has no MPS device", remedy="use --device cpu")
    return torch.device(name)


def keep_freed_memory() -> bool:
    """Tune glibc malloc to reuse freed blocks, unless the user set malloc variables; return success."""
    try:
        is_glibc = bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, OSError, ValueError):  # another system
        return False
    if not is_glibc or not os.environ.keys().isdisjoint(MALLOC_VARIABLES):
        return False
    set_option = ctypes.CDLL(None).mallopt
    kept = set_option(_MMAP_THRESHOLD, _MAX_KEPT_BLOCK) or set_option(
        _MMAP_THRESHOLD, _MAX_KEPT_BLOCK_ANYWHERE
    )
    return bool(kept and set_option(_TRIM_THRESHOLD, _MAX_KEPT_BLOCK) and set_option(_TOP_PAD, _HEAP_GROWTH))


def release_memory() -> None:
    """Return freed memory to the system (glibc).

    Batches of varying lengths would otherwise fragment the heap until nothing fits into the gaps.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def has_fast_path(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether networks run in ``dtype`` about as fast as in float32, or faster.

    The variables that restrict torch and oneDNN to fewer instructions are respected.
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
    if platform.machine().lower() in ("x86_64", "amd64"):
        isa_limits = {os.environ.get(name, "").upper() for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")}
        limited = not isa_limits.isdisjoint(("SSE41", "AVX", "AVX2", "AVX2_VNNI"))
        if limited or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
            return False
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")())


def check_precision(dtype: torch.dtype, device: torch.device, module: nn.Module, *, remedy: str) -> None:
    """Raise UsageError for a precision without a fast path on the device, naming ``remedy``."""
    if not has_fast_path(dtype, device):
        hardware = "this processor" if device.type == "cpu" else f"this {device.type} device"
        name, family = str(dtype).removeprefix("torch."), layer_family(module)
        raise UsageError(
            f"{hardware} has no instructions for {name}, and {family} would take {_SLOWDOWN[family]}",
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


def free_memory() -> tuple[int, str]:
    """Return the bytes of memory that networks can use, and where: on the GPUs, or else in this machine."""
    import psutil
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        free = sum(torch.cuda.mem_get_info(number)[0] for number in range(count))
        return free, "on the GPU" if count == 1 else f"on {count} GPUs"
    return int(psutil.virtual_memory().available), "of RAM"
