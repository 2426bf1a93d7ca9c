from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from capvid.text import tokenization as tokenize
from capvid.text.tokenization import TOKENIZERS, ptb_tokenize, words


@pytest.mark.parametrize(
    ("caption", "tokens"),
    [
        ("", ""),
        (" \t\n ", ""),
        (". , ; :", ""),
        ("Two Boys kick a ball.", "two boys kick a ball"),
        ("first line\nsecond\r\nthird\u2028fourth\u0085fifth", "first line second third fourth fifth"),
        ("She stirs, then pours; done: eat", "she stirs then pours done eat"),
        ("the girl's hat isn't hers, they've said", "the girl 's hat is n't hers they 've said"),
        ("the girl\u2019s hat isn\u2019t \u201cred\u201d", "the girl 's hat is n't red"),
        ("the boys' bikes", "the boys bikes"),
        ("she cannot stop and is gonna fall", "she can not stop and is gon na fall"),
        ("it snows. a fox runs.", "it snows a fox runs"),
        ("it snows.. a fox runs...", "it snows a fox runs"),
        ("ride to Mrs. Brown, etc.", "ride to mrs. brown etc."),
        ("made in the u.k. by j. doe", "made in the u.k. by j. doe"),
        ("so cute !!! really?!", "so cute !!! really ?!"),
        ("so cute! really?", "so cute really"),
        ("(on ice) [indoors] {again}", "-lrb- on ice -rrb- -lsb- indoors -rsb- -lcb- again -rcb-"),
        ("a semi-truck - red -- passes \u2014 slowly", "a semi-truck red passes slowly"),
        ("hop- scotch and -skip", "hop scotch and skip"),
        ("at -5 degrees", "at -5 degrees"),
        ("6 men at 9:15 pay $7.50 or 20% of 3,000", "6 men at 9:15 pay $ 7.50 or 20 % of 3,000"),
        ("add 2 3/4 cups", "add 2\u00a03/4 cups"),
        ("call 555 0100 222", "call 555\u00a00100\u00a0222"),
        ("visit https://a.org/b?c=1, or me@a.org", "visit https://a.org/b?c=1 or me@a.org"),
        ("by @someone #fun", "by @someone #fun"),
        ("nice :) dog", "nice :-rrb- dog"),
        ("cats || dogs", "cats | | dogs"),
        ("a dog \U0001f600 runs", "a dog runs"),
        ("le caf\u00e9 d'or at 5 o'clock", "le caf\u00e9 d'or at 5 o'clock"),
        ("jumps 5'4 high, then 5'11", "jumps 5 4 high then 5 '11"),
        ("on her face/ or 1/2/ w/ /10", "on her face / or 1/2 / w / / 10"),
        ("he/she at 24/7 and 2 1/2", "he/she at 24/7 and 2\u00a01/2"),
        ("the customer`s face don`t", "the customer s face do n`t"),
        ("'robin hood' and '2' in the '90s, get 'em", "robin hood and 2 in the '90s get 'em"),
        ("there'a a ma'am, c'mon", "there'a a ma'am c'mon"),
        ("\u00a385 or 5\u20ac or 5\u00a2", "# 85 or 5 $ or 5 cents"),
        ("+14% and 1+1 a+b", "+14 % and 1 +1 a + b"),
        ("_b a_ a_b", "_ b a _ a_b"),
        ("lives in calif. or at no. 1", "lives in calif. or at no. 1"),
        ("pages 1-1 1/2", "pages 1-1 1/2"),
        ("puts on one.0", "puts on one .0"),
    ],
)
def test_tokens_of_captions(caption: str, tokens: str) -> None:
    assert ptb_tokenize(caption) == [token for token in tokens.split(" ") if token]
    assert words(caption) == ptb_tokenize(caption)


@pytest.mark.parametrize(
    "caption",
    [
        "a man rides 2 horses",
        "  a   man rides .",
        "they live on elm st.",
        "this is plan b.",
        "you cannot wanna gotta lemme gimme gonna.",
        "dial 555 0100 222.",
        "take 1 of 20.",
        "dont cant wont im its",
    ],
)
def test_shortcut_for_plain_captions_gives_the_same_tokens(caption: str) -> None:
    assert list(tokenize._tokens(caption)) == tokenize._treebank_tokens(caption)


def test_result_may_be_modified() -> None:
    first = ptb_tokenize("one two")
    first.append("three")
    assert ptb_tokenize("one two") == ["one", "two"]


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import nltk"])
def test_nltk_is_imported_no_more_than_necessary(before: str) -> None:
    code = f"""
import sys
{before}
from capvid.text.tokenization import _treebank, words
words("A man rides.")
print("nltk" in sys.modules)
print(words("a man, riding; it's the dogs'"))
print("nltk" in sys.modules, "scipy" in sys.modules)
import nltk
same = nltk.TreebankWordTokenizer().tokenize("it's") == _treebank().tokenize("it's")
print(nltk.word_tokenize.__name__, same)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, words, rest, after = done.stdout.splitlines()
    assert imported == str(bool(before)) and rest == f"{bool(before)} {bool(before)}"
    assert words == "['a', 'man', 'riding', 'it', \"'s\", 'the', 'dogs']"
    assert after == "word_tokenize True"


@pytest.mark.shared
def test_agreement_with_the_published_tokenizer(shared_data: Path) -> None:
    pairs = json.loads((shared_data / "metrics" / "cases" / "ptb_tokens.json").read_text(encoding="utf-8"))
    same = sum(" ".join(ptb_tokenize(raw)) == tokens for raw, tokens in pairs)
    assert len(pairs) > 20_000
    assert same >= 0.9999 * len(pairs)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("scorer", "the girl 's hat is n't red she said"),
        ("nltk", "the girl 's hat is n't red , she said ."),
        ("nltk-words", "the girl 's hat is n't red she said"),
        ("wordpunct", "the girl ' s hat isn ' t red , she said ."),
    ],
)
def test_tokenizers_of_training_captions(name: str, tokens: str) -> None:
    assert TOKENIZERS[name]("The girl's hat isn't red, she said.") == tokens.split()
    assert TOKENIZERS[name](" ") == []


def test_plain_words_need_no_rules() -> None:
    """Captions of plain words are split without NLTK into the same tokens."""
    draw = random.Random(0)
    parts = [
        "a",
        "x-ray",
        "gonna",
        "gonna-be",
        "wan-na",
        "'s",
        "3",
        "3-wheel",
        "dr",
        "a-mr",
        "cannot",
        "t",
        "d-ye",
    ]
    plain = 0
    for _ in range(3000):
        caption = draw.choice([" ", "  "]).join(draw.choices(parts, k=draw.randint(1, 6)))
        caption += draw.choice(["", ".", " ."])
        plain += bool(tokenize._PLAIN.fullmatch(caption))
        assert ptb_tokenize(caption) == tokenize._treebank_tokens(caption), caption
    assert plain > 1000
