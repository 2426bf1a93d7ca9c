from __future__ import annotations

import pytest

from capvid.metrics.meteor.english import Normaliser

PREFIXES = ["# words that keep their dot", "", "Mr", "No #NUMERIC_ONLY#", "pp"]

# Texts and the output of the published program.
OBSERVED = {
    "a--b": "a b",
    "a---b": "a--b",
    "-a-": "-a-",
    "a-b-c-d-e": "a b-c d-e",
    "a_b": "a _ b",
    "a.b": "a.b",
    "a.b.": "ab",
    "u.s. man": "us man",
    "a man. dog": "a man. dog",
    "man.": "man .",
    "no. 5": "no . 5",
    "No. 0": "no. 0",
    "No. 9": "no. 9",
    "no. five": "no. five",
    "etc. 5": "etc . 5",
    "5. a": "5. a",
    "a...b": "a ... b",
    "1,000": "1,000",
    "1,a": "1 , a",
    "a,b,c": "a , b,c",
    "''dog''": '" dog "',
    "1'a": "1'a",
    "90's": "90 's",
    "dog 's": "dog ' s",
    "d'a'b'c": "d 'a'b 'c",
    "!!": "! !",
    "a@b.com": "a @ b.com",
    "#a": "# a",
    "$5": "$ 5",
    "½ cup": "½ cup",
    "“a”": '" a "',
    "a\u2013b": "a - b",
    "a—b": "a — b",
    "漢字": "漢 字",
    "1.-2": "1 . 2",
    "man.'": "man . '",
    "u.s.-based": "us based",
    "Man. Dog": "man . dog",
    "No. 5": "no. 5",
    "pp. 5": "pp. 5",
    "Mr. Smith": "mr. smith",
    "e.g. this": "eg this",
    "don't": "don 't",
    "\u03a3\u0391\u03a3": "\u03c3 \u03b1 \u03c3",
    "3\xa01/2": "3 1 / 2",
    "No.\xa0a": "no . a",
    "İstanbul": "i̇stanbul",
    "'--',": "' -' ,",
}


@pytest.mark.parametrize("text", OBSERVED)
def test_normalization_equals_the_published_program(text: str) -> None:
    assert Normaliser(PREFIXES)(text) == OBSERVED[text]


@pytest.mark.parametrize("text", ["", " ", "\u00a0"])
def test_blank_text_becomes_empty(text: str) -> None:
    assert Normaliser(PREFIXES)(text) == ""
