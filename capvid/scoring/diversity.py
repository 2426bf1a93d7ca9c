"""Diversity of captions: whether a captioner says the same of every video.

Captions are tokenized, their tokens separated by single spaces, as for the other metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """Diversity of the captions of a set of videos.

    Attributes:
        distinct: share of distinct captions.
        vocabulary: number of different words.
        distinct_1: different words per word (Li et al. 2016, distinct-1).
        distinct_2: different bigrams per bigram (distinct-2).
        mean_length: words per caption.
        in_training: share of captions that are training captions as well; None without training captions.
    """

    distinct: float
    vocabulary: int
    distinct_1: float
    distinct_2: float
    mean_length: float
    in_training: float | None = None


def diversity(captions: Iterable[str], training: Iterable[str] | None = None) -> Diversity:
    """Measure the diversity of tokenized captions.

    Args:
        captions: one caption per video, tokens separated by single spaces.
        training: training captions, likewise.
    """
    texts = list(captions)
    sentences = [text.split() for text in texts]
    words = [word for sentence in sentences for word in sentence]
    bigrams = [pair for sentence in sentences for pair in pairwise(sentence)]
    known = None if training is None else set(training)
    count = max(1, len(texts))
    return Diversity(
        distinct=len(set(texts)) / count,
        vocabulary=len(set(words)),
        distinct_1=len(set(words)) / max(1, len(words)),
        distinct_2=len(set(bigrams)) / max(1, len(bigrams)),
        mean_length=len(words) / count,
        in_training=None if known is None else sum(text in known for text in texts) / count,
    )
