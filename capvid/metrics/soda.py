"""SODA_c (Fujita et al., 2020): dense captioning scored as a story.

Predictions p_1..p_P, ordered by start, and references r_1..r_R are matched one to one in the same order. The
matching with the highest sum of tIoU(p, r) * METEOR(p, r) is found by dynamic programming (Section 3),

    S[i, j] = max(S[i-1, j], S[i, j-1], S[i-1, j-1] + tIoU(p_j, r_i) METEOR(p_j, r_i))

with precision S[R, P] / P, recall S[R, P] / R, and their harmonic mean F. As in version 1.1 of the authors'
program (``--multi_reference``) a video counts with the annotator of the highest F, and the scores are means
over videos; references stay in the order of their file, which is that of time for all but a few videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from capvid.metrics.dense_captioning import PairScorer, Segments, overlaps
from capvid.metrics.ngram_index import Floats


def soda_c(
    videos: Sequence[str], predictions: Segments, annotators: Sequence[Segments], pair_scorer: PairScorer
) -> Floats:
    """Return precision, recall and F of each video, (videos, 3).

    Args:
        videos: ids of the videos.
        predictions: predicted segments by video; videos without any have 0.
        annotators: segments of each annotator by video.
        pair_scorer: METEOR, aligned for these videos.
    """
    scores = []
    for video in videos:
        own = sorted(predictions.get(video, ()), key=itemgetter(0))
        best = 0.0, 0.0, 0.0
        for annotator in annotators:
            references = annotator.get(video, ())
            if not own or not references:
                continue
            weights = overlaps(own, references)
            for i, j in np.argwhere(weights > 0).tolist():
                counts = pair_scorer.counts(own[i].sentence, references[j].sentence)
                weights[i, j] *= pair_scorer.score(counts)
            total = ordered_matching(weights)
            precision, recall = total / len(own), total / len(references)
            score = 2 * precision * recall / (precision + recall) if total else 0.0
            best = max(best, (precision, recall, score), key=itemgetter(2))
        scores.append(best)
    return np.array(scores).reshape(-1, 3)


def ordered_matching(weights: Floats) -> float:
    """Return the highest sum of weights (P, R) of a one-to-one matching in the order of both sides."""
    best = np.zeros(weights.shape[1] + 1)
    for row in weights:
        best[1:] = np.maximum(best[1:], best[:-1] + row)
        best = np.maximum.accumulate(best)
    return float(best[-1])
