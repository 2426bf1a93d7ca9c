from __future__ import annotations

import json
import math
import random
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capvid.metrics.dense_captioning import (
    THRESHOLDS,
    UNMATCHED,
    Segments,
    TimedSentence,
    dense_scores,
    ordered_matching,
    overlapping_pairs,
    overlaps,
    soda_c,
)
from capvid.metrics.meteor import meteor_scorer
from capvid.scoring.dense import read_timed_sentences, score_dense
from capvid.text.tokenization import ptb_tokenize

meteor = pytest.mark.skipif(find_spec("pycocoevalcap") is None, reason="METEOR's data are not installed")
WORDS = ["a", "the", "man", "dog", "walks", "walking", "talks", "to", "on", "park", "street", "big", "large"]


def made_segments(seed: int, videos: int) -> tuple[Segments, list[Segments]]:
    """Return predictions and two annotators; some videos lack one of them, or have none in common."""
    draw = random.Random(seed)

    def segments(count: int) -> list[TimedSentence]:
        starts = [draw.choice([0.0, 1.5, 4.0, 8.25]) for _ in range(count)]
        return [
            TimedSentence(
                start,
                start + draw.choice([1, 2, 4.5, 8]),
                " ".join(draw.choices(WORDS, k=draw.choice([1, 2, 5]))),
            )
            for start in starts
        ]

    names = [f"v{i}" for i in range(videos)]
    own = {name: segments(draw.randrange(5)) for name in names[1:]}
    annotators = [
        {name: segments(draw.randrange(1, 5)) for name in names[:-1]},
        {name: segments(draw.randrange(1, 4)) for name in names[2:]},
    ]
    return own, annotators


def plain_overlap(first: TimedSentence, second: TimedSentence) -> float:
    shared = max(0, min(first.end, second.end) - max(first.start, second.start))
    hull = max(first.end, second.end) - min(first.start, second.start)
    return shared / (min(hull, first.end - first.start + second.end - second.start) + 1e-8)


def ngrams(text: str, n: int) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def plain_bleu(pairs: list[tuple[str, str]]) -> list[float]:
    scores, product = [], 1.0
    length = sum(len(own.split()) for own, _ in pairs) + 1e-15
    reference_length = sum(len(other.split()) for _, other in pairs) + 1e-9
    for n in range(1, 5):
        correct = sum((ngrams(own, n) & ngrams(other, n)).total() for own, other in pairs)
        total = sum(max(0, len(own.split()) - n + 1) for own, _ in pairs)
        product *= (correct + 1e-15) / (total + 1e-9)
        scores.append(product ** (1 / n) * min(1, math.exp(1 - reference_length / length)))
    return scores


def plain_cider(pairs: list[tuple[str, str]]) -> float:
    values = []
    for own, other in pairs:
        cosines = []
        for n in range(1, 5):
            counts = Counter(gram for _, text in pairs for gram in set(ngrams(text, n)))
            weights = [
                {
                    gram: count * (math.log(len(pairs)) - math.log(max(1, counts[gram])))
                    for gram, count in ngrams(text, n).items()
                }
                for text in (own, other)
            ]
            dot = sum(min(w, weights[1].get(g, 0)) * weights[1].get(g, 0) for g, w in weights[0].items())
            norm = math.prod(math.sqrt(sum(w * w for w in side.values())) for side in weights)
            cosines.append(dot / norm if norm else 0.0)
        delta = max(0, len(own.split()) - 1) - max(0, len(other.split()) - 1)
        values.append(sum(cosines) / 4 * math.exp(-(delta**2) / 72))
    return 10 * sum(values) / len(values)


def plain_scores(
    own: Segments, annotators: list[Segments], videos: list[str], unmatched: str, *, with_meteor: bool
) -> dict[str, np.ndarray]:
    """Compute all scores from their definitions, (videos, thresholds)."""
    names = ["precision", "recall", *(f"BLEU-{n}" for n in range(1, 5)), "METEOR", "CIDEr-D"]
    scores = {name: np.zeros((len(videos), len(THRESHOLDS))) for name in names}
    for row, video in enumerate(videos):
        for column, threshold in enumerate(THRESHOLDS):
            predicted = own.get(video, [])
            pairs = []
            for annotator in annotators:
                references = annotator.get(video, [])
                hits = [[plain_overlap(p, r) > threshold for r in references] for p in predicted]
                if predicted and references:
                    precision = sum(map(any, hits)) / len(predicted)
                    recall = sum(map(any, zip(*hits, strict=True))) / len(references)
                    scores["precision"][row, column] = max(scores["precision"][row, column], precision)
                    scores["recall"][row, column] = max(scores["recall"][row, column], recall)
            for p in predicted:
                near = [
                    (p.sentence, r.sentence)
                    for annotator in annotators
                    for r in annotator.get(video, [])
                    if plain_overlap(p, r) >= threshold
                ]
                pairs += near or [(p.sentence, unmatched)]
            if not pairs:
                continue
            for n, value in enumerate(plain_bleu(pairs), 1):
                scores[f"BLEU-{n}"][row, column] = value
            scores["CIDEr-D"][row, column] = plain_cider(pairs)
            if with_meteor:
                scores["METEOR"][row, column] = meteor_scorer.meteor_scores(
                    {str(i): p for i, (p, _) in enumerate(pairs)},
                    {str(i): [r] for i, (_, r) in enumerate(pairs)},
                )[0]
    return scores


