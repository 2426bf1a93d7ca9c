"""Words and their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from capvid.text.function_words import FUNCTION_WORDS

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


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
        vocabulary.
        """
        counts = Counter(word for caption in captions for word in caption)
        kept = sorted((-count, word) for word, count in counts.items() if count >= min_count)
        return cls([word for _, word in kept[:max_size]])

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
