from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capvid.scoring.diversity import Diversity, diversity

WORDS = st.sampled_from(["a", "man", "dog", "runs", "talks"])
CAPTIONS = st.lists(st.lists(WORDS, max_size=6).map(" ".join), min_size=1, max_size=12)


def recomputed(captions: list[str], training: list[str]) -> Diversity:
    """Count in plain loops."""
    seen: list[str] = []
    words: list[str] = []
    bigrams: list[tuple[str, str]] = []
    copies = 0
    for caption in captions:
        if caption not in seen:
            seen.append(caption)
        tokens = caption.split()
        for position, token in enumerate(tokens):
            words.append(token)
            if position:
                bigrams.append((tokens[position - 1], token))
        copies += caption in training
    different_words = [word for n, word in enumerate(words) if word not in words[:n]]
    different_bigrams = [pair for n, pair in enumerate(bigrams) if pair not in bigrams[:n]]
    return Diversity(
        distinct=len(seen) / len(captions),
        vocabulary=len(different_words),
        distinct_1=len(different_words) / len(words) if words else 0.0,
        distinct_2=len(different_bigrams) / len(bigrams) if bigrams else 0.0,
        mean_length=len(words) / len(captions),
        in_training=copies / len(captions),
    )


@given(CAPTIONS, CAPTIONS)
def test_equals_plain_counting(captions: list[str], training: list[str]) -> None:
    assert diversity(captions, training) == recomputed(captions, training)


@given(CAPTIONS, st.integers(0, 99))
def test_order_does_not_matter(captions: list[str], seed: int) -> None:
    shuffled = captions.copy()
    random.Random(seed).shuffle(shuffled)
    assert diversity(shuffled) == diversity(captions)


@given(CAPTIONS.filter(any))
def test_duplicates_lower_it(captions: list[str]) -> None:
    once, twice = diversity(captions), diversity(captions * 2)
    assert twice.distinct == pytest.approx(once.distinct / 2)
    assert twice.distinct_1 == pytest.approx(once.distinct_1 / 2)
    assert twice.distinct_2 == pytest.approx(once.distinct_2 / 2)
    assert (twice.vocabulary, twice.mean_length) == (once.vocabulary, once.mean_length)


def test_no_captions() -> None:
    assert diversity([]) == Diversity(
        distinct=0.0, vocabulary=0, distinct_1=0.0, distinct_2=0.0, mean_length=0.0, in_training=None
    )
    assert diversity(["a dog"], []).in_training == 0.0
