from __future__ import annotations

import json
from pathlib import Path

import pytest

from capvid.errors import DataError
from capvid.metrics.repetition import repetition
from capvid.scoring.scorer import paragraph_text, score, score_paragraphs


def test_values_computed_by_hand() -> None:
    means, videos = repetition({"v": ["a b a b a.", "a, b"], "w": ["x y", "x y z"], "short": [""]})
    # v: words a b a b a | a b -> 7 words, 2 of them new; bigrams ab ba ab ba | ab -> 5, 2 new.
    assert videos["v"]["R@1"] == pytest.approx(5 / 7)
    assert videos["v"]["R@2"] == pytest.approx(3 / 5)
    assert videos["v"]["R@3"] == pytest.approx(1 / 3)  # aba bab aba
    assert videos["v"]["R@4"] == 0  # abab baba
    assert videos["w"]["R@2"] == pytest.approx(1 / 3)  # n-grams end with their sentence
    assert videos["short"] == dict.fromkeys(("R@1", "R@2", "R@3", "R@4"), 0.0)
    assert means["R@1"] == pytest.approx((5 / 7 + 2 / 5 + 0) / 3)


def test_case_matters_and_one_final_dot_is_removed() -> None:
    _, videos = repetition({"v": ["The dog .", "the dog.."]})
    assert videos["v"]["R@1"] == 0  # The dog | the dog.


def test_paragraph_scores_equal_those_of_joined_sentences() -> None:
    assert paragraph_text(["A man's dog,", "2 dogs!"]) == "a man s dog dogs"
    paragraph_scores = score_paragraphs(
        {"v": ["a man runs", "he stops"], "w": ["a dog", "a dog"]},
        {"v": ["A man runs. He stops."], "w": ["A dog barks. It sleeps."]},
    )
    caption_scores = score(
        {"v": "a man runs he stops", "w": "a dog a dog"},
        {"v": ["a man runs he stops"], "w": ["a dog barks it sleeps"]},
        tokenizer="none",
    )
    assert {name: paragraph_scores.corpus[name] for name in caption_scores.corpus} == caption_scores.corpus
    assert paragraph_scores.corpus["R@2"] == pytest.approx(1 / 4)
    assert paragraph_scores.per_video["w"]["R@1"] == pytest.approx(1 / 2)
    with pytest.raises(DataError, match="no prediction"):
        score_paragraphs({}, {"v": ["a"]})


@pytest.mark.shared
def test_published_repetition(shared_data: Path) -> None:
    cases = shared_data / "metrics" / "cases"
    case = json.loads((cases / "para_awkward.json").read_text())
    expected = json.loads((cases / "para_awkward.out.json").read_text())["corpus"]
    first = case["references"][0]
    means, _ = repetition({v: s for v, s in case["predictions"].items() if v in first})
    for n in range(1, 5):
        assert means[f"R@{n}"] == pytest.approx(expected[f"re{n}"], abs=1e-9)
