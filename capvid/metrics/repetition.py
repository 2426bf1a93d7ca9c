"""R@n: how much a paragraph repeats itself, as MART's own scripts count it.

Written from what they compute: n-grams stay inside a sentence, counts are pooled over a video's sentences.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from capvid.metrics.metric import Scored, Texts, metric

ORDERS = (1, 2, 3, 4)


def repetition(
    paragraphs: Mapping[str, Sequence[str]],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """R@1 to R@4 of paragraphs, each a list of sentences: means, and those of each video.

    R@n of a video is the share of its n-grams that it has said before:
    ``sum(max(count - 1, 0)) / sum(count)``, 0 for a video without n-grams.
    """
    videos = {video: _of(sentences) for video, sentences in paragraphs.items()}
    count = max(1, len(videos))
    means = {f"R@{n}": math.fsum(values[f"R@{n}"] for values in videos.values()) / count for n in ORDERS}
    return means, videos


def _of(sentences: Sequence[str]) -> dict[str, float]:
    tokens = [_words(sentence) for sentence in sentences]
    values = {}
    for n in ORDERS:
        grams = Counter(tuple(words[i : i + n]) for words in tokens for i in range(len(words) - n + 1))
        total = sum(grams.values())
        values[f"R@{n}"] = (total - len(grams)) / total if total else 0.0
    return values


def _words(sentence: str) -> list[str]:
    """Words of a sentence: one dot at its end goes, commas are spaces, case stays."""
    text = re.sub(" +", " ", sentence.removesuffix(".").rstrip(" ").replace(",", " "))
    return text.split(" ") if text else []


@metric("repetition", paragraphs_only=True)
def repetition_of_paragraphs(texts: Texts) -> Scored:
    """R@1 to R@4 of the paragraphs."""
    means, videos = repetition(texts.sentences)
    return {
        name: (mean, {video: values[name] for video, values in videos.items()})
        for name, mean in means.items()
    }
