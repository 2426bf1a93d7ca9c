"""Vocabularies of words."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from capvid.errors import UsageError
from capvid.utils.files import open_regular
from capvid.utils.validation import short

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
LONGEST = 200  # characters of a word
_LONGEST_LINE = 2**18  # bytes of a line of word vectors
_BIDIRECTIONAL = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def is_word(word: str) -> bool:
    """Return whether ``word`` is one line without terminal control characters."""
    if not word.strip() or len(word) > LONGEST:
        return False
    if word.isprintable():  # nearly every word, without a look at each character
        return True
    categories = {unicodedata.category(character) for character in word}
    return categories.isdisjoint(("Cc", "Cs", "Zl", "Zp")) and _BIDIRECTIONAL.isdisjoint(word)


class Vocabulary:
    """An ordered list of words; the first four are padding, start, end and unknown.

    Attributes:
        words: the words by number.
        index: number of each word.
        function_words: numbers of the :data:`FUNCTION_WORDS`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        if tuple(words[:4]) != SPECIAL:
            words = [*SPECIAL, *words]
        self.words = list(words)
        self.index = {word: number for number, word in enumerate(self.words)}
        self.function_words = [number for number, word in enumerate(self.words) if word in FUNCTION_WORDS]

    @classmethod
    def build(cls, captions: Iterable[Sequence[str]], *, min_count: int, max_size: int) -> Vocabulary:
        """Build from the ``max_size`` most frequent words that occur at least ``min_count`` times.

        Words of equal frequency are sorted alphabetically; words with control characters are dropped.
        """
        counts = Counter(word for caption in captions for word in caption)
        frequent = (word for word, count in counts.items() if count >= min_count and is_word(word))
        return cls(sorted(frequent, key=lambda word: (-counts[word], word))[:max_size])

    @classmethod
    def checked(cls, words: object) -> Vocabulary:
        """Build from ``words`` of an untrusted file.

        Raises:
            ValueError: not a list of distinct words that begins with the four special ones.
        """
        if not isinstance(words, list) or tuple(words[:4]) != SPECIAL:
            raise ValueError(f"must be a list that begins with {', '.join(SPECIAL)}")
        for number, word in enumerate(words):
            if not isinstance(word, str) or not is_word(word):
                raise ValueError(f"[{number}] must be a word without control characters, got {short(word)}")
        vocabulary = cls(words)
        if len(vocabulary.index) < len(words):
            twice = next(word for number, word in enumerate(words) if vocabulary.index[word] != number)
            raise ValueError(f"must hold each word once, got {short(twice)} twice")
        return vocabulary

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Sequence[str]) -> list[int]:
        """Return the numbers of ``words``, :data:`UNK` for those not in the vocabulary."""
        return [self.index.get(word, UNK) for word in words]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Return the words of ``numbers``."""
        return [self.words[number] for number in numbers]

    def sentence(self, numbers: Sequence[int]) -> tuple[str, list[tuple[str, list[int]]]]:
        """Return the text of tokens, and its words, each with the indices of its tokens in ``numbers``."""
        words = [self.words[number] for number in numbers]
        return " ".join(words), [(word, [index]) for index, word in enumerate(words)]


_ARTICLES = "a an the this that these those some other another his her its their"
_PREPOSITIONS = (
    "about across against along around as at away behind by down for from in inside into near of off on onto "
    "out outside over through to toward towards under up with without"
)
_CONJUNCTIONS = "and but how or so then what when where which while who"
_PRONOUNS = "he him himself it she someone something them they"
_AUXILIARIES = "am are be been being can do does has have is not s was were will"  # "s" of "it's"

FUNCTION_WORDS = frozenset(
    " ".join((_ARTICLES, _PREPOSITIONS, _CONJUNCTIONS, _PRONOUNS, _AUXILIARIES)).split()
)


def read_word_vectors(path: Path, vocabulary: Vocabulary, width: int) -> Iterator[tuple[int, list[float]]]:
    """Yield the number and the vector of each word of the vocabulary in a text file such as GloVe's.

    A line is a word and ``width`` numbers, separated by spaces. The file is read line by line.

    Raises:
        UsageError: the file cannot be read, a line is no such line, or no word is in the vocabulary.
    """
    matches = 0
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                word, *numbers = line.decode("utf-8", "replace").rstrip().rsplit(" ", width)
                count = len(line.split()) - 1
                # A word may contain spaces, but hardly the first one.
                if len(numbers) != width or len(line) == _LONGEST_LINE or (number == 1 and count != width):
                    raise UsageError(
                        f"{path}: line {number} has {count} numbers, but model.word_width is {width}",
                        remedy="choose the file or the width that fits",
                    )
                if word in vocabulary.index:
                    vector = [float(value) for value in numbers]
                    if not all(map(math.isfinite, vector)):
                        raise ValueError(f"line {number} has numbers that are not finite")
                    matches += 1
                    yield vocabulary.index[word], vector
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: not a file of word vectors ({reason})") from error
    if not matches:
        raise UsageError(f"{path}: no word of the training captions is in this file")
