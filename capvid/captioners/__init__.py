"""One paper, one file. ``build`` makes a captioner by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

CAPTIONERS: dict[str, type[Captioner]] = {
    cls.name: cls
    for cls in (SoftAttention, M3, HAM, DenseLSTM, KeyValueMemory, VanillaTransformer, TransformerXL, MART)
}

__all__ = ["CAPTIONERS", "Captioner", "CaptionerConfig", "State", "Trace", "build", "captioner_class"]


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
