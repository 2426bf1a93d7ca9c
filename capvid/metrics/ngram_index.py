"""Tokenized captions and the n-gram index of the references."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from capvid.errors import DataError, UsageError
from capvid.text.tokenization import ptb_tokenize

Ints = NDArray[np.int64]
Shorts = NDArray[np.int32]  # of what there is one of per n-gram and line: the bulk of the memory
Floats = NDArray[np.float64]
BLOCK = 1 << 14  # captions that are matched at once
_BITS = 32  # a pair of numbers below 2**31 is one number


@dataclass(frozen=True)
class Order:
    """N-grams of the references for one n; one entry per n-gram and line.

    Attributes:
        keys: sorted keys of the n-grams; the index of a key is the number of the n-gram.
        videos: number of videos with each n-gram in a reference.
        codes: video and n-gram of each entry as one number, sorted.
        gram: n-gram of each entry.
        line: reference of each entry.
        count: count of the n-gram in the reference.
    """

    keys: Ints
    videos: Shorts
    codes: Ints
    gram: Shorts
    line: Shorts
    count: Shorts


@dataclass(frozen=True)
class Shared:
    """N-grams of predictions for one n, and the entries of references with the same n-grams.

    Attributes:
        line: prediction of each n-gram.
        gram: number of the n-gram; beyond those of the references if no reference has it.
        count: count of the n-gram in the prediction.
        own: n-gram of each pair of a prediction's n-gram and an entry of its video's references.
        entry: entry of each pair.
    """

    line: Ints
    gram: Ints
    count: Ints
    own: Ints
    entry: Ints


class ReferenceIndex:
    """The references of all videos, indexed by n-gram.

    Args:
        references: tokenized reference captions by video.

    Attributes:
        rows: row number of each video.
        first: index of the first reference of each video, then the number of all references.
        words: number of words of each reference.
        orders: n-grams for n = 1..4.
    """

    def __init__(self, references: Mapping[str, Sequence[str]]) -> None:
        self.rows = {video: row for row, video in enumerate(references)}
        counts = [len(lines) for lines in references.values()]
        self.first: Ints = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self._numbers: dict[str, int] = defaultdict(count().__next__)
        self.words, words = self._read([line for lines in references.values() for line in lines])
        keys_by_order: list[Ints] = []

        def number(n: int, keys: Ints) -> Ints:
            if n == 1:  # words are numbered without gaps
                distinct, gram = np.arange(len(self._numbers)), keys
            else:
                distinct, gram = np.unique(keys, return_inverse=True)
            keys_by_order.append(distinct)
            return gram.reshape(-1)

        video = np.repeat(np.arange(len(counts)), counts)
        ngrams = _ngrams(self.words, words, number)
        self.orders = [_order(keys, *grams, video) for keys, grams in zip(keys_by_order, ngrams, strict=True)]

    def match(self, rows: Sequence[int], captions: Sequence[str]) -> tuple[Ints, list[Shared]]:
        """Match n-grams of captions with those of their videos' references.

        Args:
            rows: row number of the video of each caption.
            captions: tokenized captions.

        Returns:
            Number of words per caption, and the shared n-grams for n = 1..4.
        """
        lengths, words = self._read(captions)
        ngrams = _ngrams(lengths, words, lambda n, keys: _find_keys(self.orders[n - 1].keys, keys))
        video = np.asarray(rows, dtype=np.int64)
        shared = [_shared(order, *grams, video) for order, grams in zip(self.orders, ngrams, strict=True)]
        return lengths, shared

    def _read(self, lines: Sequence[str]) -> tuple[Ints, Ints]:
        """Return the number of words per line, and the ids of all words in order."""
        number = self._numbers.__getitem__
        lengths: list[int] = []
        ids: list[int] = []
        for line in lines:
            words = line.split()
            lengths.append(len(words))
            ids += map(number, words)
        return np.array(lengths, dtype=np.int64), np.array(ids, dtype=np.int64)


def _ngrams(lengths: Ints, words: Ints, number: Callable[[int, Ints], Ints]) -> list[tuple[Ints, Ints]]:
    """Return line and number of each n-gram for n = 1..4; ``number`` maps keys to numbers."""
    line = np.repeat(np.arange(len(lengths)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))  # words left in the line
    gram = np.zeros_like(words)
    ngrams = []
    for n in range(1, MAX_N + 1):
        starts = np.flatnonzero(left >= n)
        numbers = number(n, gram[starts] << _BITS | words[starts + n - 1])
        gram = np.zeros_like(words)
        gram[starts] = numbers
        ngrams.append((line[starts], numbers))
    return ngrams


def _find_keys(known: Ints, keys: Ints) -> Ints:
    """Return the index of each of ``keys`` among the sorted ``known`` ones; others are numbered beyond."""
    index = np.searchsorted(known, keys)
    new = np.ones(len(keys), dtype=bool)
    inside = index < len(known)
    new[inside] = known[index[inside]] != keys[inside]
    index[new] = len(known) + np.unique(keys[new], return_inverse=True)[1].reshape(-1)
    return index


def _count_pairs(first: Ints, second: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the distinct pairs of numbers and their counts."""
    pairs, count = np.unique(first << _BITS | second, return_counts=True)
    return pairs >> _BITS, pairs & ((1 << _BITS) - 1), count


