"""BLEU-1 to BLEU-4 (Papineni et al., 2002) as the COCO caption evaluation computes them.

    BLEU-k = min(1, exp(1 - r / c)) * (p_1 ... p_k)^(1/k)

p_n is the share of a prediction's n-grams that occur in a reference, each at most as often as in the
reference with most of them; c is the length of the prediction and r that of the reference closest to it (the
shorter of two). The corpus score comes from counts and lengths summed over videos. The small constants of the
published code are kept: they decide the score where a count is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from capvid.metrics import METRICS, Scored, Texts
from capvid.metrics.ngram_index import BLOCK, MAX_N, Floats, ReferenceIndex

_TINY = 1e-15
_SMALL = 1e-9


def bleu_scores(
    predictions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    index: ReferenceIndex | None = None,
) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """Compute BLEU-1..4 of tokenized captions.

    Args:
        predictions: caption by video, tokens separated by white space.
        references: reference captions by video, likewise.
        index: index of the references, if it exists already.

    Returns:
        The four corpus scores, and the four scores of each video; from 0 to 1.
    """
    counts = bleu_counts(predictions, index or ReferenceIndex(references))
    videos = bleu_of_counts(counts)
    corpus = bleu_of_counts(counts.sum(axis=0))
    return tuple(corpus.tolist()), {
        video: tuple(row) for video, row in zip(references, videos.tolist(), strict=True)
    }


def bleu_counts(predictions: Mapping[str, str], index: ReferenceIndex) -> Floats:
    """Return the counts that BLEU needs per video; they may be summed over videos.

    Returns:
        (videos, 10): length of the prediction, length of the closest reference, clipped matches for
        n = 1..4, and n-grams of the prediction for n = 1..4.
    """
    videos = list(index.rows)
    blocks = []
    for start in range(0, len(videos), BLOCK):
        rows = range(start, min(start + BLOCK, len(videos)))
        lengths, orders = index.match(rows, [predictions[video] for video in videos[start : start + BLOCK]])
        first = index.first[start : start + BLOCK + 1]
        words, group = index.words[first[0] : first[-1]], np.repeat(np.arange(len(rows)), np.diff(first))
        nearest = np.lexsort((words, np.abs(words - lengths[group]), group))
        correct, total = [], []
        for n, (order, shared) in enumerate(zip(index.orders, orders, strict=True)):
            limit = np.zeros(len(shared.line), dtype=np.int64)
            np.maximum.at(limit, shared.own, order.count[shared.entry])
            clipped = np.minimum(shared.count, limit)
            correct.append(np.bincount(shared.line, clipped, minlength=len(rows)))
            total.append(np.maximum(0, lengths - n))
        closest = words[nearest[first[:-1] - first[0]]]
        blocks.append(np.stack([lengths, closest, *correct, *total], axis=1).astype(float))
    return np.concatenate(blocks) if blocks else np.zeros((0, 2 + 2 * MAX_N))


def bleu_of_counts(counts: Floats) -> Floats:
    """Return BLEU-1..4 (..., 4) of counts (..., 10) as from :func:`bleu_counts`."""
    length, closest = counts[..., 0] + _TINY, counts[..., 1] + _SMALL
    correct, total = counts[..., 2 : 2 + MAX_N] + _TINY, counts[..., 2 + MAX_N :] + _SMALL
    ratio = (length / closest)[..., None]
    penalty = np.exp(np.minimum(0, 1 - 1 / ratio))
    product: Floats = np.cumprod(correct / total, axis=-1) ** (1 / np.arange(1, MAX_N + 1)) * penalty
    return product


@METRICS.register("bleu")
def bleu(texts: Texts) -> Scored:
    """Compute BLEU-1 to BLEU-4 of the captions."""
    means, videos = bleu_scores(texts.predictions, texts.references, texts.index)
    return {
        f"BLEU-{n + 1}": (mean, {video: values[n] for video, values in videos.items()})
        for n, mean in enumerate(means)
    }
