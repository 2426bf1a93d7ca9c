from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capvid.utils.escaping import json_text, table_cell, terminal, unguarded_cell, utf8_text

ANY_TEXT = st.text(st.characters(codec=None), max_size=30)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("two  spaces é 电影 🎬.mp4", "two  spaces é 电影 🎬.mp4"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\x1b[31mred\x07\x7f\x9b", "\\x1b[31mred\\x07\\x7f\\x9b"),
        ("\u202egpj.\u2066\u200f\u2028", "\\u202egpj.\\u2066\\u200f\\u2028"),
        ("byte \udcff, half \ud83d", "byte \\xff, half \\ud83d"),
        ("\x00\x85", "\\x00\\x85"),
    ],
)
def test_terminal(text: str, escaped: str) -> None:
    assert terminal(text) == escaped
    assert terminal(escaped) == escaped


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "  =", "\uff1d"])
def test_cells_never_begin_a_formula(start: str) -> None:
    cell = table_cell(f"{start}1+1")
    assert cell == f"'{start}1+1" and unguarded_cell(cell) == f"{start}1+1"


@pytest.mark.parametrize("text", ["a - b = c", "'quoted'", "\t=1", "\r=1", ""])
def test_other_cells_have_no_apostrophe(text: str) -> None:
    assert table_cell(text) == terminal(text) == unguarded_cell(table_cell(text))


def test_names_of_files_stay_what_they_were_known_by() -> None:
    for name in ("a/b.mp4", "new\nline \u2028.mp4", "é 电影 🎬"):
        assert utf8_text(name) == name
    assert utf8_text("\udcff") == "\\xff" != utf8_text("\udcfe")


@settings(max_examples=60, deadline=None)
@given(ANY_TEXT)
def test_any_text(text: str) -> None:
    line = terminal(text)
    assert len(line.splitlines()) == bool(line) and line.isprintable() >= text.isprintable()
    line.encode()
    encoded = json_text({text: [text]})
    assert json.loads(encoded.encode()) == {utf8_text(text): [utf8_text(text)]}
    assert len(encoded.splitlines()) == 1
    if text == utf8_text(text):
        assert json.loads(encoded) == {text: [text]}


def test_json_has_no_numbers_that_json_lacks() -> None:
    assert json_text({"a": [float("nan"), float("inf"), (1.5,)]}) == '{"a": [null, null, [1.5]]}'
    assert json.loads(json_text("\u2028\u202e\x9b", indent=1)) == "\u2028\u202e\x9b"
    assert json_text("\u2028\u202e\x9b").isascii()
