"""METEOR 1.5 (Banerjee and Lavie, 2005; Denkowski and Lavie, 2014) without Java.

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
from decimal import Decimal
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from capvid.metrics.meteor.alignment import Alignment, Match, align
from capvid.metrics.meteor.english import PHRASE_WORDS, English, english, paraphrases

ALPHA, BETA, GAMMA, DELTA = 0.85, 0.2, 0.6, 0.75
EXACT, STEM, SYNONYM, PARAPHRASE = range(4)
WEIGHTS = (1.0, 0.6, 0.8, 0.6)  # of the modules
MODULES = len(WEIGHTS)
_SIDE = 2 * (1 + MODULES)  # counts of a sentence
_MARGIN = 1e-9  # more than the rounding error of a bound

# Of an aligned pair, or summed over many. For the prediction and then for the reference: content and function
# words, then those matched by each module. Last the chunks; none if all words are matched in one.
Counts = list[int]


def _spans(text: str) -> list[tuple[int, int, bytes]]:
    """Return start, length and words of each run of up to seven words, by start and then by length."""
    words = text.encode("utf-8", "surrogatepass").split()
    return [
        (start, end - start, b" ".join(words[start:end]))
        for start in range(len(words))
        for end in range(start + 1, min(start + PHRASE_WORDS, len(words)) + 1)
    ]


def _score_counts(counts: Counts) -> float:
    prediction, reference, chunks = counts[:_SIDE], counts[_SIDE:-1], counts[-1]
    matched = sum(prediction[2:]) + sum(reference[2:])
    return _score(_weigh(prediction), _weigh(reference), chunks / (matched / 2)) if matched else 0.0


def _weigh(counts: Sequence[int]) -> float:
    """Return precision or recall from the counts of the prediction or reference.

    Terms are added in the order of the published program, here and below: rounding decides which of equally
    good references enters the corpus score.
    """
    total = DELTA * counts[0] + (1 - DELTA) * counts[1]
    matches = 0.0
    for kind, delta in enumerate((DELTA, 1 - DELTA)):
        for weight, count in zip(WEIGHTS, counts[2 + kind :: 2], strict=True):
            matches += weight * count * delta
    return matches / total if total else 0.0


def _score(precision: float, recall: float, fragmentation: float) -> float:
    if not precision or not recall:
        return 0.0
    mean = 1 / ((1 - ALPHA) / precision + ALPHA / recall)
    return mean * (1 - GAMMA * _power_of_beta(fragmentation))


@lru_cache(maxsize=1 << 16)
def _power_of_beta(fragmentation: float) -> float:
    """Return fragmentation ** BETA, correctly rounded; C's ``pow`` and Java's err on different numbers."""
    return float(Decimal(fragmentation) ** Decimal(BETA))


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
        self.paraphrases = paraphrases(phrases)  # by phrase, in the table's order
        self.sources: dict[bytes, list[tuple[bytes, int]]] = {}  # by paraphrase: phrases, its rank with each
        for phrase, others in self.paraphrases.items():
            for rank, other in enumerate(others):
                self.sources.setdefault(other, []).append((phrase, rank))
        self._words: dict[str, _Word] = {}

    def word(self, word: str) -> _Word:
        if word not in self._words:
            stem = self.language.stem(word)
            self._words[word] = _Word(_code(word), _code(stem), self.language.synsets(word))
        return self._words[word]


class _Caption:
    """A normalized caption: words, their weights, and its phrases with paraphrases."""

    __slots__ = ("content", "kinds", "length", "phrases", "text", "weight", "weights", "words")

    def __init__(self, text: str, tables: _Tables) -> None:
        self.text = text
        self.words = text.split(" ") if text else []
        self.length = len(self.words)
        self.content = [word not in tables.language.function_words for word in self.words]
        self.weights = [DELTA if content else 1 - DELTA for content in self.content]
        self.weight = sum(self.weights)
        content = sum(self.content)
        self.kinds = content, self.length - content  # content and function words
        phrases, sources = tables.paraphrases, tables.sources
        self.phrases = [span for span in _spans(text) if span[2] in phrases or span[2] in sources]


class _Prediction:
    """A prediction, indexed by the words and phrases that match it."""

    def __init__(self, caption: _Caption, tables: _Tables) -> None:
        self._tables = tables
        self._matches: dict[str, list[tuple[int, int]]] = {}  # by word: position in the prediction, module
        self._words = [(position, *tables.word(word)) for position, word in enumerate(caption.words)]
        # By phrase of a reference: phrases of the prediction that are its paraphrases, or the reverse.
        self._backward: dict[bytes, list[tuple[int, int, int]]] = {}  # rank, position, length
        self._forward: dict[bytes, list[tuple[int, int, int]]] = {}  # position, length, rank
        for start, length, phrase in caption.phrases:
            for source, rank in tables.sources.get(phrase, ()):
                self._backward.setdefault(source, []).append((rank, start, length))
            for rank, other in enumerate(tables.paraphrases.get(phrase, ())):
                self._forward.setdefault(other, []).append((start, length, rank))
        for entries in self._backward.values():
            entries.sort()

    def _match_word(self, word: str) -> list[tuple[int, int]]:
        """Return the words that match ``word``, by module and then by position."""
        matches = self._matches.get(word)
        if matches is None:
            code, stem, synsets = self._tables.word(word)
            matches = [(position, EXACT) for position, own, _, _ in self._words if own == code]
            others = [entry for entry in self._words if entry[1] != code]
            matches += [(position, STEM) for position, _, root, _ in others if root == stem]
            matches += [(position, SYNONYM) for position, *_, own in others if not own.isdisjoint(synsets)]
            self._matches[word] = matches
        return matches

    def matches(self, reference: _Caption) -> list[list[Match]]:
        """Return all matches by their start in the reference, in the order that decides ties."""
        starts = [
            [Match(position, 1, start, 1, module) for position, module in self._match_word(word)]
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


def _count(prediction: _Caption, reference: _Caption, alignment: Alignment) -> Counts:
    own, theirs = [0] * (2 * MODULES), [0] * (2 * MODULES)
    for match in alignment.matches:
        for position in range(match.start, match.start + match.length):
            own[2 * match.module + (not prediction.content[position])] += 1
        for position in range(match.reference_start, match.reference_start + match.reference_length):
            theirs[2 * match.module + (not reference.content[position])] += 1
    complete = sum(own) == prediction.length and sum(theirs) == reference.length
    chunks = 0 if complete and alignment.chunks == 1 else alignment.chunks
    return [*prediction.kinds, *own, *reference.kinds, *theirs, chunks]


def _best(prediction: _Caption, references: Sequence[_Caption], tables: _Tables) -> Counts:
    """Return the counts of the first reference with the highest score; skip those whose bound is lower."""
    if prediction.length and any(reference.text == prediction.text for reference in references):
        identical = [*prediction.kinds, *prediction.kinds, *[0] * (2 * MODULES - 2)]
        return [*identical, *identical, 0]  # no other score is as high
    index = _Prediction(prediction, tables)
    bounds = []
    distinct = {reference.text: reference for reference in references}
    for position, reference in enumerate(distinct.values()):
        starts = index.matches(reference)
        bounds.append((-_bound(prediction, reference, starts), position, reference, starts))
    bounds.sort(key=itemgetter(0, 1))
    best: tuple[float, int, Counts] | None = None  # negative score, position, counts
    for bound, position, reference, starts in bounds:
        if best is not None and bound > best[0] + _MARGIN:
            break
        counts = _count(prediction, reference, align(starts, prediction.length))
        key = (-_score_counts(counts), position)
        if best is None or key < best[:2]:
            best = *key, counts
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
    texts = {text for captions in references.values() for text in captions}
    normalised = {text: language.normalise(text) for text in texts}
    tables = _Tables({*own.values(), *normalised.values()}, language)
    counts = {}
    for video, texts_of_video in references.items():
        captions = [_Caption(normalised[text], tables) for text in texts_of_video]
        counts[video] = _best(_Caption(own[video], tables), captions, tables)
    corpus = [sum(column) for column in zip(*counts.values(), strict=True)]
    return _score_counts(corpus), {video: _score_counts(count) for video, count in counts.items()}


class PairScorer:
    """METEOR of single pairs, whose counts may be added up over groups of pairs.

    The word lists are read once for all sentences, which are tokenized, tokens separated by single spaces.

    Raises:
        DataError: METEOR's word lists are not installed.
    """

    def __init__(self, sentences: Iterable[str]) -> None:
        language = english()
        texts = {text: language.normalise(text.replace("|||", "")) for text in sentences}
        self._tables = _Tables(texts.values(), language)
        self._captions = {text: _Caption(normalized, self._tables) for text, normalized in texts.items()}
        self._counts: dict[tuple[str, str], Counts] = {}

    def align(self, pairs: Iterable[tuple[str, Iterable[str]]]) -> None:
        """Align predictions, each with its references; forget the pairs of the last call."""
        self._counts.clear()  # memory does not grow with the number of videos
        for prediction, references in pairs:
            own, index = self._captions[prediction], None
            for reference in references:
                other = self._captions[reference]
                if (prediction, reference) in self._counts:
                    continue
                if own.text == other.text:
                    counts = _best(own, [other], self._tables)
                else:
                    index = index or _Prediction(own, self._tables)
                    counts = _count(own, other, align(index.matches(other), own.length))
                self._counts[prediction, reference] = counts

    def counts(self, prediction: str, reference: str) -> Counts:
        """Return the counts of an aligned pair."""
        return self._counts[prediction, reference]

    def score(self, counts: Counts) -> float:
        """Return the score (0 to 1) of counts, of a pair or summed over several."""
        return _score_counts(counts)
