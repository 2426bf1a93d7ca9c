"""ROUGE_L (Lin, 2004) as the COCO caption evaluation computes it.

With L(r) the longest common subsequence of the prediction's m words and reference r's n(r) words,

    P = max_r L(r) / m,   R = max_r L(r) / n(r),   F = (1 + b^2) P R / (R + b^2 P),   b = 1.2

the two maxima taken independently. The corpus score is the mean of F over videos. A caption without words
counts as one empty word, so two such captions match.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from capvid.metrics import METRICS, Scored, Texts

BETA = 1.2


def rouge_l(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> tuple[float, dict[str, float]]:
    """Compute ROUGE_L of tokenized captions.

    Args:
        predictions: caption by video, tokens separated by single spaces.
        references: reference captions by video, likewise.

    Returns:
        The corpus score, and the score of each video; from 0 to 1.
    """
    scores = {video: _score(predictions[video], captions) for video, captions in references.items()}
    return math.fsum(scores.values()) / len(scores), scores


def _score(prediction: str, references: Sequence[str]) -> float:
    words = prediction.split(" ")
    positions: dict[str, int] = {}  # positions of each word in the prediction, as bits
    for position, word in enumerate(words):
        positions[word] = positions.get(word, 0) | 1 << position
    precision = recall = 0.0
    for line in set(references):  # a repeated reference changes nothing
        reference = line.split(" ")
        common = _common_subsequence(positions, len(words), reference)
        precision = max(precision, common / len(words))
        recall = max(recall, common / len(reference))
    if not precision:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def _common_subsequence(positions: Mapping[str, int], length: int, reference: Sequence[str]) -> int:
    """Return the length of the longest common subsequence; an integer holds a row of the usual table.

    A bit of ``row`` is 0 where the table grows by one from a column to the next (Hyyrö, 2004).
    """
    every = (1 << length) - 1
    row = every
    for occurrences in filter(None, map(positions.get, reference)):  # other words leave the row as it is
        match = row & occurrences
        row = ((row + match) | (row - match)) & every
    return length - row.bit_count()


@METRICS.register("rouge")
def rouge(texts: Texts) -> Scored:
    """Compute ROUGE_L of the captions."""
    return {"ROUGE_L": rouge_l(texts.predictions, texts.references)}
