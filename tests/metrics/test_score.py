from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import capvid.metrics
from capvid.errors import DataError, UsageError
from capvid.metrics import score

PUBLISHED = {
    "Bleu_1": "BLEU-1",
    "Bleu_2": "BLEU-2",
    "Bleu_3": "BLEU-3",
    "Bleu_4": "BLEU-4",
    "ROUGE_L": "ROUGE_L",
    "CIDEr": "CIDEr-D",
}
SENTENCE_CASES = ["awkward", "coco_example", "msvd_test", "one_video", "two_videos"]

REFERENCES = {"v": ["A dog runs.", "a brown dog is running"], "w": ["Two cats sleep on a bed"]}
PREDICTIONS = {"v": "a dog runs", "w": "two dogs sleep on a mat"}


def published(shared: Path, name: str, kind: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((shared / "metrics" / "cases" / f"{name}{kind}").read_text("utf-8"))
    return result


def test_names_and_values_that_can_be_told_in_advance() -> None:
    scores = score({"v": "a dog runs", "w": "TWO CATS SLEEP ON A BED!"}, REFERENCES)
    assert list(scores.corpus) == list(PUBLISHED.values())
    assert list(scores.per_video) == ["v", "w"]
    assert [list(values) for values in scores.per_video.values()] == [list(PUBLISHED.values())] * 2
    assert scores.corpus["BLEU-4"] == pytest.approx(1, abs=1e-8)
    assert scores.corpus["ROUGE_L"] == pytest.approx(1, abs=1e-12)
    assert scores.per_video["w"]["CIDEr-D"] == pytest.approx(10, abs=1e-12)
    assert scores.corpus["CIDEr-D"] == pytest.approx((scores.per_video["v"]["CIDEr-D"] + 10) / 2, abs=1e-12)


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (["cider"], ["CIDEr-D"]),
        (["rouge"], ["ROUGE_L"]),
        (("cider", "bleu"), ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "CIDEr-D"]),
    ],
)
def test_a_choice_of_metrics_gives_the_same_numbers(metrics: list[str], names: list[str]) -> None:
    every = score(PREDICTIONS, REFERENCES)
    some = score(PREDICTIONS, REFERENCES, metrics=metrics)
    assert some.corpus == {name: every.corpus[name] for name in names}
    assert some.per_video["w"] == {name: every.per_video["w"][name] for name in names}


def test_tokenizer() -> None:
    raw = {"v": "the dog's bowl", "w": "cats"}
    split = {"v": "the dog 's bowl", "w": "cats"}
    references = {"v": ["the dog 's bowl"], "w": ["cats"]}
    assert score(raw, references).corpus == score(split, references, tokenizer="none").corpus
    assert score(raw, references, tokenizer="none").corpus["ROUGE_L"] < 1
    assert score(split, references, tokenizer="none").corpus["ROUGE_L"] == pytest.approx(1, abs=1e-12)


def test_other_predictions_are_left_out() -> None:
    assert score({**PREDICTIONS, "x": "a dog"}, REFERENCES) == score(PREDICTIONS, REFERENCES)


def test_errors() -> None:
    with pytest.raises(DataError, match=r"no prediction for 1 of .*: w;"):
        score({"v": "a dog runs"}, REFERENCES)
    with pytest.raises(DataError, match="w: no references"):
        score(PREDICTIONS, {"v": ["a dog"], "w": []})
    with pytest.raises(UsageError, match="'spice'; use any of: bleu, meteor, rouge, cider"):
        score(PREDICTIONS, REFERENCES, metrics=["bleu", "spice"])
    with pytest.raises(UsageError, match="no tokenizer named 'moses'"):
        score(PREDICTIONS, REFERENCES, tokenizer="moses")


def test_public_names() -> None:
    assert set(capvid.metrics.__all__) == {
        "METRICS",
        "CiderD",
        "Scores",
        "paragraph_text",
        "score",
        "score_paragraphs",
    }


@pytest.mark.shared
@pytest.mark.parametrize("name", [*SENTENCE_CASES, "linesep_bug", "para_awkward"])
def test_published_scores_from_published_tokens(shared_data: Path, name: str) -> None:
    expected = published(shared_data, name, ".out.json")
    tokens = expected["tokenized"]
    scores = score(tokens["predictions"], tokens["references"], tokenizer="none")
    assert scores.per_video.keys() == expected["segments"].keys()
    for theirs, ours in PUBLISHED.items():
        assert scores.corpus[ours] == pytest.approx(expected["corpus"][theirs], rel=0, abs=1e-9)
        for video, values in expected["segments"].items():
            assert scores.per_video[video][ours] == pytest.approx(values[theirs], rel=0, abs=1e-9)


@pytest.mark.shared
@pytest.mark.parametrize("name", SENTENCE_CASES)
def test_published_scores_from_raw_text(shared_data: Path, name: str) -> None:
    case = published(shared_data, name, ".json")
    expected = published(shared_data, name, ".out.json")["corpus"]
    scores = score(case["predictions"], case["references"])
    for theirs, ours in PUBLISHED.items():
        assert scores.corpus[ours] == pytest.approx(expected[theirs], rel=0, abs=2e-4)


@pytest.mark.shared
def test_line_separators_are_spaces(shared_data: Path) -> None:
    """The published code shifts later captions at a line separator; ours does not."""
    case = published(shared_data, "linesep_bug", ".json")
    scores = score(case["predictions"], case["references"])
    assert scores.corpus["BLEU-1"] == pytest.approx(1, abs=1e-8)
    assert scores.corpus["ROUGE_L"] == pytest.approx(1, abs=1e-12)
