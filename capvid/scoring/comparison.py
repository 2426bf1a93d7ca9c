"""Comparison of sets of predictions by paired bootstrap resampling of videos (Koehn, 2004).

All sets are scored on the same resampled videos, many times. The confidence interval is the central 95 % of
the scores, or of their differences, and the p-value is twice the share of samples in which the difference has
the opposite sign or is 0.

Samples are not scored from their captions: BLEU is computed exactly, from counts summed over the sampled
videos. ROUGE_L, CIDEr-D (with the document frequencies of all videos) and R@n are means over videos. The
corpus score of METEOR is not a mean: its interval and p-value are those of the mean over videos, its
difference is that of the corpus scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from capvid.errors import DataError
from capvid.metrics import Texts
from capvid.metrics.bleu import bleu_counts, bleu_of_counts
from capvid.metrics.ngram_index import Floats
from capvid.scoring.scorer import CAPTION_METRICS, Scores, score_texts

SAMPLES = 1000
SEED = 0
_BLOCK_SIZE = 1 << 22  # counts that are held at once


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of one score (first minus second), its 95 % confidence interval, and p-value."""

    difference: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sets of predictions against the same references.

    Attributes:
        first: scores of the first set.
        second: scores of the second set.
        differences: differences by score.
        by: score by which videos are compared.
        videos: difference of each video in it, first minus second, largest first.
    """

    first: Scores
    second: Scores
    differences: dict[str, Difference]
    by: str
    videos: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Several sets of predictions against the same references, best first.

    Attributes:
        by: score by which they are ordered.
        order: indices of the sets, best first.
        scores: scores of each set, as they were given.
        intervals: 95 % confidence interval of each score, of each set as they were given.
        neighbours: difference of each set in ``order`` from the next, in the score ``by``.
    """

    by: str
    order: list[int]
    scores: list[Scores]
    intervals: list[dict[str, tuple[float, float]]]
    neighbours: list[Difference]


def rank(
    systems: Sequence[Texts],
    *,
    metrics: Collection[str] = CAPTION_METRICS,
    meteor_engine: str = "auto",
    meteor_needed: bool = True,
    samples: int = SAMPLES,
    seed: int = SEED,
) -> Ranking:
    """Score and order sets of predictions; arguments and errors as for :func:`compare`."""
    options = {"metrics": metrics, "meteor_engine": meteor_engine, "meteor_needed": meteor_needed}
    scores, sampled = _score_and_sample(systems, options, samples, seed)
    by = _main_score(scores[0])
    order = sorted(range(len(systems)), key=lambda n: -scores[n].corpus[by])
    return Ranking(
        by=by,
        order=order,
        scores=scores,
        intervals=[{name: _interval(values) for name, values in one.items()} for one in sampled],
        neighbours=[
            _difference(scores[n].corpus[by] - scores[m].corpus[by], sampled[n][by] - sampled[m][by])
            for n, m in pairwise(order)
        ],
    )


def compare(
    first: Texts,
    second: Texts,
    *,
    metrics: Collection[str] = CAPTION_METRICS,
    meteor_engine: str = "auto",
    meteor_needed: bool = True,
    samples: int = SAMPLES,
    seed: int = SEED,
) -> Comparison:
    """Score two sets of predictions, with confidence intervals of their differences.

    Args:
        first: captions and references.
        second: other captions with the same references.
        metrics: as for :func:`capvid.scoring.scorer.score_texts`, as are the next two.
        meteor_engine: METEOR implementation.
        meteor_needed: whether a missing METEOR is an error.
        samples: number of bootstrap samples.
        seed: random seed of the samples.

    Raises:
        DataError: the references differ.
        UsageError: no such metric or engine.
        MetricError: METEOR is not installed.
    """
    options = {"metrics": metrics, "meteor_engine": meteor_engine, "meteor_needed": meteor_needed}
    both, (sampled, others) = _score_and_sample([first, second], options, samples, seed)
    differences = {
        name: _difference(both[0].corpus[name] - both[1].corpus[name], sampled[name] - others[name])
        for name in both[0].corpus
    }
    by = _main_score(both[0])
    videos = {
        video: values.get(by, 0.0) - both[1].per_video[video].get(by, 0.0)
        for video, values in both[0].per_video.items()
    }
    ordered = dict(sorted(videos.items(), key=lambda item: -abs(item[1])))
    return Comparison(first=both[0], second=both[1], differences=differences, by=by, videos=ordered)


def _score_and_sample(
    systems: Sequence[Texts], options: dict[str, Any], samples: int, seed: int
) -> tuple[list[Scores], list[dict[str, Floats]]]:
    """Score each set of predictions, on all videos and on each sample of them."""
    first = systems[0]
    for texts in systems[1:]:
        if texts.references != first.references:
            raise DataError("not all are scored on the same videos", remedy="give all the same references")
        texts.share_index(first)
    scores = [score_texts(texts, **options) for texts in systems]
    return scores, [
        _sampled_scores(texts, one, samples, seed) for texts, one in zip(systems, scores, strict=True)
    ]


def _sampled_scores(texts: Texts, scores: Scores, samples: int, seed: int) -> dict[str, Floats]:
    """Return each score in each sample, (samples,); samples are the same for all sets of predictions."""
    names = list(scores.corpus)
    bleus = [name for name in names if name.startswith("BLEU")]
    means = [name for name in names if name not in bleus]
    counts = bleu_counts(texts.predictions, texts.index) if bleus else None
    sums = _scores_and_counts(scores.per_video, means)
    blocks: dict[str, list[Floats]] = {name: [] for name in names}
    for weights in _sample_weights(len(texts.index.rows), samples, seed):
        if counts is not None:
            for name, values in zip(bleus, bleu_of_counts(weights @ counts).T, strict=False):
                blocks[name].append(values)
        for name, values in zip(means, _means(weights @ sums).T, strict=True):
            blocks[name].append(values)
    return {name: np.concatenate(parts) for name, parts in blocks.items()}


def _main_score(scores: Scores) -> str:
    names = list(scores.corpus)
    return next((name for name in ("CIDEr-D", "METEOR", "ROUGE_L", "BLEU-4") if name in names), names[0])


def _interval(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, (0.025, 0.975)).tolist()
    return low, high


def _difference(difference: float, sampled: Floats) -> Difference:
    low, high = _interval(sampled)
    opposite = 1 + min(int((sampled <= 0).sum()), int((sampled >= 0).sum()))
    return Difference(
        difference=difference, low=low, high=high, p=min(1.0, 2 * opposite / (len(sampled) + 1))
    )


def _sample_weights(videos: int, samples: int, seed: int) -> Iterator[Floats]:
    """Yield the count of each video in each sample, (block, videos), block by block."""
    generator = np.random.default_rng(seed)
    block_length = max(1, _BLOCK_SIZE // videos)
    for start in range(0, samples, block_length):
        block = min(block_length, samples - start)
        indices = generator.integers(0, videos, (block, videos)) + np.arange(block)[:, None] * videos
        yield np.bincount(indices.ravel(), minlength=block * videos).reshape(block, videos).astype(float)


def _scores_and_counts(per_video: Mapping[str, Mapping[str, float]], names: list[str]) -> Floats:
    """Return the scores of each video, then whether it has each: (videos, 2 * scores)."""
    rows = [
        [*(video.get(name, 0.0) for name in names), *(float(name in video) for name in names)]
        for video in per_video.values()
    ]
    return np.array(rows)


def _means(sums: Floats) -> Floats:
    """Return the mean scores from sums and counts."""
    total, count = np.split(sums, 2, axis=1)
    means: Floats = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    return means
