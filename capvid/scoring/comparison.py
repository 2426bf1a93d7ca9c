"""Comparison of two sets of predictions by paired bootstrap resampling of videos (Koehn, 2004).

Both sets are scored on the same resampled videos, many times. The confidence interval is the central 95 % of
the differences, and the p-value is twice the share of samples in which the difference has the opposite sign
or is 0.

Samples are not scored from their captions: BLEU is computed exactly, from counts summed over the sampled
videos. ROUGE_L, CIDEr-D (with the document frequencies of all videos) and R@n are means over videos. The
corpus score of METEOR is not a mean: its interval and p-value are those of the mean over videos, its
difference is that of the corpus scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

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
    if first.references != second.references:
        raise DataError("the two are not scored on the same videos", remedy="give both the same references")
    second.share_index(first)
    both = [
        score_texts(texts, metrics=metrics, meteor_engine=meteor_engine, meteor_needed=meteor_needed)
        for texts in (first, second)
    ]
    sampled = _sampled_differences(first, second, both, samples, seed)
    ones, others = (scores.corpus for scores in both)
    differences = {}
    for name in ones:
        low, high = np.quantile(sampled[name], (0.025, 0.975)).tolist()
        opposite = 1 + min(int((sampled[name] <= 0).sum()), int((sampled[name] >= 0).sum()))
        p = min(1.0, 2 * opposite / (len(sampled[name]) + 1))
        differences[name] = Difference(difference=ones[name] - others[name], low=low, high=high, p=p)
    by = next((name for name in ("CIDEr-D", "METEOR", "ROUGE_L", "BLEU-4") if name in ones), next(iter(ones)))
    videos = {
        video: values.get(by, 0.0) - both[1].per_video[video].get(by, 0.0)
        for video, values in both[0].per_video.items()
    }
    ordered = dict(sorted(videos.items(), key=lambda item: -abs(item[1])))
    return Comparison(first=both[0], second=both[1], differences=differences, by=by, videos=ordered)


def _sampled_differences(
    first: Texts, second: Texts, both: list[Scores], samples: int, seed: int
) -> dict[str, Floats]:
    """Return the difference of each score in each sample."""
    names = list(both[0].corpus)
    bleus = [name for name in names if name.startswith("BLEU")]
    means = [name for name in names if name not in bleus]
    counts = [bleu_counts(texts.predictions, first.index) for texts in (first, second)] if bleus else []
    sums = [_scores_and_counts(scores.per_video, means) for scores in both]
    blocks: dict[str, list[Floats]] = {name: [] for name in names}
    for weights in _sample_weights(len(first.index.rows), samples, seed):
        if bleus:
            one, other = (bleu_of_counts(weights @ count) for count in counts)
            for n, name in enumerate(bleus):
                blocks[name].append(one[:, n] - other[:, n])
        one, other = (_means(weights @ values) for values in sums)
        for n, name in enumerate(means):
            blocks[name].append(one[:, n] - other[:, n])
    return {name: np.concatenate(parts) for name, parts in blocks.items()}


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
