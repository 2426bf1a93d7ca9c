"""Turn videos into sentences with memory-augmented captioners.

Example:
    >>> import capvid
    >>> captioner = capvid.load("m3")
    >>> captioner("video.mp4")
    'a man is playing a guitar'
    >>> for result in captioner.stream(["a.mp4", "b.mp4"]):
    ...     print(result.path, result.captions[0].text)

``capvid.extract`` computes features, ``capvid.train`` trains a captioner and ``capvid.score`` scores captions
against references.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from capvid.version import __version__

if TYPE_CHECKING:
    from capvid.decoding.caption_generator import Caption, WordScore
    from capvid.errors import CapvidError
    from capvid.features.extraction import ExtractionResult, extract
    from capvid.output.results import CaptionResult, Segment
    from capvid.pipeline import CaptionPipeline, load
    from capvid.scoring.scorer import Scores, score
    from capvid.training.runs import TrainingResult, train

_MODULES = {
    "Caption": "decoding.caption_generator",
    "CaptionPipeline": "pipeline",
    "CaptionResult": "output.results",
    "CapvidError": "errors",
    "ExtractionResult": "features.extraction",
    "Scores": "scoring.scorer",
    "Segment": "output.results",
    "TrainingResult": "training.runs",
    "WordScore": "decoding.caption_generator",
    "extract": "features.extraction",
    "load": "pipeline",
    "score": "scoring.scorer",
    "train": "training.runs",
}

__all__ = [
    "Caption",
    "CaptionPipeline",
    "CaptionResult",
    "CapvidError",
    "ExtractionResult",
    "Scores",
    "Segment",
    "TrainingResult",
    "WordScore",
    "__version__",
    "extract",
    "load",
    "score",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``import capvid`` stays light."""
    if name not in _MODULES:
        raise AttributeError(f"module 'capvid' has no attribute {name!r}")
    return getattr(import_module(f"capvid.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
