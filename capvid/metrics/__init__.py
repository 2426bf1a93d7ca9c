"""Caption metrics: one module each, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from capvid.utils.registry import Registry

if TYPE_CHECKING:
    from capvid.metrics.ngram_index import ReferenceIndex

Scored = Mapping[str, tuple[float, Mapping[str, float]]]  # by score: the corpus score, and that of each video


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Tokenized captions and their references, ready to be scored.

    Attributes:
        predictions: one caption per video of the references, tokens separated by single spaces.
        references: reference captions of each video, likewise.
        sentences: predicted sentences of paragraphs, for the videos of R@n.
    """

    predictions: Mapping[str, str]
    references: Mapping[str, Sequence[str]]
    sentences: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def index(self) -> ReferenceIndex:
        """N-gram index of the references."""
        from capvid.metrics.ngram_index import ReferenceIndex

        return ReferenceIndex(self.references)

    def share_index(self, other: Texts) -> None:
        """Use the index of other texts with the same references."""
        vars(self)["index"] = other.index


@dataclass(frozen=True)
class Metric:
    """A metric: a function from :class:`Texts` to scores by name, and whether it needs paragraphs."""

    name: str
    compute: Callable[..., Scored]
    paragraphs_only: bool = False


METRICS = Registry("metric", "capvid.metrics", Metric)
