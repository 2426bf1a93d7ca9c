"""English word lists of METEOR 1.5, read from files of the package pycocoevalcap.

Function words, irregular forms, synonym sets and abbreviations are in its ``meteor/meteor-1.5.jar``, a zip
archive, and the paraphrases in a file beside it. No code of that package is run.
"""

from __future__ import annotations

import gzip
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from capvid.errors import DataError

JAR = "meteor-1.5.jar"  # the published program
PARAPHRASES = "data/paraphrase-en.gz"
REMEDY = "pip install 'capvid[meteor]'"
PHRASE_WORDS = 7  # of the longest paraphrase

# Endings of inflected words and their replacements in the base form; the first base form with synonym sets
# counts. Plurals, then verbs, then comparison (Miller et al., 1990: WordNet's "morphy").
ENDINGS = (
    *(("s", ""), ("ies", "y"), ("es", ""), ("men", "man")),
    *(("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", "")),
    *(("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
)
_BLOCK = 1 << 16


def data_folder() -> Path:
    """Return the folder ``meteor`` of pycocoevalcap, with the files :data:`JAR` and :data:`PARAPHRASES`.

    Raises:
        DataError: the package is not installed or incomplete.
    """
    spec = find_spec("pycocoevalcap")
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location) / "meteor"
        if (folder / JAR).is_file() and (folder / PARAPHRASES).is_file():
            return folder
    raise DataError(
        "METEOR needs the data of the package pycocoevalcap, which is not installed", remedy=REMEDY
    )


class English:
    """Function words, stems and synonym sets of English words, and normalization of text."""

    def __init__(self, jar: Path) -> None:
        with zipfile.ZipFile(jar) as archive:
            self.function_words = frozenset(_lines(archive, "function/english.words"))
            self.normalise = Normaliser(_lines(archive, "nonbreaking/english.prefixes"))
            lines = _lines(archive, "synonym/english.synsets")
            self._synsets = dict(zip(lines[::2], lines[1::2], strict=True))
            lines = _lines(archive, "synonym/english.exceptions")
        self._bases: dict[str, list[str]] = {}  # of irregular forms
        for base, forms in zip(lines[::2], lines[1::2], strict=True):
            for form in forms.split():
                self._bases.setdefault(form, []).append(base)
        from snowballstemmer.english_stemmer import EnglishStemmer  # absent without the extra

        self.stem = lru_cache(maxsize=None)(EnglishStemmer().stemWord)

    def synsets(self, word: str) -> frozenset[str]:
        """Return the names of the synonym sets of a word and of its base form."""
        names = [self._synsets.get(form, "") for form in (word, *self._base_forms(word))]
        return frozenset(" ".join(names).split())

    def _base_forms(self, word: str) -> list[str]:
        if word in self._bases:
            return self._bases[word]
        if len(word) > 2 and not word.endswith("ss"):
            for ending, instead in ENDINGS:
                base = word.removesuffix(ending) + instead
                if word.endswith(ending) and base in self._synsets:
                    return [base]
        return []


def _lines(archive: zipfile.ZipFile, name: str) -> list[str]:
    return archive.read(name).decode("utf-8").strip("\n").split("\n")


_english = cache(English)


def english() -> English:
    """Return the word lists, read once.

    Raises:
        DataError: a package that they need is not installed, or one of its files is damaged.
    """
    jar = data_folder() / JAR
    if find_spec("snowballstemmer") is None or int(version("snowballstemmer").split(".")[0]) != 2:
        raise DataError("METEOR needs version 2 of the package snowballstemmer", remedy=REMEDY)
    try:
        return _english(jar)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{jar}: cannot be read ({error})", remedy=f"{REMEDY} again") from error


def paraphrases(phrases: Collection[bytes]) -> dict[bytes, list[bytes]]:
    """Return the paraphrases of each phrase that are among ``phrases``, in the order of METEOR's table.

    The table of 5.3 million pairs is streamed, which takes about two seconds.

    Args:
        phrases: words joined by single spaces, as UTF-8.

    Raises:
        DataError: the table is missing or damaged.
    """
    path = data_folder() / PARAPHRASES
    table: dict[bytes, list[bytes]] = {}
    try:
        with gzip.open(path, "rb") as stream:
            rest = b""
            while block := stream.read(_BLOCK):
                lines = (rest + block).split(b"\n")
                complete = (len(lines) - 1) // 3 * 3  # entries have three lines: weight, phrase, paraphrase
                rest = b"\n".join(lines[complete:])
                for phrase, other in zip(lines[1:complete:3], lines[2:complete:3], strict=True):
                    if phrase in phrases and other in phrases:
                        table.setdefault(phrase, []).append(other)
            if rest:
                raise ValueError("it ends within an entry")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})", remedy=f"{REMEDY} again") from error
    return table


# Latin, Cyrillic and phonetic letters; those of other scripts stand alone, as punctuation does.
LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017e\u0400-\u0527\u1d00-\u1d7f\ua640-\ua66e\ua67e-\ua697"
_SPACES = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")  # separate tokens until the end
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
    """Normalizer of texts.

    Args:
        prefixes: lines of METEOR's list of words that keep a final dot, case-sensitive; those marked
            ``#NUMERIC_ONLY#`` keep it only before a number.
    """

    def __init__(self, prefixes: Iterable[str]) -> None:
        lines = [line.split() for line in prefixes if line.strip() and not line.startswith("#")]
        self._always = frozenset(line[0] for line in lines if len(line) == 1)
        self._before_numbers = frozenset(line[0] for line in lines if len(line) == 2)

    def __call__(self, text: str) -> str:
        """Return the normalised text: words in lower case, separated by single spaces."""
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
        """Normalize a word that ends in one dot; ``following`` is the next word, or empty."""
        bare = word[:-1]
        if "." in bare and _HAS_LETTER.search(bare):
            return word.replace(".", "")  # u.s. -> us
        first = following[:1]
        before_number = "0" <= first <= "9" and bare in self._before_numbers
        return word if bare in self._always or "a" <= first <= "z" or before_number else f"{bare} ."
