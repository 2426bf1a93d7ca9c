"""Words and their numbers."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from capvid.fields import short
from capvid.text.function_words import FUNCTION_WORDS

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
LONGEST = 200  # characters of a word
_BIDIRECTIONAL = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def is_word(word: str) -> bool:
    """Whether a vocabulary may hold ``word``: text of one line that cannot steer a terminal."""
    if not word.strip() or len(word) > LONGEST:
        return False
    if word.isprintable():  # as most words are, without a look at each character
        return True
    categories = {unicodedata.category(character) for character in word}
    return categories.isdisjoint(("Cc", "Cs", "Zl", "Zp")) and _BIDIRECTIONAL.isdisjoint(word)


class Vocabulary:
    """An ordered list of words; the first four are padding, start, end and unknown."""

    def __init__(self, words: Sequence[str]) -> None:
        if tuple(words[:4]) != SPECIAL:
            words = [*SPECIAL, *words]
        self.words = list(words)
        self.index = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def build(cls, captions: Iterable[Sequence[str]], *, min_count: int, max_size: int) -> Vocabulary:
        """The most frequent words of tokenised captions: at least ``min_count`` times, at most ``max_size``.

        Words of equal frequency come in alphabetical order, so that the same captions always give the same
        vocabulary. Words with control characters are left out.
        """
        counts = Counter(word for caption in captions for word in caption)
        frequent = (word for word, count in counts.items() if count >= min_count and is_word(word))
        return cls(sorted(frequent, key=lambda word: (-counts[word], word))[:max_size])

    @classmethod
    def checked(cls, words: object) -> Vocabulary:
        """Return the vocabulary of ``words`` from a file that is not trusted.

        Raises:
            ValueError: they are not the four special words and other words, each of them once.
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
        """Numbers of ``words``; those not in the vocabulary are unknown."""
        return [self.index.get(word, UNK) for word in words]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Words of ``numbers``."""
        return [self.words[number] for number in numbers]

    def function_words(self) -> list[int]:
        """Numbers of the words that hold a sentence together (:mod:`capvid.text.function_words`)."""
        return [number for number, word in enumerate(self.words) if word in FUNCTION_WORDS]

    def sentence(self, numbers: Sequence[int]) -> tuple[str, list[tuple[str, list[int]]]]:
        """The text that tokens with these ``numbers`` make.

        Returns:
            the text, and its words, each with the places of its tokens in ``numbers``.
        """
        words = self.decode(numbers)
        return " ".join(words), [(word, [place]) for place, word in enumerate(words)]
