from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from capvid.errors import DataError
from capvid.metrics.java import meteor_scores as meteor_scores_java
from capvid.metrics.meteor import alignment, english
from capvid.metrics.meteor.alignment import Alignment, Match, align
from capvid.metrics.meteor.meteor_scorer import _power_of_beta, meteor_scores


def missing_data_message() -> str:
    """The message of the missing data of METEOR; empty if they are installed."""
    try:
        english.english()
    except DataError as error:
        return str(error)
    return ""


MISSING_DATA = missing_data_message()
has_data = pytest.mark.skipif(bool(MISSING_DATA), reason=MISSING_DATA)
has_java = pytest.mark.skipif(not shutil.which("java"), reason="there is no java command")

CASES = ["awkward", "coco_example", "msvd_test", "two_videos", "para_awkward"]

CONTENT, FUNCTION = 0.75, 0.25
STEM, SYNONYM, PARAPHRASE = 0.6, 0.8, 0.6


def f_mean(precision: float, recall: float) -> float:
    return precision * recall / (0.85 * precision + 0.15 * recall)


def meteor_formula(precision: float, recall: float, chunks: int, matched: float) -> float:
    return f_mean(precision, recall) * (1 - 0.6 * (chunks / matched) ** 0.2)


# Prediction, reference, and the score computed from the words that match.
BY_HAND = {
    "identical": ("a dog barks", "a dog barks", 1.0),
    "nothing in common": ("dog", "umbrella", 0.0),
    "one word of two": ("dog", "dog umbrella", meteor_formula(1, 1 / 2, 1, 1)),
    "function words count a third": (
        "the dog",
        "the umbrella",
        meteor_formula(FUNCTION / (FUNCTION + CONTENT), FUNCTION / (FUNCTION + CONTENT), 1, 1),
    ),
    "two chunks": ("dog umbrella", "umbrella dog", meteor_formula(1, 1, 2, 2)),
    "a gap makes two chunks": ("dog quartz umbrella", "dog umbrella", meteor_formula(2 / 3, 1, 2, 2)),
    "a repeated word is used once": ("dog dog dog", "dog", meteor_formula(1 / 3, 1, 1, 1)),
    "stem": ("zorbing umbrella", "zorbs umbrella", STEM / 2 + 1 / 2),
    "synonym": ("quartz automobile", "quartz car", (1 + SYNONYM) / 2),
    "synonym by base form": ("quartz automobiles", "quartz car", (1 + SYNONYM) / 2),
    "synonym by irregular form": ("quartz geese", "quartz goose", (1 + SYNONYM) / 2),
    "paraphrase of several words": (
        "umbrella next to",
        "umbrella alongside",
        f_mean((CONTENT + PARAPHRASE) / (2 * CONTENT + FUNCTION), (1 + PARAPHRASE) / 2),
    ),
    "contraction": (
        "quartz isn't",
        "quartz isn",
        meteor_formula(2 * CONTENT / (2 * CONTENT + FUNCTION), 1, 1, 2),
    ),
    "hyphen and abbreviation": ("a well-known u.s. umbrella", "a well known us umbrella", 1.0),
    "punctuation counts": ("umbrella !", "umbrella", meteor_formula(1 / 2, 1, 1, 1)),
    "case does not": ("Umbrella", "umbrella", 1.0),
    "words with one hash are one word": ("d90", "bun", 1.0),
    "empty prediction": ("", "umbrella", 0.0),
    "empty reference": ("umbrella", "", 0.0),
    "both empty": ("", "", 0.0),
}


@pytest.mark.slow
@has_data
def test_values_computed_by_hand() -> None:
    predictions = {name: prediction for name, (prediction, _, _) in BY_HAND.items()}
    references = {name: [reference] for name, (_, reference, _) in BY_HAND.items()}
    _, videos = meteor_scores(predictions, references)
    assert videos == pytest.approx({name: value for name, (_, _, value) in BY_HAND.items()}, abs=1e-12)


def test_powers_round_as_in_the_published_program() -> None:
    """C's ``pow`` gives another last digit for all but the first of these fractions."""
    java = {(1, 9): 0.7402143449743067, (6, 47): 0.7610561111586592, (7, 111): 0.6609384404935977}
    assert {(c, m): _power_of_beta(c / (m / 2)) for c, m in java} == java


@pytest.mark.slow
@has_data
def test_best_reference_counts_and_enters_the_corpus_score() -> None:
    corpus, videos = meteor_scores(
        {"v": "dog umbrella", "w": "quartz dog"},
        {"v": ["teapot", "dog umbrella", "dog"], "w": ["teapot", "dog teapot teapot"]},
    )
    assert list(videos.values()) == pytest.approx([1, meteor_formula(1 / 2, 1 / 3, 1, 1)], abs=1e-12)
    # Matched words 2 of 2 and 1 of 2, references of 2 and 3 words; a perfect match has no chunk.
    assert corpus == pytest.approx(meteor_formula(3 / 4, 3 / 5, 1, 3), abs=1e-12)


def test_match_that_overlaps_no_other_is_always_made() -> None:
    lone = Match(start=2, length=1, reference_start=0, reference_length=1, module=1)
    assert align([[lone], [], []], 3) == Alignment([lone], 1)


