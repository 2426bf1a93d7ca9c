from __future__ import annotations

import random

import numpy as np
import pytest

from capvid.errors import DataError
from capvid.scoring.comparison import SEED, compare
from capvid.scoring.scorer import PARAGRAPH_METRICS, caption_texts, paragraph_texts, score, score_paragraphs

DRAW = random.Random(0)
REFERENCES = {f"v{i}": [" ".join(DRAW.choices("abcdef", k=8)) for _ in range(3)] for i in range(40)}
GOOD = {video: texts[0].replace("a", "b", 1) for video, texts in REFERENCES.items()}
BAD = {video: " ".join(DRAW.choices("abcdef", k=7)) for video in REFERENCES}


def test_a_clear_difference() -> None:
    found = compare(caption_texts(GOOD, REFERENCES), caption_texts(BAD, REFERENCES))
    assert found.first == score(GOOD, REFERENCES) and found.second == score(BAD, REFERENCES)
    for name, one in found.differences.items():
        assert one.difference == pytest.approx(found.first.corpus[name] - found.second.corpus[name])
        assert one.low < one.difference < one.high and one.low > 0
        assert one.p == pytest.approx(2 / 1001)
    turned = compare(caption_texts(BAD, REFERENCES), caption_texts(GOOD, REFERENCES))
    for name, one in turned.differences.items():
        assert one.low == pytest.approx(-found.differences[name].high)
    assert found.by == "CIDEr-D"
    amounts = [abs(value) for value in found.videos.values()]
    assert amounts == sorted(amounts, reverse=True) and len(amounts) == len(REFERENCES)


def test_no_difference_but_noise() -> None:
    other = {video: GOOD[video] if place % 2 else BAD[video] for place, video in enumerate(GOOD)}
    another = {video: BAD[video] if place % 2 else GOOD[video] for place, video in enumerate(GOOD)}
    found = compare(caption_texts(other, REFERENCES), caption_texts(another, REFERENCES))
    assert all(one.low < 0 < one.high and one.p > 0.05 for one in found.differences.values())


def test_draws_are_scored_as_if_they_were_the_data() -> None:
    """BLEU and ROUGE_L of every draw, from the captions that were drawn."""
    few = dict(list(REFERENCES.items())[:6])
    found = compare(caption_texts(GOOD, few), caption_texts(BAD, few), metrics=["bleu", "rouge"], samples=25)
    generator = np.random.default_rng(SEED)
    drawn: dict[str, list[float]] = {name: [] for name in found.differences}
    for row in generator.integers(0, 6, (25, 6)):
        chosen = {f"{place}": list(few)[number] for place, number in enumerate(row)}
        references = {place: few[video] for place, video in chosen.items()}
        one, other = (
            score({place: said[video] for place, video in chosen.items()}, references) for said in (GOOD, BAD)
        )
        for name, values in drawn.items():
            values.append(one.corpus[name] - other.corpus[name])
    for name, values in drawn.items():
        low, high = np.quantile(values, (0.025, 0.975))
        assert found.differences[name].low == pytest.approx(low, abs=1e-9)
        assert found.differences[name].high == pytest.approx(high, abs=1e-9)


def test_videos_without_repetition_do_not_count() -> None:
    references = {"v": ["a dog runs"], "w": ["a cat sits"], "x": ["it rains"]}
    said = {"v": ["a dog", "a dog"], "w": ["a cat sits"]}
    texts = paragraph_texts(said, references, missing="empty", repetition_of=["v", "x"])
    other = paragraph_texts({"v": ["a dog"]}, references, missing="empty")
    found = compare(texts, other, metrics=PARAGRAPH_METRICS)
    assert found.first == score_paragraphs(said, references, missing="empty", repetition_of=["v", "x"])
    assert found.differences["R@1"].difference == pytest.approx(0.5)
    assert found.differences["R@1"].high == pytest.approx(0.5)
    assert found.differences["R@1"].low == 0  # a draw without the only video that counts


def test_other_references_are_refused() -> None:
    with pytest.raises(DataError, match="not scored on the same videos"):
        compare(caption_texts({"v": "a"}, {"v": ["a"]}), caption_texts({"v": "a"}, {"v": ["b"]}))
