from __future__ import annotations

import random

import pytest

from capvid.metrics.rouge import rouge_l


def direct_rouge(prediction: str, references: list[str]) -> float:
    """The definition, with the usual table of longest common subsequences."""
    p = prediction.split(" ")
    precisions, recalls = [], []
    for r in (line.split(" ") for line in references):
        table = [[0] * (len(r) + 1) for _ in range(len(p) + 1)]
        for i, a in enumerate(p):
            for j, b in enumerate(r):
                table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
        precisions.append(table[-1][-1] / len(p))
        recalls.append(table[-1][-1] / len(r))
    best_p, best_r = max(precisions), max(recalls)
    return 2.44 * best_p * best_r / (best_r + 1.44 * best_p) if best_p and best_r else 0.0


def test_values_computed_by_hand() -> None:
    corpus, videos = rouge_l({"v": "a b c d", "w": "x"}, {"v": ["a c", "b x d y z"], "w": ["y"]})
    # Both references share a subsequence of two words: precision 2/4; recall 2/2 from the first.
    assert videos["v"] == pytest.approx(2.44 * 0.5 / (1 + 1.44 * 0.5), abs=1e-12)
    assert videos["w"] == 0.0
    assert corpus == pytest.approx(videos["v"] / 2, abs=1e-12)


def test_precision_and_recall_come_from_different_references() -> None:
    _, videos = rouge_l({"v": "a b c d"}, {"v": ["a b c x x x x x", "d"]})
    assert videos["v"] == pytest.approx(2.44 * 0.75 * 1 / (1 + 1.44 * 0.75), abs=1e-12)


@pytest.mark.parametrize("longest", [6, 90])
def test_equals_the_direct_definition(longest: int) -> None:
    draw = random.Random(longest)

    def caption() -> str:
        return " ".join(draw.choice("abcd") for _ in range(draw.randint(1, longest)))

    references = {f"v{i}": [caption() for _ in range(draw.randint(1, 4))] for i in range(30)}
    predictions = {video: caption() for video in references}
    expected = {video: direct_rouge(predictions[video], lines) for video, lines in references.items()}
    assert rouge_l(predictions, references)[1] == pytest.approx(expected, abs=1e-12)


def test_empty_captions_are_one_empty_word() -> None:
    _, videos = rouge_l({"both": "", "one": "", "other": "a"}, {"both": [""], "one": ["a"], "other": [""]})
    assert videos == {"both": 1.0, "one": 0.0, "other": 0.0}


def test_no_break_space_does_not_separate_words() -> None:
    _, videos = rouge_l({"v": "add 1\u00a01/2 cups"}, {"v": ["add 1 1/2 cups"]})
    assert videos["v"] == pytest.approx(direct_rouge("add X cups", ["add 1 1/2 cups"]), abs=1e-12)
