"""One paper, one file. ``build`` makes a captioner by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capvid.captioners.base import Captioner, CaptionerConfig, State, Trace
from capvid.captioners.m3 import M3
from capvid.captioners.soft_attention import SoftAttention
from capvid.errors import UsageError

CAPTIONERS: dict[str, type[Captioner]] = {cls.name: cls for cls in (SoftAttention, M3)}

__all__ = ["CAPTIONERS", "Captioner", "CaptionerConfig", "State", "Trace", "build"]


def build(name: str, options: Mapping[str, Any]) -> Captioner:
    """A fresh captioner ``name`` with the configuration in ``options``; UsageError if there is none such."""
    if name not in CAPTIONERS:
        raise UsageError(f"{name}: no such captioner", remedy=f"known are {', '.join(sorted(CAPTIONERS))}")
    cls: Any = CAPTIONERS[name]
    captioner: Captioner = cls(cls.config_class.from_dict(options))
    return captioner
