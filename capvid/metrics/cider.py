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

from capvid.metrics import METRICS, Scored, Texts
from capvid.metrics.ngram_index import (
    BLOCK,
    MAX_N,
    Caption,
    Floats,
    Ints,
    Order,
    ReferenceIndex,
    Shared,
    check_predictions,
    check_references,
    tokenize,
)

SIGMA = 6.0
SCALE = 10.0


class CiderD:
    """CIDEr-D against fixed references, whose weights are computed once.

    Args:
        references: reference captions by video, texts or lists of tokens. Repeated captions count as often as
            they occur.
        tokenizer: ``builtin``, or ``none`` for text that is tokenized already, separated by spaces. Lists of
            tokens are never tokenized again.
        index: index of the tokenized references, if it exists already.

    Raises:
        DataError: no video, or a video without references.
        UsageError: no such tokenizer.
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
                video: [tokenize(caption, tokenizer=tokenizer) for caption in captions]
                for video, captions in references.items()
            }
        )
        self._max_idf = math.log(len(references))
        self._idf = [self._max_idf - np.log(np.maximum(1, order.videos)) for order in self._index.orders]
        self._weights = list(map(self._weigh, self._index.orders, self._idf))

    def _weigh(self, order: Order, idf: Floats) -> Floats:
        """Return count * idf^2 / norm of the reference's vector for each entry."""
        own = idf[order.gram]
        squares = np.bincount(order.line, (order.count * own) ** 2, minlength=len(self._index.words))
        norms = np.sqrt(squares)[order.line]
        weights: Floats = np.divide(order.count * own**2, norms, out=np.zeros_like(norms), where=norms > 0)
        return weights

    def score(self, predictions: Mapping[str, Caption]) -> tuple[float, dict[str, float]]:
        """Score one caption for each video.

        Args:
            predictions: caption, text or list of tokens, by video; other videos are ignored.

        Returns:
            The corpus score, and the score of each video in the order of the references; both from 0 to 10.

        Raises:
            DataError: videos without a prediction; the message names them.
        """
        videos = list(self._index.rows)
        check_predictions(predictions, videos)
        scores: list[float] = []
        for start in range(0, len(videos), BLOCK):
            block = videos[start : start + BLOCK]
            scores += self.score_captions(block, [predictions[video] for video in block])
        return math.fsum(scores) / len(scores), dict(zip(videos, scores, strict=True))

    def score_captions(self, videos: Sequence[str], captions: Sequence[Caption]) -> list[float]:
        """Return the score (0 to 10) of each caption for the video at the same position."""
        rows = [self._index.rows[video] for video in videos]
        texts = [tokenize(caption, tokenizer=self._tokenizer) for caption in captions]
        lengths, orders = self._index.match(rows, texts)
        first = self._index.first
        video = np.asarray(rows, dtype=np.int64)
        counts = first[video + 1] - first[video]  # references of the video of each caption
        offset = np.cumsum(counts) - counts  # of each caption among the pairs
        similarity = np.zeros(int(counts.sum()))
        for n in range(MAX_N):
            similarity += self._similarity(n, orders[n], video, offset, len(similarity))
        caption = np.repeat(np.arange(len(counts)), counts)
        reference = np.arange(len(caption)) + np.repeat(first[video] - offset, counts)
        delta = lengths[caption] - self._index.words[reference]  # without words there is no similarity
        weighted = similarity * np.exp(-(delta**2) / (2 * SIGMA**2))
        total = np.bincount(caption, weighted, minlength=len(counts))
        scores: list[float] = (SCALE * total / (MAX_N * counts)).tolist()
        return scores

    def _similarity(self, n: int, shared: Shared, video: Ints, offset: Ints, size: int) -> Floats:
        """Return the clipped cosine of each caption with each reference of its video, for one n."""
        idf = np.full(len(shared.gram), self._max_idf)
        known = shared.gram < len(self._idf[n])  # n-grams of a reference
        idf[known] = self._idf[n][shared.gram[known]]
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


@METRICS.register("cider")
def cider(texts: Texts) -> Scored:
    """Compute CIDEr-D of the captions."""
    scorer = CiderD(texts.references, tokenizer="none", index=texts.index)
    return {"CIDEr-D": scorer.score(texts.predictions)}
