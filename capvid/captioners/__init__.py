"""One paper, one file. ``build`` makes a captioner by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch.overrides import TorchFunctionMode

from capvid.captioners.base import Captioner, CaptionerConfig, State, Trace
from capvid.captioners.dense_lstm import DenseLSTM
from capvid.captioners.ham import HAM
from capvid.captioners.kv_memory import KeyValueMemory
from capvid.captioners.m3 import M3
from capvid.captioners.mart import MART
from capvid.captioners.soft_attention import SoftAttention
from capvid.captioners.transformer_xl import TransformerXL
from capvid.captioners.vanilla_transformer import VanillaTransformer
from capvid.errors import UsageError
from capvid.limits import GIB, limits

CAPTIONERS: dict[str, type[Captioner]] = {
    cls.name: cls
    for cls in (SoftAttention, M3, HAM, DenseLSTM, KeyValueMemory, VanillaTransformer, TransformerXL, MART)
}

__all__ = [
    "CAPTIONERS",
    "Captioner",
    "CaptionerConfig",
    "State",
    "Trace",
    "build",
    "captioner_class",
    "sketch",
]


def captioner_class(name: str) -> type[Captioner]:
    """The class of the captioner ``name``; UsageError if there is none such."""
    if name not in CAPTIONERS:
        raise UsageError(f"{name}: no such captioner", remedy=f"known are {', '.join(sorted(CAPTIONERS))}")
    return CAPTIONERS[name]


def build(name: str, options: Mapping[str, Any]) -> Captioner:
    """A fresh captioner ``name`` with the configuration in ``options``.

    Raises:
        UsageError: there is none such, or an option that it does not know or that does not fit.
    """
    cls: Any = captioner_class(name)
    captioner: Captioner = cls(cls.config_class.from_dict(options))
    return captioner


class _NoRandomNumbers(TorchFunctionMode):
    """Leave out normal numbers and their scaling: on the meta device both take seconds to import."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "randn":
            return torch.empty(*args, **kwargs)
        if name in ("normal_", "mul", "__mul__"):  # methods, and the function of torch.nn.init
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def sketch(name: str, options: Mapping[str, Any], *, copies: int = 1) -> Captioner:
    """Build a captioner on the meta device: its tensors have names, shapes and types, but no memory.

    Args:
        name: captioner.
        options: its configuration.
        copies: how many times its weights have to fit into memory.

    Raises:
        UsageError: as :func:`build`, or the weights are too large for this machine.
    """
    with torch.device("meta"), _NoRandomNumbers():
        captioner = build(name, options)
    size = copies * sum(tensor.nbytes for tensor in captioner.state_dict().values())
    room = min(limits().model_bytes, psutil.virtual_memory().total)
    if size > room:
        largest = max(options, key=lambda option: options[option] if type(options[option]) is int else 0)
        raise UsageError(
            f"{largest} = {options[largest]}: the captioner takes {size / GIB:.1f} GiB, more than the "
            f"{room / GIB:.1f} GiB that this machine and the limit model-bytes allow",
            remedy="choose smaller sizes",
        )
    return captioner
