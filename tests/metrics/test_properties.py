"""What must hold for any captions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capvid.scoring.comparison import compare
from capvid.scoring.scorer import caption_texts, metric_names, paragraph_texts, score, score_paragraphs

WORDS = st.sampled_from(["a", "man", "dog", "runs", "the", "park", "3", "it's", "caf\u00e9", "ski-jump", "."])
CAPTIONS = st.lists(WORDS, max_size=9).map(" ".join)
SPACES = st.sampled_from([" ", "  ", "\t", "\n", "\r", "\u00a0", "\u2003", "\u2028", "\u0085", "\u3000"])
WHOLE = st.lists(st.sampled_from(["a", "man", "dog", "runs", "the", "park"]), min_size=4, max_size=9).map(
    " ".join
)

some = settings(max_examples=30, deadline=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, list[str]]]:
    count = draw(st.integers(1, 5))
    references = {
        f"v{i}": draw(st.lists(CAPTIONS, min_size=1, max_size=4), label="references") for i in range(count)
    }
    return {video: draw(CAPTIONS) for video in references}, references


@some
@given(cases(), st.randoms())
def test_no_order_matters(case: tuple[dict[str, str], dict[str, list[str]]], draw: object) -> None:
    predictions, references = case
    videos = list(references)
    draw.shuffle(videos)  # type: ignore[attr-defined]
    mixed = {video: draw.sample(references[video], len(references[video])) for video in videos}  # type: ignore[attr-defined]
    said = {video: predictions[video] for video in reversed(videos)}
    one, other = score(predictions, references), score(said, mixed)
    assert other.corpus == pytest.approx(one.corpus, abs=1e-12)
    for video in videos:
        assert other.per_video[video] == pytest.approx(one.per_video[video], abs=1e-12)


@some
@given(cases())
def test_names_of_videos_do_not_matter(case: tuple[dict[str, str], dict[str, list[str]]]) -> None:
    predictions, references = case
    other = score(
        {f"x/{video} 1": text for video, text in predictions.items()},
        {f"x/{video} 1": texts for video, texts in references.items()},
    )
    assert other.corpus == score(predictions, references).corpus


@some
@given(cases(), SPACES)
def test_every_form_of_space_is_one(case: tuple[dict[str, str], dict[str, list[str]]], space: str) -> None:
    predictions, references = case
    other = score(
        {video: text.replace(" ", space) for video, text in predictions.items()},
        {video: [f"{space}{text}{space}" for text in texts] for video, texts in references.items()},
    )
    assert other == score(predictions, references)


@some
@given(cases())
def test_scores_lie_in_their_ranges(case: tuple[dict[str, str], dict[str, list[str]]]) -> None:
    found = score(*case)
    for values in (found.corpus, *found.per_video.values()):
        for name, value in values.items():
            assert 0 <= value <= (10 if name == "CIDEr-D" else 1) + 1e-9


@some
@given(st.lists(WHOLE, min_size=2, max_size=5, unique=True))
def test_what_equals_its_reference_scores_most(captions: list[str]) -> None:
    names = {f"v{i}": caption for i, caption in enumerate(captions)}
    found = score(names, {video: [caption] for video, caption in names.items()})
    for name in ("BLEU-1", "BLEU-4", "ROUGE_L"):
        assert found.corpus[name] == pytest.approx(1, abs=1e-8)
    for video, caption in names.items():
        words = caption.split()
        own = {(n, tuple(words[i : i + n])) for n in (1, 2, 3, 4) for i in range(len(words) - n + 1)}
        weighty = {n for n, gram in own if not all(_holds(other, gram) for other in captions)}
        assert found.per_video[video]["CIDEr-D"] == pytest.approx(10 * len(weighty) / 4, abs=1e-9)


def _holds(caption: str, gram: tuple[str, ...]) -> bool:
    return f" {' '.join(gram)} " in f" {caption} "


@pytest.mark.slow
@some
@given(cases(), st.integers(1, 3))
def test_repeated_references_count_for_cider_alone(
    case: tuple[dict[str, str], dict[str, list[str]]], more: int
) -> None:
    predictions, references = case
    twice = {video: texts + texts[:1] * more for video, texts in references.items()}
    one, other = score(predictions, references), score(predictions, twice)
    for name in one.corpus.keys() - {"CIDEr-D"}:
        assert other.corpus[name] == one.corpus[name]
    for video, texts in references.items():
        every = [
            score(predictions, {**references, video: [text]}).per_video[video]["CIDEr-D"]
            for text in twice[video]
        ]
        if len(texts) == 1:  # then the document frequencies are those of all references
            assert other.per_video[video]["CIDEr-D"] == pytest.approx(sum(every) / len(every), abs=1e-9)


def test_a_repeated_reference_moves_cider() -> None:
    references = {"v": ["a dog runs", "two cats"], "w": ["the park"]}
    predictions = {"v": "a dog runs", "w": "a man"}
    twice = {**references, "v": ["a dog runs", "a dog runs", "two cats"]}
    assert score(predictions, references).per_video["v"]["CIDEr-D"] == pytest.approx(7.5 / 2)
    assert score(predictions, twice).per_video["v"]["CIDEr-D"] == pytest.approx(7.5 * 2 / 3)


@some
@given(cases())
def test_nothing_differs_from_itself(case: tuple[dict[str, str], dict[str, list[str]]]) -> None:
    texts = caption_texts(*case)
    found = compare(texts, texts, samples=20)
    for one in found.differences.values():
        assert (one.difference, one.low, one.high, one.p) == (0, 0, 0, 1)
    assert set(found.videos.values()) == {0}


@some
@given(st.lists(st.lists(CAPTIONS, max_size=4), min_size=1, max_size=4))
def test_paragraphs(paragraphs: list[list[str]]) -> None:
    said = {f"v{i}": sentences for i, sentences in enumerate(paragraphs)}
    references = {video: [" ".join(sentences)] for video, sentences in said.items()}
    found = score_paragraphs(said, references)
    assert list(found.corpus)[-4:] == ["R@1", "R@2", "R@3", "R@4"]
    assert all(0 <= found.corpus[name] < 1 for name in ("R@1", "R@2", "R@3", "R@4"))
    assert found.corpus["ROUGE_L"] == pytest.approx(1)
    texts = paragraph_texts(said, references)
    metrics = [name for name in metric_names(paragraphs=True) if name != "meteor"]
    assert all(one.p == 1 for one in compare(texts, texts, metrics=metrics, samples=9).differences.values())