def plain_soda(own: Segments, annotators: list[Segments], video: str) -> tuple[float, float, float]:
    """Compute precision, recall and F with the best annotator by a plain recursive dynamic program.

    As in the authors' program, METEOR's candidate is the reference.
    """
    results = [(0.0, 0.0, 0.0)]
    predicted = sorted(own.get(video, []), key=lambda segment: segment.start)
    for annotator in annotators:
        references = annotator.get(video, [])
        if not predicted or not references:
            continue
        pairs = {f"{i} {j}": (p, r) for i, p in enumerate(predicted) for j, r in enumerate(references)}
        values = meteor_scorer.meteor_scores(
            {key: r.sentence for key, (_, r) in pairs.items()},
            {key: [p.sentence] for key, (p, _) in pairs.items()},
        )[1]
        weight = {key: plain_overlap(*pair) * values[key] for key, pair in pairs.items()}

        @cache
        def best(i: int, j: int, weight: tuple[tuple[str, float], ...]) -> float:
            if i == 0 or j == 0:
                return 0.0
            matched = best(i - 1, j - 1, weight) + dict(weight)[f"{i - 1} {j - 1}"]
            return max(best(i - 1, j, weight), best(i, j - 1, weight), matched)

        total = best(len(predicted), len(references), tuple(weight.items()))
        p, r = total / len(predicted), total / len(references)
        results.append((p, r, 2 * p * r / (p + r) if total else 0.0))
    return max(results, key=lambda values: values[2])


def check_against_definitions(
    own: Segments, annotators: list[Segments], monkeypatch: pytest.MonkeyPatch, version: str = "2019"
) -> None:
    videos = list(dict.fromkeys(video for annotator in annotators for video in annotator))
    sentences = {s.sentence for group in (own, *annotators) for each in group.values() for s in each}
    scorer = meteor_scorer.PairScorer({*sentences, UNMATCHED[version]})
    table = scorer._tables.paraphrases
    # The table of 5 million paraphrases is read once, not for each group of pairs.
    monkeypatch.setattr(
        meteor_scorer,
        "paraphrases",
        lambda phrases: {
            phrase: [other for other in table[phrase] if other in phrases] for phrase in phrases & set(table)
        },
    )
    scorer.align(overlapping_pairs(videos, own, annotators, UNMATCHED[version]))
    scores = dense_scores(videos, own, annotators, pair_scorer=scorer, version=version)
    expected = plain_scores(own, annotators, videos, UNMATCHED[version], with_meteor=True)
    assert list(scores) == list(expected)
    for name, values in scores.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    story = [plain_soda(own, annotators, video) for video in videos]
    np.testing.assert_allclose(soda_c(videos, own, annotators, scorer), story, rtol=1e-9, atol=1e-12)


@meteor
@pytest.mark.parametrize("version", UNMATCHED)
def test_scores_follow_their_definitions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, annotators = made_segments(3, 12)
    check_against_definitions(own, annotators, monkeypatch, version)


