"""R@n: repetition within a paragraph, as in the scripts of MART's authors.

N-grams stay within a sentence; their counts are pooled over the sentences of a video.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from capvid.metrics import METRICS, Scored, Texts

ORDERS = (1, 2, 3, 4)


def repetition(
    paragraphs: Mapping[str, Sequence[str]],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Compute R@1 to R@4 of paragraphs, each a list of sentences: means, and values per video.

    R@n of a video is the share of repeated n-grams:
    ``sum(max(count - 1, 0)) / sum(count)``, 0 for a video without n-grams.
    """
    videos: dict[str, dict[str, float]] = {}
    for video, sentences in paragraphs.items():
        tokens = list(map(_words, sentences))
        videos[video] = {}
        for n in ORDERS:
            ngrams = Counter(tuple(words[i : i + n]) for words in tokens for i in range(len(words) - n + 1))
            total = ngrams.total()
            videos[video][f"R@{n}"] = (total - len(ngrams)) / total if total else 0.0
    count = max(1, len(videos))
    means = {f"R@{n}": math.fsum(values[f"R@{n}"] for values in videos.values()) / count for n in ORDERS}
    return means, videos


def _words(sentence: str) -> list[str]:
    """Return the words of a sentence, without a final dot and with commas as spaces."""
    text = re.sub(" +", " ", sentence.removesuffix(".").rstrip(" ").replace(",", " "))
    return text.split(" ") if text else []


@METRICS.register("repetition", paragraphs_only=True)
def repetition_of_paragraphs(texts: Texts) -> Scored:
    """Compute R@1 to R@4 of the paragraphs."""
    means, videos = repetition(texts.sentences)
    return {
        name: (mean, {video: values[name] for video, values in videos.items()})
        for name, mean in means.items()
    }
