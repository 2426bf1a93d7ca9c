"""capvid: videos into sentences with memory-augmented captioners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Caption", "CaptionPipeline", "CaptionResult", "CapvidError", "WordScore", "__version__", "load"]

if TYPE_CHECKING:
    from capvid.errors import CapvidError
    from capvid.loading import load
    from capvid.pipeline import CaptionPipeline
    from capvid.results import Caption, CaptionResult, WordScore

_HOMES = {
    "Caption": "capvid.results",
    "CaptionPipeline": "capvid.pipeline",
    "CaptionResult": "capvid.results",
    "CapvidError": "capvid.errors",
    "WordScore": "capvid.results",
    "load": "capvid.loading",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that ``import capvid`` stays light."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'capvid' has no attribute {name!r}")
