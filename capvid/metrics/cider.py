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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capvid.metrics.ngrams import (
    MAX_N,
    Caption,
    NGram,
    check_predictions,
    check_references,
    ngram_counts,
    tokenised,
)

SIGMA = 6.0
SCALE = 10.0

# For one n-gram of a video: (reference, its count there, count * idf^2 / norm of that reference's vector).
Postings = list[tuple[int, int, float]]


@dataclass(frozen=True)
class _Video:
    """References of one video, indexed by n-gram."""

    postings: dict[NGram, Postings]
    lengths: list[int]  # bigrams of each reference


class CiderD:
    """CIDEr-D against fixed references; everything that depends on them alone is computed once.

    Args:
        references: for each video its reference captions, texts or lists of tokens. Repeated captions count
            as often as they occur.
        tokenizer: ``builtin``, or ``none`` for texts whose tokens are separated by spaces already. Lists of
            tokens are never tokenised again.

    Raises:
        DataError: there is no video, or a video without references.
        UsageError: there is no tokenizer of that name.
    """

    def __init__(self, references: Mapping[str, Sequence[Caption]], *, tokenizer: str = "builtin") -> None:
        check_references(references)
        self._tokenizer = tokenizer
        self._max_idf = math.log(len(references))
        df: Counter[NGram] = Counter()
        raw: dict[str, tuple[dict[NGram, list[tuple[int, int]]], list[int]]] = {}
        for video, captions in references.items():
            lines = [tokenised(caption, tokenizer=tokenizer).split() for caption in captions]
            counts: dict[NGram, list[tuple[int, int]]] = {}
            for reference, line in enumerate(lines):
                for order in ngram_counts(line):
                    for gram, count in order.items():
                        counts.setdefault(gram, []).append((reference, count))
            raw[video] = counts, [max(0, len(line) - 1) for line in lines]
            df.update(counts.keys())
        self._idf = {gram: self._max_idf - math.log(videos) for gram, videos in df.items()}
        self._videos = {video: self._index(counts, lengths) for video, (counts, lengths) in raw.items()}

    def _index(self, counts: dict[NGram, list[tuple[int, int]]], lengths: list[int]) -> _Video:
        squares = [[0.0] * len(lengths) for _ in range(MAX_N)]
        for gram, found in counts.items():
            order, idf = squares[len(gram) - 1], self._idf[gram]
            for reference, count in found:
                order[reference] += (count * idf) ** 2
        inverse = [[1 / math.sqrt(square) if square else 0.0 for square in order] for order in squares]
        postings: dict[NGram, Postings] = {}
        for gram, found in counts.items():
            order, weight = inverse[len(gram) - 1], self._idf[gram] ** 2
            postings[gram] = [(place, count, count * weight * order[place]) for place, count in found]
        return _Video(postings, lengths)

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
        check_predictions(predictions, self._videos)
        scores = {
            video: self._score_video(index, tokenised(predictions[video], tokenizer=self._tokenizer).split())
            for video, index in self._videos.items()
        }
        return math.fsum(scores.values()) / len(scores), scores

    def score_captions(self, video: str, captions: Sequence[Caption]) -> list[float]:
        """Score several captions of one video of the references; each from 0 to 10."""
        index = self._videos[video]
        lines = (tokenised(caption, tokenizer=self._tokenizer).split() for caption in captions)
        return [self._score_video(index, line) for line in lines]

    def _score_video(self, video: _Video, words: list[str]) -> float:
        similarity = [0.0] * len(video.lengths)  # summed over n, for each reference
        for order in ngram_counts(words):
            squares = 0.0
            found: list[tuple[int, Postings]] = []
            for gram, count in order.items():
                squares += (count * self._idf.get(gram, self._max_idf)) ** 2
                if gram in video.postings:
                    found.append((count, video.postings[gram]))
            if not squares:
                continue
            norm = math.sqrt(squares)
            for count, postings in found:
                for reference, reference_count, weight in postings:
                    similarity[reference] += min(count, reference_count) * weight / norm
        length = max(0, len(words) - 1)
        total = sum(
            value * math.exp(-((length - other) ** 2) / (2 * SIGMA**2))
            for value, other in zip(similarity, video.lengths, strict=True)
        )
        return SCALE * total / (MAX_N * len(video.lengths))
