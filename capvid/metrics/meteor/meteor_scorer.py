"""METEOR 1.5 (Banerjee and Lavie, 2005; Denkowski and Lavie, 2014), digit for digit and without Java.

A prediction h is aligned with a reference r: no word is used twice, and each match is a pair of equal words,
of words of one stem, of synonyms, or of paraphrases. With w(k) the weight of these four modules, and d(.) a
sum over words that counts content words d = .75 and function words 1 - d,

    P = sum_k w(k) d(h_k) / d(h)     h_k: words of h matched by module k
    R = sum_k w(k) d(r_k) / d(r)     r_k: words of r likewise
    F = 1 / ((1 - a) / P + a / R),     score = F (1 - g (c / m)^b),     a, b, g = .85, .2, .6

where the alignment falls into c chunks that are contiguous in both sentences and m is the number of matched
words, the mean of both sides; a perfect match in one chunk has no penalty, and c = 0. A video's score is that
of its best reference; the corpus score is computed from the summed counts of those references. The alignment
is described in :mod:`capvid.metrics.meteor.alignment`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from capvid.metrics.meteor.alignment import Alignment, Match, align
from capvid.metrics.meteor.english import PHRASE_WORDS, English, english, paraphrases

ALPHA, BETA, GAMMA, DELTA = 0.85, 0.2, 0.6, 0.75
EXACT, STEM, SYNONYM, PARAPHRASE = range(4)
WEIGHTS = (1.0, 0.6, 0.8, 0.6)  # of the modules
MODULES = len(WEIGHTS)
_MARGIN = 1e-9  # above what rounding does to a bound

Spans = list[tuple[int, int, bytes]]  # start, number of words, the words


class _Caption:
    """A normalized caption: words, their weights, and its phrases with paraphrases."""

    __slots__ = ("content", "length", "phrases", "text", "weight", "weights", "words")

    def __init__(self, text: str, language: English) -> None:
        self.text = text
        self.words = text.split(" ") if text else []
        self.length = len(self.words)
        self.content = [word not in language.function_words for word in self.words]
        self.weights = [DELTA if content else 1 - DELTA for content in self.content]
        self.weight = sum(self.weights)
        self.phrases: Spans = []


def _spans(text: str) -> Spans:
    """Return each run of up to seven words of a normalized text, by start and then by length."""
    words = text.encode("utf-8", "surrogatepass").split()
    return [
        (start, end - start, b" ".join(words[start:end]))
        for start in range(len(words))
        for end in range(start + 1, min(start + PHRASE_WORDS, len(words)) + 1)
    ]


@dataclass(frozen=True)
class _Counts:
    """Counts of one aligned pair, or summed over many."""

    predicted: tuple[int, int]  # content and function words of the prediction
    referenced: tuple[int, int]
    matched_predicted: tuple[tuple[int, int], ...]  # content and function words matched by each module
    matched_referenced: tuple[tuple[int, int], ...]
    chunks: int  # none where every word is matched, on both sides, in one chunk

    @property
    def score(self) -> float:
        precision = _weighted(self.matched_predicted, self.predicted)
        recall = _weighted(self.matched_referenced, self.referenced)
        matched = sum(map(sum, self.matched_predicted)) + sum(map(sum, self.matched_referenced))
        return _score(precision, recall, self.chunks / (matched / 2)) if matched else 0.0


def _weighted(matched: Sequence[tuple[int, int]], words: tuple[int, int]) -> float:
    """Return precision or recall from counts of content and function words.

    Terms are added in the order of the published program, here and below: rounding decides which of equally
    good references enters the corpus score.
    """
    total = DELTA * words[0] + (1 - DELTA) * words[1]
    matches = 0.0
    for kind, delta in enumerate((DELTA, 1 - DELTA)):
        for weight, counts in zip(WEIGHTS, matched, strict=True):
            matches += weight * counts[kind] * delta
    return matches / total if total else 0.0


def _score(precision: float, recall: float, fragmentation: float) -> float:
    if not precision or not recall:
        return 0.0
    mean = 1 / ((1 - ALPHA) / precision + ALPHA / recall)
    return float(mean * (1 - GAMMA * fragmentation**BETA))


def _count(prediction: _Caption, reference: _Caption, alignment: Alignment) -> _Counts:
    own = [[0, 0] for _ in range(MODULES)]
    theirs = [[0, 0] for _ in range(MODULES)]
    for match in alignment.matches:
        for position in range(match.start, match.start + match.length):
            own[match.module][not prediction.content[position]] += 1
        for position in range(match.reference_start, match.reference_start + match.reference_length):
            theirs[match.module][not reference.content[position]] += 1
    everything = sum(map(sum, own)) == prediction.length and sum(map(sum, theirs)) == reference.length
    return _Counts(
        predicted=_kinds(prediction),
        referenced=_kinds(reference),
        matched_predicted=tuple((content, function) for content, function in own),
        matched_referenced=tuple((content, function) for content, function in theirs),
        chunks=0 if everything and alignment.chunks == 1 else alignment.chunks,
    )


def _kinds(caption: _Caption) -> tuple[int, int]:
    content = sum(caption.content)
    return content, caption.length - content


def _sum(counts: Iterable[_Counts]) -> _Counts:
    every = list(counts)

    def added(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
        first, second = zip(*pairs, strict=True)
        return sum(first), sum(second)

    return _Counts(
        predicted=added(one.predicted for one in every),
        referenced=added(one.referenced for one in every),
        matched_predicted=tuple(added(one.matched_predicted[k] for one in every) for k in range(MODULES)),
        matched_referenced=tuple(added(one.matched_referenced[k] for one in every) for k in range(MODULES)),
        chunks=sum(one.chunks for one in every),
    )


class _Word(NamedTuple):
    code: int
    stem: int
    synsets: frozenset[str]


def _code(word: str) -> int:
    """Return the 32-bit Java hash by which the published program compares words and stems.

    Different words may share it, such as ``bun`` and ``d90``.
    """
    code = 0
    for unit in array("H", word.encode("utf-16-le", "surrogatepass")):
        code = (31 * code + unit) & 0xFFFFFFFF
    return code


class _Tables:
    """Codes, stems, synonyms and paraphrases of the words and phrases of all captions."""

    def __init__(self, texts: Iterable[str], language: English) -> None:
        self.language = language
        phrases: set[bytes] = set()
        for text in texts:
            phrases.update(phrase for _, _, phrase in _spans(text))
        self.paraphrases = paraphrases(phrases)  # of a phrase, in the table's order
        self.sources: dict[
            bytes, list[tuple[bytes, int]]
        ] = {}  # of a paraphrase: phrases, its rank with each
        for phrase, others in self.paraphrases.items():
            for rank, other in enumerate(others):
                self.sources.setdefault(other, []).append((phrase, rank))
        self._words: dict[str, _Word] = {}

    def caption(self, text: str) -> _Caption:
        caption = _Caption(text, self.language)
        caption.phrases = [
            span for span in _spans(text) if span[2] in self.paraphrases or span[2] in self.sources
        ]
        return caption

    def word(self, word: str) -> _Word:
        if word not in self._words:
            stem = self.language.stem(word)
            self._words[word] = _Word(_code(word), _code(stem), self.language.synsets(word))
        return self._words[word]


class _Prediction:
    """A prediction, indexed by the words and phrases that match it."""

    def __init__(self, caption: _Caption, tables: _Tables) -> None:
        self.caption = caption
        self._tables = tables
        self._words: dict[str, list[tuple[int, int]]] = {}  # of a word: position in the prediction, module
        self._known = [(position, *tables.word(word)) for position, word in enumerate(caption.words)]
        # For a phrase of a reference: phrases of the prediction that are its paraphrases, or the reverse.
        self._backward: dict[bytes, list[tuple[int, int, int]]] = {}  # rank, position, length
        self._forward: dict[bytes, list[tuple[int, int, int]]] = {}  # position, length, rank
        for start, length, phrase in caption.phrases:
            for source, rank in tables.sources.get(phrase, ()):
                self._backward.setdefault(source, []).append((rank, start, length))
            for rank, other in enumerate(tables.paraphrases.get(phrase, ())):
                self._forward.setdefault(other, []).append((start, length, rank))
        for entries in self._backward.values():
            entries.sort()

    def _single(self, word: str) -> list[tuple[int, int]]:
        """Return the words that match ``word``, by module and then by position."""
        matches = self._words.get(word)
        if matches is None:
            code, stem, synsets = self._tables.word(word)
            matches = [(position, EXACT) for position, own, _, _ in self._known if own == code]
            matches += [
                (position, STEM) for position, own, root, _ in self._known if root == stem and own != code
            ]
            matches += [
                (position, SYNONYM)
                for position, own, _, senses in self._known
                if own != code and not senses.isdisjoint(synsets)
            ]
            self._words[word] = matches
        return matches

    def matches(self, reference: _Caption) -> list[list[Match]]:
        """Return all matches by their start in the reference, in the order that decides ties."""
        starts = [
            [Match(position, 1, start, 1, module) for position, module in self._single(word)]
            for start, word in enumerate(reference.words)
        ]
        forward: list[tuple[int, int, int, int, int]] = []
        for start, length, phrase in reference.phrases:
            for _, position, own in self._backward.get(phrase, ()):
                starts[start].append(Match(position, own, start, length, PARAPHRASE))
            for position, own, rank in self._forward.get(phrase, ()):
                forward.append((position, own, rank, start, length))
        for position, own, _, start, length in sorted(forward):
            starts[start].append(Match(position, own, start, length, PARAPHRASE))
        return starts


def _bound(prediction: _Caption, reference: _Caption, starts: Sequence[Sequence[Match]]) -> float:
    """Return an upper bound on the score of any alignment: all words matched at best, in one chunk."""
    own, theirs = [0.0] * prediction.length, [0.0] * reference.length
    for matches in starts:
        for position, length, start, reference_length, module in matches:
            weight = WEIGHTS[module]
            for i in range(position, position + length):
                own[i] = max(own[i], weight)
            for j in range(start, start + reference_length):
                theirs[j] = max(theirs[j], weight)
    matched = sum(map(bool, own)), sum(map(bool, theirs))
    if not matched[0]:
        return 0.0
    precision = sum(w * d for w, d in zip(own, prediction.weights, strict=True)) / prediction.weight
    recall = sum(w * d for w, d in zip(theirs, reference.weights, strict=True)) / reference.weight
    perfect = matched == (prediction.length, reference.length)
    return _score(precision, recall, 0.0 if perfect else 2 / sum(matched))


def _identical(caption: _Caption) -> _Counts:
    nothing = (0, 0)
    matched = (_kinds(caption), *[nothing] * (MODULES - 1))
    return _Counts(_kinds(caption), _kinds(caption), matched, matched, chunks=0)


def _best(prediction: _Caption, references: Sequence[_Caption], tables: _Tables) -> _Counts:
    """Return the counts of the first reference with the highest score; skip those whose bound is lower."""
    if prediction.length and any(reference.text == prediction.text for reference in references):
        return _identical(prediction)  # no other score is as high
    index = _Prediction(prediction, tables)
    bounds = []
    different = {reference.text: reference for reference in references}
    for position, reference in enumerate(different.values()):
        starts = index.matches(reference)
        bounds.append((-_bound(prediction, reference, starts), position, reference, starts))
    bounds.sort(key=lambda entry: entry[:2])
    best: tuple[float, int, _Counts] | None = None
    for bound, position, reference, starts in bounds:
        if best is not None and -bound < best[0] - _MARGIN:
            break
        counts = _count(prediction, reference, align(starts, prediction.length))
        if best is None or (-counts.score, position) < (-best[0], best[1]):
            best = counts.score, position, counts
    assert best is not None  # there is a reference
    return best[2]


def meteor_scores(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> tuple[float, dict[str, float]]:
    """Compute METEOR of tokenized captions.

    Args:
        predictions: caption by video, tokens separated by single spaces.
        references: reference captions by video, likewise.

    Returns:
        The corpus score, and the score of each video; from 0 to 1.

    Raises:
        DataError: METEOR's word lists are not installed; the message says how to get them.
    """
    language = english()
    own = {video: language.normalise(predictions[video].replace("|||", "")) for video in references}
    texts = {line for lines in references.values() for line in lines}
    normal = {line: language.normalise(line) for line in texts}
    tables = _Tables({*own.values(), *normal.values()}, language)
    counts = {}
    for video, lines in references.items():
        captions = [tables.caption(normal[line]) for line in lines]
        counts[video] = _best(tables.caption(own[video]), captions, tables)
    return _sum(counts.values()).score, {video: one.score for video, one in counts.items()}