def test_equal_words_are_matched_with_few_chunks() -> None:
    # "a dog a cat" against "a cat": the second "a" is taken.
    first, second, cat = Match(0, 1, 0, 1, 0), Match(2, 1, 0, 1, 0), Match(3, 1, 1, 1, 0)
    assert align([[first, second], [cat]], 4) == Alignment([second, cat], 1)


def test_stem_with_alternatives_is_matched_only_if_it_extends_a_chunk() -> None:
    equal = Match(0, 1, 0, 1, 0)
    beside = [Match(2, 1, 1, 1, 1), Match(1, 1, 1, 1, 1)]
    assert align([[equal], beside], 3) == Alignment([equal, beside[1]], 1)
    apart = [Match(2, 1, 2, 1, 1), Match(3, 1, 2, 1, 1)]
    assert align([[equal], [], apart], 4) == Alignment([equal], 1)


def test_search_keeps_forty_alignments_like_the_published_program(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    assert alignment.BEAM == 40
    narrower = 0
    for _ in range(60):
        words, own = (draw.choices("ab", k=7) for _ in range(2))
        starts = [
            [Match(start, 1, at, 1, 0) for start, other in enumerate(own) if other == word]
            for at, word in enumerate(words)
        ]
        best = align(starts, 7)
        with monkeypatch.context() as patch:
            patch.setattr(alignment, "BEAM", 4)
            narrower += align(starts, 7).chunks > best.chunks
    assert narrower > 5


@pytest.mark.slow
@pytest.mark.shared
@has_data
@pytest.mark.parametrize("name", CASES)
def test_equals_the_published_scores(shared_data: Path, name: str) -> None:
    case = json.loads((shared_data / "metrics" / "cases" / f"{name}.out.json").read_text("utf-8"))
    corpus, videos = meteor_scores(case["tokenized"]["predictions"], case["tokenized"]["references"])
    assert corpus == pytest.approx(case["corpus"]["METEOR"], abs=1e-12)
    expected = {video: values["METEOR"] for video, values in case["segments"].items()}
    assert videos == pytest.approx(expected, abs=1e-12)


TEXT = (
    "a the man men woman women person people someone is are was being running runs ran jogging cutting"
    " chopping slicing cooking preparing food on in of to up with out playing plays guitar music little small"
    " big boy kid child dog puppy car vehicle riding a lot of in front of isn't u.s. well-known 3/4 d90 bun"
    " ' , . ! t-shirt a-b-c 1,000 5's café … and then while talking speaking quickly fast next to alongside"
)
WORDS = TEXT.split()


def caption(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(0, 14)))


def vary(line: str, draw: random.Random) -> str:
    """The caption with words replaced or repeated, and sometimes its two halves swapped."""
    words = line.split()
    for _ in range(draw.randint(0, 4)):
        if words:
            words[draw.randrange(len(words))] = draw.choice([*WORDS, words[0]])
    cut = draw.choice([0, draw.randint(0, len(words))])
    return " ".join(words[cut:] + words[:cut])


@pytest.mark.slow
@has_data
@has_java
def test_equals_the_published_program() -> None:
    draw = random.Random(0)
    references = {f"v{i}": [caption(draw) for _ in range(draw.randint(1, 4))] for i in range(600)}
    predictions = {video: vary(draw.choice(lines), draw) for video, lines in references.items()}
    corpus, videos = meteor_scores(predictions, references)
    expected_corpus, expected = meteor_scores_java(predictions, references)
    assert videos == pytest.approx(expected, abs=1e-12)
    assert corpus == pytest.approx(expected_corpus, abs=1e-12)


def test_error_about_missing_word_lists_tells_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(english, "find_spec", lambda name: None)
    for scores in (meteor_scores, meteor_scores_java):
        with pytest.raises(DataError, match=r"pycocoevalcap.*; pip install 'capvid\[meteor\]'$"):
            scores({"v": "a"}, {"v": ["a"]})


@has_data
def test_missing_java_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DataError, match="no java command; install"):
        meteor_scores_java({"v": "a"}, {"v": ["a"]})


@has_data
@pytest.mark.skipif(shutil.which("sh") is None, reason="stands in for java with a shell script")
def test_failing_java_program_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'Error: out of luck' >&2\nexit 1\n", "utf-8")
    java.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(java))
    many = {str(i): "a dog runs" for i in range(20000)}
    with pytest.raises(DataError, match="failed: Error: out of luck; "):
        meteor_scores_java(many, {video: [text] for video, text in many.items()})


@has_data
def test_damaged_data_files_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = english.data_folder()
    (tmp_path / "data").mkdir()
    (tmp_path / english.JAR).write_bytes((installed / english.JAR).read_bytes())
    with (installed / english.PARAPHRASES).open("rb") as stream:
        (tmp_path / english.PARAPHRASES).write_bytes(stream.read(100_000))
    monkeypatch.setattr(english, "data_folder", lambda: tmp_path)
    with pytest.raises(DataError, match=r"paraphrase-en.gz: cannot be read"):
        meteor_scores({"v": "a"}, {"v": ["b"]})
    (tmp_path / english.JAR).write_bytes(b"no archive")
    english._english.cache_clear()
    with pytest.raises(DataError, match=r"meteor-1.5.jar: cannot be read"):
        meteor_scores({"v": "a"}, {"v": ["b"]})
