"""What METEOR 1.5 knows of English, read from the files that the package pycocoevalcap carries.

Function words, irregular forms, synonym sets and abbreviations lie in its ``meteor/meteor-1.5.jar``, an
ordinary archive; the paraphrases lie beside it. None of that package's own code is run.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Collection, Iterator
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from capvid.errors import DataError
from capvid.metrics.meteor_normalise import Normaliser

REMEDY = "pip install 'capvid[meteor]'"
PHRASE_WORDS = 7  # of the longest paraphrase

# Endings of inflected words, and what stands in their place in the base form; the first base form that has
# synonym sets counts. Plurals, then verbs, then comparison (Miller et al., 1990: WordNet's "morphy").
ENDINGS = (
    *(("s", ""), ("ies", "y"), ("es", ""), ("men", "man")),
    *(("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", "")),
    *(("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
)
_BLOCK = 1 << 16


def data_folder() -> Path:
    """The folder ``meteor`` of pycocoevalcap, which holds the jar and ``data/paraphrase-en.gz``.

    Raises:
        DataError: the package is not installed, or not whole.
    """
    spec = find_spec("pycocoevalcap")
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "meteor"
        if jar_in(folder).is_file() and paraphrases_in(folder).is_file():
            return folder
    raise DataError("METEOR needs the data of the package pycocoevalcap, which is not there", remedy=REMEDY)


def jar_in(folder: Path) -> Path:
    """The program's archive in the data folder."""
    return folder / "meteor-1.5.jar"


def paraphrases_in(folder: Path) -> Path:
    """The English paraphrase table in the data folder."""
    return folder / "data" / "paraphrase-en.gz"


class English:
    """Function words, stems and synonym sets of English words, and the normalisation of texts."""

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
        """Names of the word's synonym sets, and of its base form's."""
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


@cache
def _english(jar: Path) -> English:
    return English(jar)


def english() -> English:
    """Read the word lists; once only.

    Raises:
        DataError: a package that they need is not installed, or one of its files is damaged.
    """
    jar = jar_in(data_folder())
    if find_spec("snowballstemmer") is None or int(version("snowballstemmer").split(".")[0]) != 2:
        raise DataError("METEOR needs version 2 of the package snowballstemmer", remedy=REMEDY)
    try:
        return _english(jar)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{jar}: cannot be read ({error})", remedy=f"{REMEDY} again") from error


def paraphrases(phrases: Collection[bytes]) -> dict[bytes, list[bytes]]:
    """Paraphrases of phrases, both among ``phrases``; in the order of METEOR's table.

    The table, 5.3 million pairs, is read through and nothing else of it kept; that takes about two seconds.

    Args:
        phrases: words joined by single spaces, as UTF-8.

    Raises:
        DataError: the table is not there or damaged.
    """
    path = paraphrases_in(data_folder())
    found: dict[bytes, list[bytes]] = {}
    try:
        for lines in _triples(path):
            for phrase, other in zip(lines[1::3], lines[2::3], strict=True):
                if phrase in phrases and other in phrases:
                    found.setdefault(phrase, []).append(other)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})", remedy=f"{REMEDY} again") from error
    return found


def _triples(path: Path) -> Iterator[list[bytes]]:
    """Lines of the table by the thousand, always whole entries of three: weight, phrase, paraphrase."""
    with gzip.open(path, "rb") as stream:
        rest = b""
        while block := stream.read(_BLOCK):
            lines = (rest + block).split(b"\n")
            whole = (len(lines) - 1) // 3 * 3
            rest = b"\n".join(lines[whole:])
            yield lines[:whole]
        if rest:
            raise ValueError("it ends within an entry")
