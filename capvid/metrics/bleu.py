"""BLEU-1 to BLEU-4 (Papineni et al., 2002) as the COCO caption evaluation computes them.

    BLEU-k = min(1, exp(1 - r / c)) * (p_1 ... p_k)^(1/k)

p_n is the share of a prediction's n-grams that occur in a reference, each at most as often as in the
reference with most of them; c is the length of the prediction and r that of the reference closest to it (the
shorter of two). The corpus score comes from counts and lengths summed over videos. The small constants of the
published code are kept: they decide the score where a count is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from capvid.metrics.ngrams import MAX_N, NGram, ngram_counts

_TINY = 1e-15
_SMALL = 1e-9


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """What BLEU needs to know of one prediction, or of all."""

    length: int
    closest: int  # length of the closest reference
    correct: tuple[int, ...]  # clipped matches for n = 1..4
    total: tuple[int, ...]  # n-grams of the prediction for n = 1..4

    def scores(self) -> tuple[float, ...]:
        ratio = (self.length + _TINY) / (self.closest + _SMALL)
        penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
        product, scores = 1.0, []
        for n, (correct, total) in enumerate(zip(self.correct, self.total, strict=True), start=1):
            product *= (correct + _TINY) / (total + _SMALL)
            scores.append(product ** (1 / n) * penalty)
        return tuple(scores)


def bleu_scores(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """BLEU-1..4 of tokenised captions.

    Args:
        predictions: for each video of the references a caption, its tokens separated by white space.
        references: for each video its reference captions, likewise.

    Returns:
        The four corpus scores, and the four scores of each video; from 0 to 1.
    """
    counts = {video: _count(predictions[video], captions) for video, captions in references.items()}
    return _sum(counts.values()).scores(), {video: one.scores() for video, one in counts.items()}


def _count(prediction: str, references: Sequence[str]) -> _Counts:
    words = prediction.split()
    orders = ngram_counts(words)
    most: dict[NGram, int] = {}
    lengths = set()
    for line in set(references):  # a repeated reference changes nothing
        reference = line.split()
        lengths.add(len(reference))
        for order, wanted in zip(ngram_counts(reference), orders, strict=True):
            for gram in order.keys() & wanted.keys():
                most[gram] = max(most.get(gram, 0), order[gram])
    return _Counts(
        length=len(words),
        closest=min(lengths, key=lambda length: (abs(length - len(words)), length)),
        correct=tuple(
            sum(min(count, most.get(gram, 0)) for gram, count in order.items()) for order in orders
        ),
        total=tuple(max(0, len(words) - n) for n in range(MAX_N)),
    )


def _sum(counts: Iterable[_Counts]) -> _Counts:
    every = list(counts)
    return _Counts(
        length=sum(one.length for one in every),
        closest=sum(one.closest for one in every),
        correct=tuple(sum(one.correct[n] for one in every) for n in range(MAX_N)),
        total=tuple(sum(one.total[n] for one in every) for n in range(MAX_N)),
    )
