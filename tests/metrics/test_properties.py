"""Properties of the scores of any captions."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capvid.metrics import Texts, bleu, cider
from capvid.scoring.comparison import compare
from capvid.scoring.scorer import (
    caption_texts,
    metric_names,
    paragraph_texts,
    score,
    score_paragraphs,
    score_texts,
)

WORDS = st.sampled_from(["a", "man", "dog", "runs", "the", "park", "3", "it's", "caf\u00e9", "ski-jump", "."])
CAPTIONS = st.lists(WORDS, max_size=9).map(" ".join)
SPACES = st.sampled_from([" ", "  ", "\t", "\n", "\r", "\u00a0", "\u2003", "\u2028", "\u0085", "\u3000"])
PLAIN_CAPTIONS = st.lists(
    st.sampled_from(["a", "man", "dog", "runs", "the", "park"]), min_size=4, max_size=9
).map(" ".join)

property_settings = settings(max_examples=30, deadline=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, list[str]]]:
    count = draw(st.integers(1, 5))
    references = {
        f"v{i}": draw(st.lists(CAPTIONS, min_size=1, max_size=4), label="references") for i in range(count)
    }
    return {video: draw(CAPTIONS) for video in references}, references


@property_settings
@given(cases(), st.randoms())
def test_order_of_videos_and_references_does_not_matter(
    case: tuple[dict[str, str], dict[str, list[str]]], draw: object
) -> None:
    predictions, references = case
    videos = list(references)
    draw.shuffle(videos)  # type: ignore[attr-defined]
    shuffled = {video: draw.sample(references[video], len(references[video])) for video in videos}  # type: ignore[attr-defined]
    reversed_predictions = {video: predictions[video] for video in reversed(videos)}
    scores, other_scores = score(predictions, references), score(reversed_predictions, shuffled)
    assert other_scores.corpus == pytest.approx(scores.corpus, abs=1e-12)
    for video in videos:
        assert other_scores.per_video[video] == pytest.approx(scores.per_video[video], abs=1e-12)


@property_settings
@given(cases())
def test_names_of_videos_do_not_matter(case: tuple[dict[str, str], dict[str, list[str]]]) -> None:
    predictions, references = case
    other_scores = score(
        {f"x/{video} 1": text for video, text in predictions.items()},
        {f"x/{video} 1": texts for video, texts in references.items()},
    )
    assert other_scores.corpus == score(predictions, references).corpus


@property_settings
@given(cases(), SPACES)
def test_all_kinds_of_space_are_equivalent(
    case: tuple[dict[str, str], dict[str, list[str]]], space: str
) -> None:
    predictions, references = case
    other_scores = score(
        {video: text.replace(" ", space) for video, text in predictions.items()},
        {video: [f"{space}{text}{space}" for text in texts] for video, texts in references.items()},
    )
    assert other_scores == score(predictions, references)


@property_settings
@given(cases())
def test_scores_lie_in_their_ranges(case: tuple[dict[str, str], dict[str, list[str]]]) -> None:
    scores = score(*case)
    for values in (scores.corpus, *scores.per_video.values()):
        for name, value in values.items():
            assert 0 <= value <= (10 if name == "CIDEr-D" else 1) + 1e-9


@property_settings
@given(st.lists(PLAIN_CAPTIONS, min_size=2, max_size=5, unique=True))
def test_captions_equal_to_their_reference_score_highest(captions: list[str]) -> None:
    names = {f"v{i}": caption for i, caption in enumerate(captions)}
    scores = score(names, {video: [caption] for video, caption in names.items()})
    for name in ("BLEU-1", "BLEU-4", "ROUGE_L"):
        assert scores.corpus[name] == pytest.approx(1, abs=1e-8)
    for video, caption in names.items():
        words = caption.split()
        own = {(n, tuple(words[i : i + n])) for n in (1, 2, 3, 4) for i in range(len(words) - n + 1)}
        orders_with_weight = {n for n, gram in own if not all(_contains(other, gram) for other in captions)}
        assert scores.per_video[video]["CIDEr-D"] == pytest.approx(10 * len(orders_with_weight) / 4, abs=1e-9)


def _contains(caption: str, gram: tuple[str, ...]) -> bool:
    return f" {' '.join(gram)} " in f" {caption} "


@pytest.mark.slow
@property_settings
@given(cases(), st.integers(1, 3))
def test_repeated_references_change_only_cider(
    case: tuple[dict[str, str], dict[str, list[str]]], repetitions: int
) -> None:
    predictions, references = case
    repeated = {video: texts + texts[:1] * repetitions for video, texts in references.items()}
    scores, other_scores = score(predictions, references), score(predictions, repeated)
    for name in scores.corpus.keys() - {"CIDEr-D"}:
        assert other_scores.corpus[name] == scores.corpus[name]
    for video, texts in references.items():
        single_scores = [
            score(predictions, {**references, video: [text]}).per_video[video]["CIDEr-D"]
            for text in repeated[video]
        ]
        if len(texts) == 1:  # then the document frequencies are those of all references
            assert other_scores.per_video[video]["CIDEr-D"] == pytest.approx(
                sum(single_scores) / len(single_scores), abs=1e-9
            )


def test_repeated_reference_changes_cider() -> None:
    references = {"v": ["a dog runs", "two cats"], "w": ["the park"]}
    predictions = {"v": "a dog runs", "w": "a man"}
    repeated = {**references, "v": ["a dog runs", "a dog runs", "two cats"]}
    assert score(predictions, references).per_video["v"]["CIDEr-D"] == pytest.approx(7.5 / 2)
    assert score(predictions, repeated).per_video["v"]["CIDEr-D"] == pytest.approx(7.5 * 2 / 3)


@property_settings
@given(cases())
def test_predictions_do_not_differ_from_themselves(case: tuple[dict[str, str], dict[str, list[str]]]) -> None:
    texts = caption_texts(*case)
    comparison = compare(texts, texts, samples=20)
    for result in comparison.differences.values():
        assert (result.difference, result.low, result.high, result.p) == (0, 0, 0, 1)
    assert set(comparison.videos.values()) == {0}


@property_settings
@given(st.lists(st.lists(CAPTIONS, max_size=4), min_size=1, max_size=4))
def test_paragraph_scores_lie_in_their_ranges(paragraphs: list[list[str]]) -> None:
    predictions = {f"v{i}": sentences for i, sentences in enumerate(paragraphs)}
    references = {video: [" ".join(sentences)] for video, sentences in predictions.items()}
    scores = score_paragraphs(predictions, references)
    assert list(scores.corpus)[-4:] == ["R@1", "R@2", "R@3", "R@4"]
    assert all(0 <= scores.corpus[name] < 1 for name in ("R@1", "R@2", "R@3", "R@4"))
    assert scores.corpus["ROUGE_L"] == pytest.approx(1)
    texts = paragraph_texts(predictions, references)
    metrics = [name for name in metric_names(paragraphs=True) if name != "meteor"]
    comparison = compare(texts, texts, metrics=metrics, samples=9)
    assert all(result.p == 1 for result in comparison.differences.values())


def random_texts(count: int) -> Texts:
    draw = random.Random(3)
    words = [f"w{n}" for n in range(30)]

    def caption() -> str:
        return " ".join(draw.choices(words, k=draw.randint(0, 12)))

    return Texts(
        predictions={str(n): caption() for n in range(count)},
        references={str(n): [caption() for _ in range(draw.randint(1, 2))] for n in range(count)},
    )


def test_blocks_of_captions_do_not_change_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = random_texts(50)
    expected = score_texts(texts)
    for module in (bleu, cider):
        monkeypatch.setattr(module, "BLOCK", 7)
    scores = score_texts(texts)
    assert scores.per_video == expected.per_video and scores.corpus == expected.corpus


@pytest.mark.slow
def test_memory_of_scoring_many_captions() -> None:
    """Most of it is the index of the references: 30 n-grams of a caption, each of 20 bytes."""
    texts = random_texts(60_000)
    tracemalloc.start()
    try:
        score_texts(texts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1300 * sum(map(len, texts.references.values()))
