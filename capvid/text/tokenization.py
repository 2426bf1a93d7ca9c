"""Penn Treebank tokenization of captions, as in the scorer of the papers.

Published scores are computed on tokens of Stanford's PTBTokenizer, lower-cased and without punctuation. The
Treebank rules of NLTK give nearly the same tokens; the rules here correct most of the differences. Spans
that the PTBTokenizer keeps together (web addresses, fractions, abbreviations, ...) are protected, and NLTK
tokenizes the text between them. Captions of plain words, the great majority, need neither.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.treebank import TreebankWordTokenizer


PUNCTUATION = frozenset({"''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"})
BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}

_SPLIT_WORDS = frozenset({"cannot", "gimme", "gonna", "gotta", "lemme", "wanna"})  # can not, gim me, ...
_ABBREVIATIONS = (
    "adm|al|ala|alex|apr|ariz|assn|asst|aug|ave|blvd|bros|calif|capt|cmdr|co|col|colo|conn|corp|cos|ct|dak|"
    "dec|dept|dr|drs|esq|est|etc|ext|feb|fla|fri|ft|ga|gen|gov|hon|inc|ind|jan|jr|jul|jun|kan|kans|ky|lt|ltd|"
    "maj|mar|md|messrs|mich|minn|mme|mo|mon|mont|mr|mrs|ms|mt|neb|nev|nov|oct|okla|penn|prof|rd|rep|reps|rev|"
    "rt|sen|sep|sept|sgt|sr|st|tel|tenn|thu|thurs|tue|tues|univ|va|vs|vt|wed|wis|wisc|wyo"
)
_MAY_KEEP_DOT = re.compile(rf"{_ABBREVIATIONS}|[a-z]")

_WORD = "[a-z0-9]+(?:-[a-z]+)*"
_PLAIN = re.compile(rf"\s*{_WORD}(?:\s+(?:{_WORD}|'s))*\s*[.]?\s*", re.ASCII)
_MAY_JOIN = re.compile(r"[0-9]\s+[0-9]")  # telephone numbers are one token
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2019\u201b", "'")
    | dict.fromkeys("\u2018", "`")
    | dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')
    | dict.fromkeys("\u2013\u2014", " -- ")
    | {"\u00a3": " # ", "\u20ac": " $ ", "\u00a2": " cents "}  # as the PTBTokenizer does
    | {"\u2026": " ", "\u200d": None, "\ufe0f": None}
)
_EMOJI = re.compile("[\U0001f000-\U0001faff]")
_SPANS = re.compile(
    rf"""
      https?://[^\s"<>]*[^\s"<>.,!?;:)\]}}']                   # web address
    | (?<![\w.])\w[\w.+-]*@\w(?:[\w.-]*\w)?                    # mail address
    | (?<!\w)(?:@[a-z_]|\#[a-z])\w*                                  # user, hash tag
    | </?[a-z][\w:.-]*\s*/?>                                   # markup
    | (?<![\w.])(?:\(\d{{2,3}}\)[ ]?|(?:\+?\d{{2,4}}[- ])?\d{{2,4}}[- ])
      \d{{3,4}}[- ]?\d{{3,5}}(?!\w)                            # telephone
    | (?<![\w./,-])(?:\d{{1,4}}[- ])?\d{{1,4}}/\d{{1,4}}(?![\w/])  # fraction
    | [<>]?[:;=][-o*']?[()dp\\{{@|\[\]](?![a-z])               # smiley
    | [!?]{{2,}}
    | (?<!\w)y'(?=all(?!\w))
    | (?<![\w'])(?:[a-z]+[aeiouy]'[aeiou][a-z]*|c'mon)(?![\w'])       # ma'am
    | (?<!\w)no\.(?=[ ]*\d)                                    # number
    | (?<![\w'.-])[a-z](?:\.[a-z])+\.?(?!\w)                   # acronym
    | (?<![\w'.-])(?:{_ABBREVIATIONS})\.(?!\w)
    | (?<![\w'.-])[a-z]\.(?=[ ]+\w)                            # initial
    | (?<![\w'.-])[^\W\d_]+\.(?=[,;:])
    | (?<![\w'.-])[^\W\d_][^\W_]*(?:[.!?][^\W\d_][^\W_]*)+(?![\w'])  # words that lack a space between them
    """,
    re.VERBOSE,
)
_CORRECTIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=[a-z])n`t(?!\w)"), " n`t"),
    (re.compile(r"(?<=[a-z])n'ts(?!\w)"), " n'ts"),
    (re.compile(r"(?<!n)`|`(?!t(?!\w))"), " "),
    (re.compile(r"\.{2,}|\.(?!\w)|(?<![\w.])\.(?=[^\W\d])"), " "),
    (re.compile(r"(?<=[^\W\d_])\.(?=\d)"), " ."),  # one.5
    (re.compile(r"([|~^\\=*\u2022\u00b0]|\+(?!\d)|(?<![^\W_])_|_(?![^\W_])|/(?!\w)|(?<!\w)/)"), r" \1 "),
    (re.compile(r"\+(?=\d)"), " +"),
    (re.compile(r"(?<=\d)'(?=\d\d(?!\w))"), " '"),  # 6'11
    # An apostrophe before a word is a quotation mark, except in a few words and in years.
    (re.compile(r"(?<![\w'])'(?=\w)(?!(?:em|till?|cause|tis|twas|n|s|m|d|re|ve|ll|\d\d|\d0s)(?!\w))"), " "),
    # An apostrophe inside a word splits it, except in contractions and in names such as d'orient.
    (re.compile(r"(?<=[^\W_])(?<!\b[dlo])'(?=[^\W_])(?!(?:s|m|d|t|re|ve|ll|ts)(?!\w))"), " ' "),
)


def ptb_tokenize(caption: str) -> list[str]:
    """Return the tokens of one caption: Penn Treebank rules, lower case, punctuation dropped.

    Line breaks of any kind count as spaces. The list is empty for a caption without words. A fraction or
    telephone number written with spaces is one token with no-break spaces inside.
    """
    return list(_tokens(caption))


words = ptb_tokenize  # by default, training captions are tokenized as by the scorer


def nltk_tokenize(caption: str) -> list[str]:
    """Return NLTK's ``word_tokenize`` of a caption in lower case, punctuation included.

    A caption counts as one sentence: NLTK's sentence splitter is a download of its own.
    """
    from nltk.tokenize import word_tokenize

    return list(word_tokenize(caption.lower(), preserve_line=True))


def nltk_words(caption: str) -> list[str]:
    """Return the tokens of :func:`nltk_tokenize` that have a letter or digit (M3, Section 4.2)."""
    return [token for token in nltk_tokenize(caption) if any(map(str.isalnum, token))]


def wordpunct_tokenize(caption: str) -> list[str]:
    """Return NLTK's ``wordpunct_tokenize`` of a caption in lower case (key-value memory, Section 5.1)."""
    from nltk.tokenize import wordpunct_tokenize

    return list(wordpunct_tokenize(caption.lower()))


TOKENIZERS: dict[str, Callable[[str], list[str]]] = {
    "scorer": ptb_tokenize,
    "nltk": nltk_tokenize,
    "nltk-words": nltk_words,
    "wordpunct": wordpunct_tokenize,
}


@lru_cache(maxsize=1 << 13)
def _tokens(caption: str) -> tuple[str, ...]:
    text = caption.lower()
    if _PLAIN.fullmatch(text) and not _MAY_JOIN.search(text):
        plain = text.replace(".", " ").split()
        keeps_dot = "." in text and _MAY_KEEP_DOT.fullmatch(plain[-1])
        parts = " ".join(plain).replace("-", " ").split() if "-" in text else plain
        if not keeps_dot and _SPLIT_WORDS.isdisjoint(parts):
            return tuple(plain)
    return tuple(_treebank_tokens(text))


def _treebank_tokens(text: str) -> list[str]:
    """Tokenize any lower-case text."""
    text = " ".join(_EMOJI.sub("", text.translate(_CHARACTERS)).split())
    tokens: list[str] = []
    end = 0
    for match in _SPANS.finditer(text):
        tokens += _tokenize_unprotected(text[end : match.start()])
        span = match.group().replace("(", BRACKETS["("]).replace(")", BRACKETS[")"])
        tokens.append(span.replace(" ", "\u00a0"))
        end = match.end()
    return tokens + _tokenize_unprotected(text[end:])


def _tokenize_unprotected(text: str) -> list[str]:
    """Tokenize text without protected spans."""
    if not text.strip():
        return []
    for pattern, replacement in _CORRECTIONS:
        text = pattern.sub(replacement, text)
    tokens = []
    for token in _treebank().tokenize(text):
        if token in BRACKETS:
            tokens.append(BRACKETS[token])
        elif token not in PUNCTUATION:
            tokens += _strip_hyphens(token)
    return tokens


def _strip_hyphens(token: str) -> list[str]:
    """Strip hyphens at the ends of a token, but not the sign of a number or those of ``-lrb-`` and so on."""
    if token[0] != "-" != token[-1] or token in BRACKETS.values():
        return [token]
    if token[0] == "-" and token[1:2].isdigit():
        return [token.rstrip("-")]
    bare = token.strip("-")
    return [bare] if bare and bare not in PUNCTUATION else []


@lru_cache(maxsize=1)
def _treebank() -> TreebankWordTokenizer:
    """Return NLTK's tokenizer, without the rest of NLTK, which imports SciPy and takes a second or more."""
    package = find_spec("nltk")
    modules = set(sys.modules)
    alone = package is not None and "nltk" not in modules
    if package is not None and alone:
        # While the tokenizer is imported, the packages around it are empty: their __init__ is not run.
        for name, folder in (("nltk", ""), ("nltk.tokenize", "tokenize")):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [
                str(Path(each, folder)) for each in package.submodule_search_locations or ()
            ]
    try:
        from nltk.tokenize.treebank import TreebankWordTokenizer
    finally:
        if alone:  # whoever imports NLTK later gets all of it
            for name in [name for name in sys.modules.keys() - modules if name.split(".")[0] == "nltk"]:
                del sys.modules[name]
    return TreebankWordTokenizer()
