"""CIDEr-D (Vedantam et al., 2015) as the COCO caption evaluation computes it.

For n = 1..4 a caption c is the vector g(c) of its n-grams' weights, count * (ln N - ln max(1, df)), where
N is the number of videos and df the number of videos with the n-gram in a reference. Between a prediction p
and a reference r

    sim_n(p, r) = min(g(p), g(r)) . g(r) / (|g(p)| |g(r)|) * exp(-(len(p) - len(r))^2 / (2 * 6^2))

with the length in bigrams. The score of a video is 10 times the mean over n and over its references; the
corpus score is the mean over videos. With a single video every weight, and so every score, is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from capvid.metrics.metric import Scored, Texts, metric
from capvid.metrics.ngram_index import (
    MAX_N,
    Caption,
    Ints,
    Order,
    ReferenceIndex,
    Shared,
    check_predictions,
    check_references,
    tokenised,
)

SIGMA = 6.0
SCALE = 10.0

Floats = NDArray[np.float64]


class CiderD:
    """CIDEr-D against fixed references; everything that depends on them alone is computed once.

    Args:
        references: for each video its reference captions, texts or lists of tokens. Repeated captions count
            as often as they occur.
        tokenizer: ``builtin``, or ``none`` for texts whose tokens are separated by spaces already. Lists of
            tokens are never tokenised again.
        index: of the references, tokenised, if there is one already.

    Raises:
        DataError: there is no video, or a video without references.
        UsageError: there is no tokenizer of that name.
    """

    def __init__(
        self,
        references: Mapping[str, Sequence[Caption]],
        *,
        tokenizer: str = "builtin",
        index: ReferenceIndex | None = None,
    ) -> None:
        check_references(references)
        self._tokenizer = tokenizer
        self._index = index or ReferenceIndex(
            {
                video: [tokenised(caption, tokenizer=tokenizer) for caption in captions]
                for video, captions in references.items()
            }
        )
        self._max_idf = math.log(len(references))
        self._idf = [self._max_idf - np.log(np.maximum(1, order.videos)) for order in self._index.orders]
        self._weights = [
            self._weigh(order, idf) for order, idf in zip(self._index.orders, self._idf, strict=True)
        ]

    def _weigh(self, order: Order, idf: Floats) -> Floats:
        """For each entry count * idf^2 / the norm of its reference's vector."""
        own = idf[order.gram]
        squares = np.bincount(order.line, (order.count * own) ** 2, minlength=len(self._index.words))
        norms = np.sqrt(squares)[order.line]
        weights: Floats = np.divide(order.count * own**2, norms, out=np.zeros_like(norms), where=norms > 0)
        return weights

    def score(self, predictions: Mapping[str, Caption]) -> tuple[float, dict[str, float]]:
        """Score one caption for each video.

        Args:
            predictions: a caption, text or list of tokens, for every video of the references; captions of
                other videos are left out of account.

        Returns:
            The corpus score, and the score of each video in the references' order; both from 0 to 10.

        Raises:
            DataError: some videos of the references have no prediction; the message names them.
        """
        videos = self._index.rows
        check_predictions(predictions, videos)
        scores = self._score(list(videos.values()), [predictions[video] for video in videos])
        return math.fsum(scores) / len(scores), dict(zip(videos, scores, strict=True))

    def score_captions(self, videos: Sequence[str], captions: Sequence[Caption]) -> list[float]:
        """Score captions, each of the video of the references that stands in its place; each from 0 to 10."""
        return self._score([self._index.rows[video] for video in videos], captions)

    def _score(self, rows: Sequence[int], captions: Sequence[Caption]) -> list[float]:
        """Score captions of videos given by their numbers."""
        texts = [tokenised(caption, tokenizer=self._tokenizer) for caption in captions]
        lengths, orders = self._index.match(rows, texts)
        first = self._index.first
        video = np.asarray(rows, dtype=np.int64)
        many = first[video + 1] - first[video]  # references of each caption's video
        offset = np.cumsum(many) - many  # of each caption in the array of all pairs of caption and reference
        similarity = np.zeros(int(many.sum()))
        for n in range(MAX_N):
            similarity += self._similarity(n, orders[n], video, offset, len(similarity))
        caption = np.repeat(np.arange(len(many)), many)
        reference = np.arange(len(caption)) + np.repeat(first[video] - offset, many)
        delta = np.maximum(0, lengths - 1)[caption] - np.maximum(0, self._index.words - 1)[reference]
        total = np.bincount(caption, similarity * np.exp(-(delta**2) / (2 * SIGMA**2)), minlength=len(many))
        scores: list[float] = (SCALE * total / (MAX_N * many)).tolist()
        return scores

    def _similarity(self, n: int, shared: Shared, video: Ints, offset: Ints, size: int) -> Floats:
        """Return the clipped cosine of each caption with each reference of its video, for one n."""
        known = self._idf[n]
        idf = np.full(len(shared.gram), self._max_idf)
        inside = shared.gram < len(known)
        idf[inside] = known[shared.gram[inside]]
        norms = np.sqrt(np.bincount(shared.line, (shared.count * idf) ** 2, minlength=len(video)))
        line = shared.line[shared.own]
        order = self._index.orders[n]
        products = np.minimum(shared.count[shared.own], order.count[shared.entry])
        norm = norms[line]
        shares = np.divide(
            products * self._weights[n][shared.entry], norm, out=np.zeros_like(norm), where=norm > 0
        )
        pair = offset[line] + order.line[shared.entry] - self._index.first[video[line]]
        summed: Floats = np.bincount(pair, shares, minlength=size).astype(np.float64)
        return summed


@metric("cider")
def cider(texts: Texts) -> Scored:
    """CIDEr-D of the captions."""
    scorer = CiderD(texts.references, tokenizer="none", index=texts.index)
    return {"CIDEr-D": scorer.score(texts.predictions)}
