"""Pieces of words as BERT's tokenizer cuts them, and how they become text again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capvid.text.vocabulary import SPECIAL, Vocabulary

_INSIDE = "##"  # begins a piece that goes on with a word


class WordPieces(Vocabulary):
    """The pieces that a tokenizer of transformers knows, numbered as capvid numbers words.

    Args:
        tokenizer: turns pieces into text.
        order: the tokenizer's number for each of ours: padding, start, end, unknown, and all others.
    """

    def __init__(self, tokenizer: Any, order: Sequence[int]) -> None:
        pieces = tokenizer.convert_ids_to_tokens(list(order[len(SPECIAL) :]))
        super().__init__([*SPECIAL, *(piece or "" for piece in pieces)])
        self._tokenizer = tokenizer
        self._order = list(order)

    def sentence(self, numbers: Sequence[int]) -> tuple[str, list[tuple[str, list[int]]]]:
        """The text that pieces make, as the tokenizer writes it.

        Returns:
            the text, and its words, which spaces part, each with the places of its pieces in ``numbers``.
        """
        ids = [self._order[number] for number in numbers]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()
        special = set(self._tokenizer.all_special_ids)
        kept = [place for place, number in enumerate(ids) if number not in special]
        pieces = []
        for place in kept:
            piece = self.words[numbers[place]]
            inside = piece.startswith(_INSIDE) and place != kept[0]  # at the beginning it stays as it is
            pieces.append((place, piece.removeprefix(_INSIDE) if inside else piece, inside))
        return text, _laid_out(text.split(), pieces) or _joined(pieces)


def _laid_out(words: Sequence[str], pieces: Sequence[tuple[int, str, bool]]) -> list[tuple[str, list[int]]]:
    """The words of a text with the places of the pieces that follow each other in them.

    Nothing where pieces and text are not the same but for spaces.
    """
    found: list[tuple[str, list[int]]] = []
    rest = iter(pieces)
    for word in words:
        spelled, places = "", []
        while len(spelled) < len(word) and (piece := next(rest, None)) is not None:
            spelled += piece[1]
            places.append(piece[0])
        if spelled != word:
            return []
        found.append((word, places))
    return [] if next(rest, None) is not None else found


def _joined(pieces: Sequence[tuple[int, str, bool]]) -> list[tuple[str, list[int]]]:
    """Words of pieces alone: a piece that goes on with a word belongs to the one before."""
    found: list[tuple[str, list[int]]] = []
    for place, piece, inside in pieces:
        if inside and found:
            word, places = found[-1]
            found[-1] = (word + piece, [*places, place])
        else:
            found.append((piece, [place]))
    return found
