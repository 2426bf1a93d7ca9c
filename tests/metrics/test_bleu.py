from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from capvid.metrics.bleu import bleu_scores


def direct_bleu(predictions: dict[str, str], references: dict[str, list[str]]) -> list[float]:
    """Corpus BLEU-1..4 from the definition, computed for each n on its own."""
    length = closest = 0
    for video, lines in references.items():
        own = len(predictions[video].split())
        length += own
        closest += sorted((abs(len(line.split()) - own), len(line.split())) for line in lines)[0][1]
    ratio = (length + 1e-15) / (closest + 1e-9)
    scores = []
    for k in (1, 2, 3, 4):
        product = 1.0
        for n in range(1, k + 1):
            correct = guess = 0
            for video, lines in references.items():
                p, *rs = (
                    Counter(tuple(w[i : i + n]) for i in range(len(w) - n + 1))
                    for w in (text.split() for text in [predictions[video], *lines])
                )
                guess += sum(p.values())
                correct += sum(min(count, max(r[gram] for r in rs)) for gram, count in p.items())
            product *= (correct + 1e-15) / (guess + 1e-9)
        scores.append(product ** (1 / k) * (math.exp(1 - 1 / ratio) if ratio < 1 else 1))
    return scores


def test_values_computed_by_hand() -> None:
    corpus, videos = bleu_scores({"v": "the dog the dog"}, {"v": ["the dog barks", "the old the dog barks"]})
    # Lengths 3 and 5 are equally close to 4 and the shorter counts: no penalty. Unigrams: "the" 2 of 2, "dog"
    # 1 of 2. Bigrams: "the dog" 1 of 2, "dog the" 0 of 1. No trigram matches.
    assert videos["v"][0] == pytest.approx(3 / 4, abs=1e-8)
    assert videos["v"][1] == pytest.approx(math.sqrt(3 / 4 * 1 / 3), abs=1e-8)
    assert videos["v"][2] == pytest.approx((3 / 4 * 1 / 3 * 1e-15 / 2) ** (1 / 3), rel=1e-6)
    assert corpus == videos["v"]


def test_short_captions_are_penalised() -> None:
    _, videos = bleu_scores({"v": "a dog"}, {"v": ["a dog runs far"]})
    assert videos["v"][0] == pytest.approx(math.exp(1 - 4 / 2), abs=1e-8)


def test_corpus_score_pools_the_counts() -> None:
    corpus, videos = bleu_scores({"v": "x", "w": "a b c"}, {"v": ["a"], "w": ["a b c"]})
    assert videos["v"][0] == pytest.approx(0, abs=1e-8)
    assert videos["w"][0] == pytest.approx(1, abs=1e-8)
    assert corpus[0] == pytest.approx(3 / 4, abs=1e-8)
    assert corpus[1] == pytest.approx(math.sqrt(3 / 4), abs=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_direct_definition(seed: int) -> None:
    draw = random.Random(seed)

    def caption(shortest: int) -> str:
        return " ".join(draw.choice("abcde") for _ in range(draw.randint(shortest, 12)))

    references = {f"v{i}": [caption(1) for _ in range(draw.randint(1, 4))] for i in range(7)}
    predictions = {video: caption(0) for video in references}
    corpus, videos = bleu_scores(predictions, references)
    assert corpus == pytest.approx(direct_bleu(predictions, references), abs=1e-12)
    for video, scores in videos.items():
        alone = direct_bleu({video: predictions[video]}, {video: references[video]})
        assert scores == pytest.approx(alone, abs=1e-12)


def test_scores_of_empty_and_identical_captions() -> None:
    _, videos = bleu_scores(
        {"empty": "", "both": "", "same": "a b c d"}, {"empty": ["a b"], "both": [""], "same": ["a b c d"]}
    )
    assert videos["empty"] == videos["both"] == (0.0, 0.0, 0.0, 0.0)
    assert videos["same"] == pytest.approx((1, 1, 1, 1), abs=1e-8)