def _order(keys: Ints, line: Ints, gram: Ints, video: Ints) -> Order:
    """Index the n-grams of one n; ``line`` ascends."""
    codes = video[line] << _BITS | gram
    sort = np.argsort(codes, kind="stable")  # keeps lines in order within a code, so one sort counts both
    codes, line, gram = codes[sort], line[sort], gram[sort]
    first = np.ones(len(codes), dtype=bool)
    first[1:] = (codes[1:] != codes[:-1]) | (line[1:] != line[:-1])
    starts = np.flatnonzero(first)
    count = np.diff(starts, append=len(codes))
    codes, line, gram = codes[starts], line[starts], gram[starts]
    new = np.ones(len(codes), dtype=bool)
    new[1:] = codes[1:] != codes[:-1]
    videos = np.bincount(gram[new], minlength=len(keys))
    return Order(
        keys, videos.astype(np.int32), codes, *(each.astype(np.int32) for each in (gram, line, count))
    )


def _shared(order: Order, line: Ints, gram: Ints, video: Ints) -> Shared:
    line, gram, count = _count_pairs(line, gram)
    codes = video[line] << _BITS | gram
    start = np.searchsorted(order.codes, codes, "left")
    matches = np.searchsorted(order.codes, codes, "right") - start
    own = np.repeat(np.arange(len(line)), matches)
    step = np.arange(len(own)) - np.repeat(np.cumsum(matches) - matches, matches)
    return Shared(line, gram, count, own, start[own] + step)


MAX_N = 4
TOKENIZERS = ("auto", "ptb", "builtin", "none")

Caption = str | Sequence[str]


def tokenize(caption: Caption, *, tokenizer: str = "builtin") -> str:
    """Join the tokens of a caption by spaces.

    Args:
        caption: a text, or a list of tokens, which is not tokenized again.
        tokenizer: ``builtin`` or ``auto`` for :mod:`capvid.text.tokenization`; ``none`` splits at spaces.

    Raises:
        UsageError: no such tokenizer, or ``ptb``, which takes all captions at once.
    """
    check_tokenizer(tokenizer)
    if tokenizer == "ptb":
        raise UsageError(
            "the tokenizer 'ptb' takes no single captions", remedy="use capvid.scoring.scorer.score"
        )
    if not isinstance(caption, str):
        return " ".join(caption)
    return caption if tokenizer == "none" else " ".join(ptb_tokenize(caption))


def check_tokenizer(name: str) -> None:
    """Raise UsageError if there is no tokenizer ``name``."""
    if name not in TOKENIZERS:
        raise UsageError(f"no tokenizer named {name!r}", remedy=f"use one of: {', '.join(TOKENIZERS)}")


def check_predictions(predictions: Mapping[str, object], references: Iterable[str]) -> None:
    """Raise DataError if videos of the references have no prediction; the message names the first ones."""
    missing = [video for video in references if video not in predictions]
    if missing:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise DataError(
            f"no prediction for {len(missing)} of the videos in the references: {named}",
            remedy="caption these videos too, or take them out of the references",
        )


def check_references(references: Mapping[str, Sequence[Caption]]) -> None:
    """Raise DataError if there is no video, or one without a list of references."""
    if not references:
        raise DataError("the references hold no video", remedy="give at least one video with its captions")
    for video, captions in references.items():
        if isinstance(captions, str):
            raise DataError(f"{video}: the references are one text", remedy="give a list of captions")
        if not captions:
            raise DataError(f"{video}: no references", remedy="give it a caption, or take the video out")
