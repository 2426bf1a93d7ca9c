"""Scores of dense captioning as the evaluator of the ActivityNet challenge computes them.

Source: Krishna et al. (2017) and ``densevid_eval`` of its first author. With tIoU(p, r) the overlap of two
segments over their union, for each threshold t in :data:`THRESHOLDS` and each video

    recall = max over annotators of |{r : tIoU(p, r) > t for a p}| / |{r}|
    precision = max over annotators of |{p : tIoU(p, r) > t for an r}| / |{p}|

BLEU, METEOR and CIDEr-D of a video are the corpus scores of all pairs (p, r), r by any annotator, with
tIoU(p, r) >= t; a prediction without a pair is scored against text that matches nothing. So CIDEr-D takes its
document frequencies from the pairs of one video. Scores are means over videos, 0 for those without
predictions, and then over the thresholds.

The published versions differ in the text that matches nothing: "abc123!@#" until May 2018 (commit deba7d7,
``evaluate2018`` of PDVC), one random word since June 2019 (9d4045a, ``evaluate2021`` of PDVC). Both are one
token of the PTB tokenizer, but METEOR makes four words of the former, so METEOR of videos with unmatched
predictions differs, and nothing else. See :data:`UNMATCHED`.

SODA_c (Fujita et al., 2020) scores the segments as a story. Predictions p_1..p_P, ordered by start, and
references r_1..r_R are matched one to one in the same order. The matching with the highest sum of
tIoU(p, r) * METEOR(p, r) is found by dynamic programming (Section 3),

    S[i, j] = max(S[i-1, j], S[i, j-1], S[i-1, j-1] + tIoU(p_j, r_i) METEOR(p_j, r_i))

with precision S[R, P] / P, recall S[R, P] / R, and their harmonic mean F. As in version 1.1 of the authors'
program (``--multi_reference``) METEOR, which is not symmetric, takes p as the reference and r as the
candidate, a video counts with the annotator of the highest F, and the scores are means over videos;
references stay in the order of their file, which is that of time for all but a few videos.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capvid.metrics.bleu import bleu_counts, bleu_of_counts
from capvid.metrics.cider import SCALE, SIGMA
from capvid.metrics.ngram_index import MAX_N, Floats, Ints, Order, ReferenceIndex, Shared

if TYPE_CHECKING:  # METEOR needs packages that may be missing
    from capvid.metrics.meteor.meteor_scorer import PairScorer

THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
MAX_SEGMENTS = 1000  # per video, as in the evaluator
UNMATCHED = {"2018": "abc123!@#", "2019": "qzxjvkqzxjvk"}  # one token each, by version of the evaluator
_BITS = 32


class TimedSentence(NamedTuple):
    """A segment in seconds, and its sentence, tokens separated by single spaces."""

    start: float
    end: float
    sentence: str


Segments = Mapping[str, Sequence[TimedSentence]]  # by video


def overlaps(predictions: Sequence[TimedSentence], references: Sequence[TimedSentence]) -> Floats:
    """Return the tIoU of each prediction with each reference, (P, R)."""
    start, end = np.array([each[:2] for each in predictions], dtype=float).reshape(-1, 2, 1).swapaxes(0, 1)
    other_start, other_end = np.array([each[:2] for each in references], dtype=float).reshape(-1, 2).T
    shared = np.maximum(0, np.minimum(end, other_end) - np.maximum(start, other_start))  # (P, R)
    union = np.maximum(end, other_end) - np.minimum(start, other_start)  # or more, if they share nothing
    return np.asarray(shared / (union + 1e-8))  # as in the evaluator, also against division by 0


def overlapping_pairs(
    videos: Iterable[str], predictions: Segments, annotators: Sequence[Segments], unmatched: str
) -> Iterator[tuple[str, set[str]]]:
    """Yield the pairs of sentences that METEOR is needed of, as a candidate and its references.

    The evaluator scores predictions against ``unmatched`` and the references they overlap enough, SODA_c
    scores references against the predictions they overlap at all.
    """
    for video in videos:
        references = [segment for annotator in annotators for segment in annotator.get(video, ())]
        own = predictions.get(video, ())
        values = overlaps(own, references)
        for prediction, row in zip(own, values, strict=True):
            near = np.flatnonzero(row >= min(THRESHOLDS)).tolist()
            yield prediction.sentence, {unmatched, *(references[i].sentence for i in near)}
        for reference, column in zip(references, values.T, strict=True):
            yield reference.sentence, {own[i].sentence for i in np.flatnonzero(column > 0).tolist()}


def dense_scores(
    videos: Sequence[str],
    predictions: Segments,
    annotators: Sequence[Segments],
    *,
    pair_scorer: PairScorer | None = None,
    version: str = "2019",
) -> dict[str, Floats]:
    """Score predicted segments.

    Args:
        videos: ids of the videos.
        predictions: predicted segments by video; those after the first 1000 of a video are ignored.
        annotators: segments of each annotator by video.
        pair_scorer: METEOR of :func:`overlapping_pairs` of these videos; None leaves METEOR out.
        version: version of the evaluator, one of :data:`UNMATCHED`.

    Returns:
        Precision, recall, BLEU-1 to BLEU-4, METEOR and CIDEr-D by name, each (videos, thresholds).
    """
    pairs = _pair_segments(videos, predictions, annotators, UNMATCHED[version])
    return {**_localization(videos, predictions, annotators), **_language(pairs, len(videos), pair_scorer)}


def _localization(
    videos: Sequence[str], predictions: Segments, annotators: Sequence[Segments]
) -> dict[str, Floats]:
    """Return precision and recall of the segments, (videos, thresholds)."""
    precision, recall = (np.zeros((len(videos), len(THRESHOLDS))) for _ in range(2))
    limits = np.array(THRESHOLDS)[:, None, None]
    for row, video in enumerate(videos):
        own = predictions.get(video, ())[:MAX_SEGMENTS]
        for annotator in annotators:
            if own and annotator.get(video):
                close = overlaps(own, annotator[video]) > limits  # (thresholds, P, R)
                precision[row] = np.maximum(precision[row], close.any(2).mean(1))
                recall[row] = np.maximum(recall[row], close.any(1).mean(1))
    return {"precision": precision, "recall": recall}


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a prediction and a reference of its video, with tIoU from the lowest threshold on.

    Each prediction also has a pair with the text that matches nothing, whose ``overlap`` is -1.

    Attributes:
        video: row of the video.
        own: number of the prediction.
        overlap: tIoU.
        texts: sentences of prediction and reference.
    """

    video: Ints
    own: Ints
    overlap: Floats
    texts: list[tuple[str, str]]


