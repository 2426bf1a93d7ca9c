from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from capvid.errors import DataError, MetricError, UsageError
from capvid.scoring.scorer import caption_texts, score, score_paragraphs, score_texts

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


def test_score_names_and_values_of_perfect_captions() -> None:
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
def test_selected_metrics_give_the_same_numbers(metrics: list[str], names: list[str]) -> None:
    all_scores = score(PREDICTIONS, REFERENCES)
    selected = score(PREDICTIONS, REFERENCES, metrics=metrics)
    assert selected.corpus == {name: all_scores.corpus[name] for name in names}
    assert selected.per_video["w"] == {name: all_scores.per_video["w"][name] for name in names}


def test_tokenizer_none_takes_tokenized_text() -> None:
    raw = {"v": "the dog's bowl", "w": "cats"}
    split = {"v": "the dog 's bowl", "w": "cats"}
    references = {"v": ["the dog 's bowl"], "w": ["cats"]}
    assert score(raw, references).corpus == score(split, references, tokenizer="none").corpus
    assert score(raw, references, tokenizer="none").corpus["ROUGE_L"] < 1
    assert score(split, references, tokenizer="none").corpus["ROUGE_L"] == pytest.approx(1, abs=1e-12)


def test_predictions_without_references_are_ignored() -> None:
    assert score({**PREDICTIONS, "x": "a dog"}, REFERENCES) == score(PREDICTIONS, REFERENCES)


def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(DataError, match=r"no prediction for 1 of .*: w;"):
        score({"v": "a dog runs"}, REFERENCES)
    with pytest.raises(DataError, match="w: no references"):
        score(PREDICTIONS, {"v": ["a dog"], "w": []})
    with pytest.raises(UsageError, match="'spice'; use any of: bleu, meteor, rouge, cider"):
        score(PREDICTIONS, REFERENCES, metrics=["bleu", "spice"])
    with pytest.raises(UsageError, match="no tokenizer named 'moses'"):
        score(PREDICTIONS, REFERENCES, tokenizer="moses")


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


def test_missing_captions_are_treated_as_requested() -> None:
    references = {**REFERENCES, "x": ["a bird sings"]}
    with pytest.raises(DataError, match=r"no prediction for 1 of .*: x;"):
        score(PREDICTIONS, references)
    assert score(PREDICTIONS, references, missing="skip") == score(PREDICTIONS, REFERENCES)
    empty = score(PREDICTIONS, references, missing="empty")
    assert empty == score({**PREDICTIONS, "x": ""}, references)
    assert empty.per_video["x"]["ROUGE_L"] == 0
    with pytest.raises(DataError, match="no video of the references has a prediction"):
        score({"y": "a dog"}, references, missing="skip")
    with pytest.raises(UsageError, match="missing must be one of error, empty, skip, got 'drop'"):
        score(PREDICTIONS, references, missing="drop")


def test_auto_is_the_builtin_tokenizer() -> None:
    assert score(PREDICTIONS, REFERENCES, tokenizer="auto") == score(PREDICTIONS, REFERENCES)


def test_meteor_engine_is_selected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def meteor_scores(
        predictions: dict[str, str], references: dict[str, list[str]]
    ) -> tuple[float, dict[str, float]]:
        assert references["v"] == ["a dog runs", "a brown dog is running"]
        return 0.5, {video: len(text.split()) / 10 for video, text in predictions.items()}

    def doubled_scores(
        predictions: dict[str, str], references: dict[str, list[str]]
    ) -> tuple[float, dict[str, float]]:
        corpus, videos = meteor_scores(predictions, references)
        return 2 * corpus, videos

    for name, function in (("meteor.meteor_scorer", meteor_scores), ("java", doubled_scores)):
        module = ModuleType(f"capvid.metrics.{name}")
        module.meteor_scores = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    all_scores = score(PREDICTIONS, REFERENCES, metrics=["cider", "meteor", "bleu", "rouge"])
    assert list(all_scores.corpus)[3:] == ["BLEU-4", "METEOR", "ROUGE_L", "CIDEr-D"]
    assert all_scores.corpus["METEOR"] == 0.5
    assert all_scores.per_video["w"]["METEOR"] == 0.6
    assert score(PREDICTIONS, REFERENCES, metrics=["meteor"], meteor_engine="java").corpus == {"METEOR": 1.0}
    with pytest.raises(UsageError, match="no METEOR engine 'nltk'"):
        score(PREDICTIONS, REFERENCES, metrics=["meteor"], meteor_engine="nltk")


def test_missing_meteor_is_an_error_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "capvid.metrics.meteor.meteor_scorer", None)
    with pytest.raises(MetricError, match=r"not available; pip install 'capvid\[meteor\]'"):
        score(PREDICTIONS, REFERENCES, metrics=["meteor"])
    texts = caption_texts(PREDICTIONS, REFERENCES)
    scores = score_texts(texts, metrics=["meteor", "rouge"], meteor_needed=False)
    assert list(scores.corpus) == ["ROUGE_L"]
    assert list(scores.left_out) == ["METEOR"]
    with pytest.raises(UsageError):
        score_texts(texts, metrics=["meteor"], meteor_engine="nltk", meteor_needed=False)


@pytest.mark.shared
def test_published_paragraph_scores(shared_data: Path) -> None:
    case = published(shared_data, "para_awkward", ".json")
    expected = published(shared_data, "para_awkward", ".out.json")
    first, second = case["references"]
    references = {
        video: [texts[video] for texts in (first, second) if video in texts] for video in first | second
    }
    scores = score_paragraphs(case["predictions"], references, missing="empty", repetition_of=first.keys())
    names = {**PUBLISHED, "re1": "R@1", "re2": "R@2", "re3": "R@3", "re4": "R@4"}
    assert scores.corpus == pytest.approx(
        {ours: expected["corpus"][theirs] for theirs, ours in names.items()}, rel=0, abs=1e-9
    )
    for video, values in expected["segments"].items():
        expected_scores = {**values, **expected["repetition"].get(video, {})}
        for name, value in scores.per_video[video].items():
            theirs = next(key for key, ours in names.items() if ours == name)
            assert value == pytest.approx(expected_scores[theirs], rel=0, abs=1e-9)
