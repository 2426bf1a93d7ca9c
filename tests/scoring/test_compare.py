from __future__ import annotations

import random

import numpy as np
import pytest

from capvid.errors import DataError
from capvid.scoring.comparison import SEED, compare, rank
from capvid.scoring.scorer import PARAGRAPH_METRICS, caption_texts, paragraph_texts, score, score_paragraphs

RANDOM = random.Random(0)
REFERENCES = {f"v{i}": [" ".join(RANDOM.choices("abcdef", k=8)) for _ in range(3)] for i in range(40)}
GOOD = {video: texts[0].replace("a", "b", 1) for video, texts in REFERENCES.items()}
BAD = {video: " ".join(RANDOM.choices("abcdef", k=7)) for video in REFERENCES}


def test_clear_difference_is_significant() -> None:
    comparison = compare(caption_texts(GOOD, REFERENCES), caption_texts(BAD, REFERENCES))
    assert comparison.first == score(GOOD, REFERENCES) and comparison.second == score(BAD, REFERENCES)
    for name, result in comparison.differences.items():
        assert result.difference == pytest.approx(
            comparison.first.corpus[name] - comparison.second.corpus[name]
        )
        assert result.low < result.difference < result.high and result.low > 0
        assert result.p == pytest.approx(2 / 1001)
    reverse = compare(caption_texts(BAD, REFERENCES), caption_texts(GOOD, REFERENCES))
    for name, result in reverse.differences.items():
        assert result.low == pytest.approx(-comparison.differences[name].high)
    assert comparison.by == "CIDEr-D"
    amounts = [abs(value) for value in comparison.videos.values()]
    assert amounts == sorted(amounts, reverse=True) and len(amounts) == len(REFERENCES)


def test_random_differences_are_not_significant() -> None:
    first = {video: GOOD[video] if index % 2 else BAD[video] for index, video in enumerate(GOOD)}
    second = {video: BAD[video] if index % 2 else GOOD[video] for index, video in enumerate(GOOD)}
    comparison = compare(caption_texts(first, REFERENCES), caption_texts(second, REFERENCES))
    assert all(result.low < 0 < result.high and result.p > 0.05 for result in comparison.differences.values())


def test_interval_equals_that_of_rescored_samples() -> None:
    """BLEU and ROUGE_L of every sample, scored from the captions of its videos."""
    few = dict(list(REFERENCES.items())[:6])
    comparison = compare(
        caption_texts(GOOD, few), caption_texts(BAD, few), metrics=["bleu", "rouge"], samples=25
    )
    generator = np.random.default_rng(SEED)
    sampled: dict[str, list[float]] = {name: [] for name in comparison.differences}
    for row in generator.integers(0, 6, (25, 6)):
        chosen = {f"{index}": list(few)[number] for index, number in enumerate(row)}
        references = {index: few[video] for index, video in chosen.items()}
        first, second = (
            score({index: captions[video] for index, video in chosen.items()}, references)
            for captions in (GOOD, BAD)
        )
        for name, values in sampled.items():
            values.append(first.corpus[name] - second.corpus[name])
    for name, values in sampled.items():
        low, high = np.quantile(values, (0.025, 0.975))
        assert comparison.differences[name].low == pytest.approx(low, abs=1e-9)
        assert comparison.differences[name].high == pytest.approx(high, abs=1e-9)


def test_ranking_agrees_with_comparisons_of_neighbours() -> None:
    middle = {video: GOOD[video] if index % 2 else BAD[video] for index, video in enumerate(GOOD)}
    systems = [caption_texts(captions, REFERENCES) for captions in (BAD, GOOD, middle)]
    ranking = rank(systems)
    assert (ranking.by, ranking.order) == ("CIDEr-D", [1, 2, 0])
    assert ranking.scores == [score(captions, REFERENCES) for captions in (BAD, GOOD, middle)]
    for lead, better, worse in zip(ranking.neighbours, (1, 2), (2, 0), strict=True):
        assert lead == compare(systems[better], systems[worse]).differences["CIDEr-D"]
        assert lead.p < 0.05
    for scores, intervals in zip(ranking.scores, ranking.intervals, strict=True):
        assert intervals.keys() == scores.corpus.keys()
        assert all(low < scores.corpus[name] < high for name, (low, high) in intervals.items())


def test_ranked_interval_equals_that_of_rescored_samples() -> None:
    few = dict(list(REFERENCES.items())[:6])
    texts = [caption_texts(captions, few) for captions in (GOOD, BAD, GOOD)]
    ranking = rank(texts, metrics=["bleu", "rouge"], samples=25)
    generator = np.random.default_rng(SEED)
    sampled: dict[str, list[float]] = {name: [] for name in ranking.intervals[1]}
    for row in generator.integers(0, 6, (25, 6)):
        chosen = {f"{index}": list(few)[number] for index, number in enumerate(row)}
        references = {index: few[video] for index, video in chosen.items()}
        rescored = score({index: BAD[video] for index, video in chosen.items()}, references)
        for name, values in sampled.items():
            values.append(rescored.corpus[name])
    for name, values in sampled.items():
        assert ranking.intervals[1][name] == pytest.approx(np.quantile(values, (0.025, 0.975)), abs=1e-9)
    assert ranking.order == [0, 2, 1] and ranking.neighbours[0].p == 1.0


def test_videos_without_repetition_scores_do_not_count() -> None:
    references = {"v": ["a dog runs"], "w": ["a cat sits"], "x": ["it rains"]}
    predictions = {"v": ["a dog", "a dog"], "w": ["a cat sits"]}
    texts = paragraph_texts(predictions, references, missing="empty", repetition_of=["v", "x"])
    other = paragraph_texts({"v": ["a dog"]}, references, missing="empty")
    comparison = compare(texts, other, metrics=PARAGRAPH_METRICS)
    assert comparison.first == score_paragraphs(
        predictions, references, missing="empty", repetition_of=["v", "x"]
    )
    assert comparison.differences["R@1"].difference == pytest.approx(0.5)
    assert comparison.differences["R@1"].high == pytest.approx(0.5)
    assert comparison.differences["R@1"].low == 0  # a sample without the only video that counts


def test_different_references_are_an_error() -> None:
    with pytest.raises(DataError, match="not all are scored on the same videos"):
        compare(caption_texts({"v": "a"}, {"v": ["a"]}), caption_texts({"v": "a"}, {"v": ["b"]}))