def _pair_segments(
    videos: Sequence[str], predictions: Segments, annotators: Sequence[Segments], unmatched: str
) -> _Pairs:
    entries: list[tuple[int, int, float]] = []
    texts: list[tuple[str, str]] = []
    number = 0
    for row, video in enumerate(videos):
        own = predictions.get(video, ())[:MAX_SEGMENTS]
        references = [segment for annotator in annotators for segment in annotator.get(video, ())]
        values = overlaps(own, references)
        for (_, _, sentence), numbers in zip(own, values, strict=True):
            for other in np.flatnonzero(numbers >= min(THRESHOLDS)).tolist():
                entries.append((row, number, numbers[other]))
                texts.append((sentence, references[other].sentence))
            entries.append((row, number, -1.0))
            texts.append((sentence, unmatched))
            number += 1
    video_rows, own_numbers, overlap = zip(*entries, strict=True) if entries else ((), (), ())
    return _Pairs(
        np.array(video_rows, dtype=np.int64), np.array(own_numbers, dtype=np.int64), np.array(overlap), texts
    )


def _language(pairs: _Pairs, videos: int, pair_scorer: PairScorer | None) -> dict[str, Floats]:
    """Return BLEU, METEOR and CIDEr-D of the pairs of each video, (videos, thresholds)."""
    names = [f"BLEU-{n}" for n in range(1, MAX_N + 1)] + ["METEOR"] * (pair_scorer is not None) + ["CIDEr-D"]
    scores = {name: np.zeros((videos, len(THRESHOLDS))) for name in names}
    if not pairs.texts:
        return scores
    index = ReferenceIndex({str(row): [reference] for row, (_, reference) in enumerate(pairs.texts)})
    captions = [prediction for prediction, _ in pairs.texts]
    lengths, orders = index.match(range(len(captions)), captions)
    counts = bleu_counts({str(row): text for row, text in enumerate(captions)}, index)
    delta = lengths - index.words
    similar = SCALE / MAX_N * np.exp(-(delta**2) / (2 * SIGMA**2))
    meteor = None if pair_scorer is None else np.array([pair_scorer.counts(*pair) for pair in pairs.texts])
    for column, threshold in enumerate(THRESHOLDS):
        close = pairs.overlap >= threshold
        matched = np.bincount(pairs.own, close) > 0
        kept = close | ((pairs.overlap < 0) & ~matched[pairs.own])
        rows = np.flatnonzero(kept)
        groups = pairs.video[rows]
        bleu = bleu_of_counts(_sum_rows(counts[rows], groups, videos))
        size = np.bincount(groups, minlength=videos)
        scored = size > 0
        for n in range(MAX_N):
            scores[f"BLEU-{n + 1}"][scored, column] = bleu[scored, n]
        if meteor is not None and pair_scorer is not None:
            sums = _sum_rows(meteor[rows], groups, videos).astype(int).tolist()
            scores["METEOR"][:, column] = [pair_scorer.score(each) for each in sums]
        cider = similar * sum(
            _cosines(order, shared, pairs.video, kept, size)
            for order, shared in zip(index.orders, orders, strict=True)
        )
        total = np.bincount(groups, cider[rows], minlength=videos)
        scores["CIDEr-D"][:, column] = total / np.maximum(1, size)
    return scores


