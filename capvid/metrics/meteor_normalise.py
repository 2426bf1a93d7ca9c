"""The text normalisation of METEOR 1.5 (option ``-norm``): punctuation apart, contractions split, lower case.

Written from what the published program does to texts: single characters and all combinations of awkward ones
were put through it and the rules below found from its answers. The order of the rules matters, and so does
that a rule never looks again at a character that it has just used (``a-b-c`` becomes ``a b-c``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Latin, Cyrillic and phonetic letters; those of other scripts stand alone, as punctuation does.
LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017e\u0400-\u0527\u1d00-\u1d7f\ua640-\ua66e\ua67e-\ua697"
_SPACES = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")  # tokens of their own until the very end
_BLANK = " \t\n\r\f"

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[\u2018\u2019`]", "'"),
        ("''", ' " '),
        ("[\u201c\u201d]", ' " '),
        (rf"([^{LETTERS}0-9{_BLANK}\x0b.'\-,])", r" \1 "),
        (r"(\.\.+)", r" \1 "),
        ("([^0-9]),([^0-9])", r"\1 , \2"),
        ("([0-9]),([^0-9])", r"\1 , \2"),
        ("([^0-9]),([0-9])", r"\1 , \2"),
        ("--", "-"),
        (rf"([{LETTERS}0-9.])-([{LETTERS}0-9])", r"\1 \2"),
        (rf"([^{LETTERS}])'([^{LETTERS}])", r"\1 ' \2"),
        (rf"([^{LETTERS}0-9])'([{LETTERS}])", r"\1 ' \2"),
        (rf"([{LETTERS}])'([^{LETTERS}])", r"\1 ' \2"),
        (rf"([{LETTERS}])'([{LETTERS}])", r"\1 '\2"),
        ("([0-9])'(s)", r"\1 '\2"),
        ("\u2013", "-"),
    )
]
_PLAIN = re.compile("[a-z0-9]+(?: [a-z0-9]+)*")
_HAS_LETTER = re.compile(f"[{LETTERS}]")


class Normaliser:
    """Normalises texts.

    Args:
        prefixes: lines of METEOR's list of words that keep a dot behind them, in the case it is kept in;
            those marked ``#NUMERIC_ONLY#`` keep it before a number only.
    """

    def __init__(self, prefixes: Iterable[str]) -> None:
        lines = [line.split() for line in prefixes if line.strip() and not line.startswith("#")]
        self._always = frozenset(line[0] for line in lines if len(line) == 1)
        self._before_numbers = frozenset(line[0] for line in lines if len(line) == 2)

    def __call__(self, text: str) -> str:
        """Give the normalised text: words in lower case, separated by single spaces."""
        if _PLAIN.fullmatch(text):
            return text
        text = f" {text} "
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        words = [word for word in re.split(f"[{_BLANK}]+", text) if word]
        joined = " ".join(
            self._with_dot(word, following) if len(word) > 1 and word[-1] == "." != word[-2] else word
            for word, following in zip(words, [*words[1:], ""], strict=False)
        ).lower()
        return " ".join(word for word in _SPACES.sub(" ", joined).split(" ") if word)

    def _with_dot(self, word: str, following: str) -> str:
        """What becomes of a word that ends in one dot; ``following`` is the next word or empty."""
        bare = word[:-1]
        if "." in bare and _HAS_LETTER.search(bare):
            return word.replace(".", "")  # u.s. -> us
        first = following[:1]
        kept = bare in self._always or "a" <= first <= "z"
        if kept or (bare in self._before_numbers and "0" <= first <= "9"):
            return word
        return f"{bare} ."
