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
    known = None if training is None else set(training)
    texts: set[str] = set()
    words: set[str] = set()
    bigrams: set[tuple[str, str]] = set()
    num_texts = num_words = num_bigrams = num_known = 0
    for text in captions:
        sentence = text.split()
        texts.add(text)
        words.update(sentence)
        bigrams.update(pairwise(sentence))
        num_texts += 1
        num_words += len(sentence)
        num_bigrams += max(0, len(sentence) - 1)
        num_known += known is not None and text in known
    count = max(1, num_texts)
    return Diversity(
        distinct=len(texts) / count,
        vocabulary=len(words),
        distinct_1=len(words) / max(1, num_words),
        distinct_2=len(bigrams) / max(1, num_bigrams),
        mean_length=num_words / count,
        in_training=None if known is None else num_known / count,
    )
