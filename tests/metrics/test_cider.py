from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from capvid.errors import CapvidError, DataError, UsageError
from capvid.metrics import Texts
from capvid.metrics.cider import CiderD, cider


def direct_cider(predictions: dict[str, str], references: dict[str, list[str]]) -> dict[str, float]:
    """The definition, computed for each pair of captions on its own."""

    def count_ngrams(text: str, n: int) -> Counter[str]:
        tokens = text.split()
        return Counter(" ".join(tokens[i : i + n]) for i in range(len(tokens) - n + 1))

    def weights(text: str, n: int) -> dict[str, float]:
        vector = {}
        for gram, count in count_ngrams(text, n).items():
            df = sum(any(gram in count_ngrams(line, n) for line in lines) for lines in references.values())
            vector[gram] = count * (math.log(len(references)) - math.log(max(1, df)))
        return vector

    def length(vector: dict[str, float]) -> float:
        return math.sqrt(sum(weight**2 for weight in vector.values()))

    scores = {}
    for video, lines in references.items():
        values = []
        for line in lines:
            delta = max(0, len(predictions[video].split()) - 1) - max(0, len(line.split()) - 1)
            for n in (1, 2, 3, 4):
                p, r = weights(predictions[video], n), weights(line, n)
                dot = sum(min(p[gram], r[gram]) * r[gram] for gram in p.keys() & r.keys())
                cosine = dot / (length(p) * length(r)) if length(p) and length(r) else 0.0
                values.append(cosine * math.exp(-(delta**2) / 72))
        scores[video] = 10 * sum(values) / len(values)
    return scores


def test_values_computed_by_hand() -> None:
    cider = CiderD({"v": ["a b"], "w": ["a c"]}, tokenizer="none")
    # "a" is in both videos and weighs nothing; b, c and both bigrams weigh ln 2.
    corpus, scores = cider.score({"v": "c b", "w": "a c"})
    assert scores["v"] == pytest.approx(10 / 4 * (1 / math.sqrt(2) + 0), abs=1e-12)
    assert scores["w"] == pytest.approx(10 / 4 * (1 + 1), abs=1e-12)
    assert corpus == pytest.approx((scores["v"] + scores["w"]) / 2, abs=1e-12)
    # A lone word has no bigram: one bigram less than the reference.
    assert cider.score({"v": "b", "w": ""})[1]["v"] == pytest.approx(2.5 * math.exp(-1 / 72), abs=1e-12)
    # Counts are clipped at the reference's in the product but not in the norm: 1 * 1 / (2 * 1).
    assert cider.score({"v": "b b", "w": ""})[1]["v"] == pytest.approx(2.5 * 0.5, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_direct_definition(seed: int) -> None:
    draw = random.Random(seed)

    def caption(shortest: int) -> str:
        return " ".join(draw.choice("abcdefg") for _ in range(draw.randint(shortest, 12)))

    references = {f"v{i}": [caption(1) for _ in range(draw.randint(1, 4))] for i in range(7)}
    predictions = {video: caption(0) for video in references}
    expected = direct_cider(predictions, references)
    corpus, scores = CiderD(references, tokenizer="none").score(predictions)
    assert max(expected.values()) > 0.05
    assert scores == pytest.approx(expected, abs=1e-12)
    assert corpus == pytest.approx(sum(expected.values()) / len(expected), abs=1e-12)


def test_identical_captions_score_ten() -> None:
    references = {"v": ["a dog runs fast"], "w": ["some cats sleep all day"]}
    corpus, scores = CiderD(references).score({"v": "A dog runs fast.", "w": "some cats sleep all day"})
    assert corpus == pytest.approx(10, abs=1e-12)
    assert scores == pytest.approx({"v": 10, "w": 10}, abs=1e-12)


def test_one_video_scores_zero() -> None:
    assert CiderD({"v": ["a dog runs fast"]}).score({"v": "a dog runs fast"}) == (0.0, {"v": 0.0})


@pytest.mark.slow
def test_empty_captions_score_zero() -> None:
    references = {"v": ["a dog runs fast"], "w": [""], "x": ["a cat"]}
    corpus, scores = CiderD(references).score({"v": "", "w": "", "x": " . "})
    assert (corpus, scores) == (0.0, {"v": 0.0, "w": 0.0, "x": 0.0})


def test_repeated_references_count_each_time() -> None:
    once = CiderD({"v": ["a dog runs", "cats"], "w": ["we eat"]})
    thrice = CiderD({"v": ["a dog runs", "a dog runs", "a dog runs", "cats"], "w": ["we eat"]})
    predictions = {"v": "a dog runs", "w": ""}
    # Three n-gram orders match fully with "a dog runs", nothing with "cats".
    assert once.score(predictions)[1]["v"] == pytest.approx(7.5 / 2, abs=1e-12)
    assert thrice.score(predictions)[1]["v"] == pytest.approx(7.5 * 3 / 4, abs=1e-12)


def test_token_lists_are_not_tokenized_again() -> None:
    texts = CiderD({"v": ["The dog's bowl."], "w": ["A cat."]})
    lists = CiderD({"v": [["the", "dog", "'s", "bowl"]], "w": [["a", "cat"]]})
    assert texts.score({"v": "a dog's bowl", "w": "cats"}) == lists.score(
        {"v": ["a", "dog", "'s", "bowl"], "w": ["cats"]}
    )
    assert lists.score({"v": ["a", "dog", "'s", "bowl"], "w": ["cats"]})[0] > 1


def test_scoring_keeps_no_state_and_ignores_other_videos() -> None:
    cider = CiderD({"v": ["a dog runs"], "w": ["a cat sits"]})
    before = cider.score({"v": "a dog sits", "w": "a cat"})
    assert cider.score({"v": "a cat", "w": "dogs dogs", "elsewhere": "a dog runs"}) != before
    assert cider.score({"elsewhere": "x", "w": "a cat", "v": "a dog sits"}) == before
    assert list(before[1]) == ["v", "w"]


def test_missing_predictions_are_named() -> None:
    cider = CiderD({f"v{i}": ["a dog runs"] for i in range(9)})
    with pytest.raises(DataError, match=r"^no prediction for 2 of .*: v3, v7; "):
        cider.score({f"v{i}": "a dog" for i in range(9) if i not in (3, 7)})
    with pytest.raises(DataError, match=r"for 9 of .*: v0, v1, v2, v3, v4 and 4 more; "):
        cider.score({})


@pytest.mark.parametrize(
    ("references", "message"),
    [({}, "no video"), ({"v": []}, "v: no references"), ({"v": "a dog"}, "v: the references are one text")],
)
def test_unusable_references(references: dict[str, list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        CiderD(references)


def test_unknown_tokenizer() -> None:
    with pytest.raises(UsageError, match=r"'moses'; use one of: auto, ptb, builtin, none") as caught:
        CiderD({"v": ["a dog"]}, tokenizer="moses")
    assert isinstance(caught.value, CapvidError)


def test_tokens_are_not_tokenized_again() -> None:
    references = {"v": ["he cannot go"], "w": ["we can not go"], "x": ["a dog"]}
    predictions = {"v": "he cannot go", "w": "we cannot go", "x": "a dog"}
    scores = cider(Texts(predictions=predictions, references=references))["CIDEr-D"][1]
    tokens = CiderD({video: [text.split() for text in texts] for video, texts in references.items()})
    assert scores == tokens.score({video: text.split() for video, text in predictions.items()})[1]
    assert scores["v"] == pytest.approx(7.5) and scores["w"] < 7  # the former has no 4-gram