def _sum_rows(values: NDArray[Any], groups: Ints, count: int) -> Floats:
    """Sum rows (N, C) by group, (count, C)."""
    return np.stack([np.bincount(groups, column, minlength=count) for column in values.T], axis=1)


def _cosines(order: Order, shared: Shared, video: Ints, kept: NDArray[np.bool_], size: Ints) -> Floats:
    """Return the clipped cosine of each kept pair (0 for others) for one n, as in CIDEr-D.

    Weights are count * (ln N - ln max(1, df)), with N and df among the kept pairs of the same video.
    """
    entries = np.flatnonzero(kept[order.line])  # n-grams of references
    keys, inverse, frequency = np.unique(
        video[order.line[entries]] << _BITS | order.gram[entries], return_inverse=True, return_counts=True
    )
    max_idf = np.log(np.maximum(1, size))
    weight = np.zeros(len(order.line))
    idf = max_idf[keys >> _BITS] - np.log(frequency)
    weight[entries] = idf[inverse.reshape(-1)]
    own_keys = video[shared.line] << _BITS | shared.gram
    position = np.minimum(np.searchsorted(keys, own_keys), len(keys) - 1)
    known = keys[position] == own_keys if len(keys) else np.zeros(len(own_keys), dtype=bool)
    own_weight = max_idf[video[shared.line]]
    own_weight[known] = idf[position[known]]
    norms = [
        np.sqrt(np.bincount(line, (count * weights) ** 2, minlength=len(video)))
        for line, count, weights in (
            (shared.line, shared.count, own_weight),
            (order.line, order.count, weight),
        )
    ]
    count, other = shared.count[shared.own], order.count[shared.entry]
    products = np.minimum(count, other) * other * weight[shared.entry] ** 2
    dots = np.bincount(shared.line[shared.own], products, minlength=len(video))
    norm = norms[0] * norms[1]
    return np.asarray(np.divide(dots, norm, out=np.zeros(len(video)), where=kept & (norm > 0)))


def soda_c(
    videos: Sequence[str], predictions: Segments, annotators: Sequence[Segments], pair_scorer: PairScorer
) -> Floats:
    """Return precision, recall and F of each video, (videos, 3).

    Args:
        videos: ids of the videos.
        predictions: predicted segments by video; videos without any have 0.
        annotators: segments of each annotator by video.
        pair_scorer: METEOR of :func:`overlapping_pairs` of these videos.
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
                counts = pair_scorer.counts(references[j].sentence, own[i].sentence)
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