@meteor
@pytest.mark.shared
def test_one_annotator_against_the_other(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared_data / "data" / "annotations" / "activitynet"
    groups = []
    for number in (2, 1):
        segments = read_timed_sentences(folder / f"val_{number}.json.gz")
        groups.append(
            {
                video: [each._replace(sentence=" ".join(ptb_tokenize(each.sentence))) for each in values]
                for video, values in list(segments.items())[:40]
            }
        )
    check_against_definitions(groups[0], groups[1:], monkeypatch)


@meteor
@pytest.mark.shared
@pytest.mark.slow
def test_activitynet_annotators_are_read_and_scored(shared_data: Path) -> None:
    folder = shared_data / "data" / "annotations" / "activitynet"
    scores = score_dense(folder / "val_2.json.gz", [folder / "val_1.json.gz"], missing="empty")
    assert len(scores.per_video) == 4917 and 0.03 < scores.soda["SODA_c F"] < 0.1


def test_segments_that_reach_a_threshold_exactly() -> None:
    """Precision and recall count those beyond it; sentences are scored from the threshold on."""
    half = {"a": [TimedSentence(0, 5, "a man walks")]}
    reference = [{"a": [TimedSentence(0, 10 - 1e-8, "a man walks")]}]  # tIoU .5 with the evaluator's 1e-8
    assert overlaps(half["a"], reference[0]["a"])[0, 0] == 0.5
    scores = dense_scores(["a"], half, reference)
    at = THRESHOLDS.index(0.5)
    assert scores["precision"][0, at - 1] == 1 and scores["precision"][0, at] == 0
    assert scores["BLEU-1"][0, at] > 0.9 and scores["BLEU-1"][0, at + 1] < 0.1


def test_union_of_segments_apart_is_not_their_hull() -> None:
    apart = overlaps([TimedSentence(0, 1, "")], [TimedSentence(0.5, 0.75, ""), TimedSentence(9, 10, "")])
    assert apart[0].tolist() == pytest.approx([0.25, 0.0], abs=1e-6)


def test_without_meteor() -> None:
    own, annotators = made_segments(5, 9)
    videos = list(annotators[0])
    scores = dense_scores(videos, own, annotators)
    expected = plain_scores(own, annotators, videos, UNMATCHED["2019"], with_meteor=False)
    for name, values in scores.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    assert "METEOR" not in scores


def test_versions_differ_only_in_meteor() -> None:
    own = {"v": [TimedSentence(0, 1, "a man"), TimedSentence(5, 9, "the big dog walks on")]}
    annotators = [{"v": [TimedSentence(5, 9, "the big dog walks on"), TimedSentence(6, 9, "a man talks")]}]
    old, new = (dense_scores(["v"], own, annotators, version=version) for version in ("2018", "2019"))
    for name in old:
        np.testing.assert_array_equal(old[name], new[name])


@meteor
def test_scores_equal_those_of_the_authors_programs(tmp_path: Path) -> None:
    """The expected numbers are the output of ``densevid_eval`` deba7d7 and 9d4045a, and of SODA 1.1."""
    predictions = {
        "v_one": [
            ([0, 8], "a man is walking to the park"),
            ([20, 30], "he talks to a big dog"),
            ([9, 18], "the dog walks"),
        ],
        "v_two": [([1, 5], "people are dancing on the street"), ([50, 60], "a woman @ home sings!")],
    }
    annotators = (
        {
            "v_one": [
                ([0, 9], "A man walks to a large park."),
                ([8, 19], "A dog is walking along"),
                ([19, 29], "The man talks to the dog."),
            ],
            "v_two": [
                ([0, 6], "Some people dance in a street."),
                ([10, 20], "They stop."),
                ([30, 40], "More people come."),
            ],
        },
        {"v_one": [([0, 30], "A man and his dog are walking in the park, and he talks.")]},
    )
    files = []
    for number, videos in enumerate((predictions, *annotators)):
        files.append(tmp_path / f"{number}.json")
        parts = {video: tuple(zip(*segments, strict=True)) for video, segments in videos.items()}
        rows = {video: {"timestamps": times, "sentences": texts} for video, (times, texts) in parts.items()}
        files[-1].write_text(json.dumps(rows))
    old, new = (score_dense(files[0], files[1:], version=version) for version in ("2018", "2019"))
    for scores, expected in (
        (old, [0.1678756822691044, 0.18184407753296766, 0.14436690941056257, 0.025157232704402517]),
        (new, [0.15761713870358218, 0.1715855339674454, 0.11920967670616006, 0.0]),
    ):
        assert [each["METEOR"] for each in scores.thresholds.values()] == pytest.approx(expected, abs=1e-15)
        expected = [0.5240533318892613, 0.6618026640268615, 0.45346933069352807, 0.0]
        assert [each["CIDEr-D"] for each in scores.thresholds.values()] == pytest.approx(expected, abs=1e-15)
        expected = [0.13240762057912506, 0.12396928803442629, 0.1273446210523058]
        assert list(scores.soda.values()) == pytest.approx(expected, abs=1e-15)


@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_ordered_matching_equals_enumeration(seed: int, rows: int, columns: int) -> None:
    weights = np.random.default_rng(seed).random((rows, columns)).round(2)

    def best(i: int, j: int) -> float:
        if i == rows or j == columns:
            return 0.0
        return max(best(i + 1, j), best(i, j + 1), weights[i, j] + best(i + 1, j + 1))

    assert ordered_matching(weights) == pytest.approx(best(0, 0))


def test_bleu_of_no_pair_is_zero() -> None:
    references = [{"v": [TimedSentence(0, 1, "a man walks on")], "w": [TimedSentence(0, 1, "a dog")]}]
    scores = dense_scores(["v", "w"], {"w": [TimedSentence(0, 1, "a dog")]}, references)
    for values in scores.values():
        assert not values[0].any()
