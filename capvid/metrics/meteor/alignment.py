"""METEOR's alignment: a beam search among all matches of two sentences.

Denkowski and Lavie (2014, section 2) ask for the alignment that covers most words, then has fewest chunks,
then the smallest sum of distances between the starts of its matches, found by a beam search from left to
right. The following details, observed in the output of the published program, decide which one it finds:

- a match that shares no word with another match is always part of the alignment;
- in the search a match adds the integer part of its number of words on each side, times 1/2 unless they are
  equal words: single stems, synonyms and paraphrases add nothing;
- a chunk is counted when it ends;
- the distance of a match is added to the path that it extends, and so to its alternatives, not to itself;
- among equal paths the earlier one comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

BEAM = 40
# Sort key of a path: matched words, chunks and distance in one number, the smallest first.
_CHUNK = 1 << 30
_WORD = 1 << 60

Chain = tuple[Any, ...]  # (earlier chain, match), or nothing


class Match(NamedTuple):
    """Match of words of the prediction with words of the reference; module 0 matches equal words."""

    start: int
    length: int
    reference_start: int
    reference_length: int
    module: int


class Alignment(NamedTuple):
    """Matches by their position in the reference, and the number of chunks they form."""

    matches: list[Match]
    chunks: int


# A partial alignment: its key; the end of its open chunk in the reference (-1 when none is open) and in the
# prediction; used words of both, as bits; its matches. A plain tuple, because there are very many.
_Path = tuple[int, int, int, int, int, Chain]


class _Option(NamedTuple):
    """A match that the search may use; the masks are its words in both sentences, as bits."""

    match: Match
    mask: int
    own_mask: int
    gain: int
    distance: int


def align(starts: Sequence[Sequence[Match]], length: int) -> Alignment:
    """Return the best alignment.

    Args:
        starts: matches by the word of the reference where they begin; the first of equally good ones wins.
        length: number of words of the prediction.
    """
    fixed, free = _split(starts, length)
    chosen = _search(fixed, free) if any(free) else [match for match in fixed if match is not None]
    chunks, end = 0, (-1, -1)
    for match in chosen:
        chunks += (match.reference_start, match.start) != end
        end = match.reference_start + match.reference_length, match.start + match.length
    return Alignment(chosen, chunks)


def _split(starts: Sequence[Sequence[Match]], length: int) -> tuple[list[Match | None], list[list[_Option]]]:
    """Separate matches that overlap with no other one (at most one per start) from the remaining options."""
    touched, own_touched = [0] * len(starts), [0] * length
    for matches in starts:
        for position, own, start, words, _ in matches:
            for i in range(position, position + own):
                own_touched[i] += 1
            for j in range(start, start + words):
                touched[j] += 1
    fixed: list[Match | None] = [None] * len(starts)
    free: list[list[_Option]] = [[] for _ in starts]
    for index, matches in enumerate(starts):
        for match in matches:
            position, own, start, words, module = match
            own_alone = sum(own_touched[position : position + own]) == own
            if own_alone and sum(touched[start : start + words]) == words:
                fixed[index] = match
                continue
            gain = words + own if module == 0 else words // 2 + own // 2
            mask, own_mask = ((1 << words) - 1) << start, ((1 << own) - 1) << position
            free[index].append(_Option(match, mask, own_mask, gain * _WORD, abs(start - position)))
    return fixed, free


def _search(fixed: Sequence[Match | None], free: Sequence[Sequence[_Option]]) -> list[Match]:
    """Search through the reference word by word, keeping the ``BEAM`` best partial alignments."""
    used = own_used = 0
    for match in fixed:
        if match is not None:
            used |= ((1 << match.reference_length) - 1) << match.reference_start
            own_used |= ((1 << match.length) - 1) << match.start
    paths: list[_Path] = [(0, -1, -1, used, own_used, ())]
    for index, (match, options) in enumerate(zip(fixed, free, strict=True)):
        if match is not None:
            paths = [_extend_fixed(path, match) for path in paths]
        # Without options and chunks to end there is nothing to choose: the order stays.
        elif options or any(path[1] >= 0 for path in paths):
            paths = _extend(paths, index, options)
    *_, chain = min(paths, key=lambda path: path[0] + (_CHUNK if path[1] >= 0 else 0))
    matches: list[Match] = []
    while chain:
        chain, match = chain
        matches.append(match)
    return matches[::-1]


def _extend_fixed(path: _Path, match: Match) -> _Path:
    """Extend a path by a match whose words are marked as used already."""
    position, own, start, words, _ = match
    key, end, own_end, used, own_used, chain = path
    if end >= 0 and (end != start or own_end != position):
        key += _CHUNK
    return key, start + words, position + own, used, own_used, (chain, match)


def _extend(paths: list[_Path], index: int, options: Sequence[_Option]) -> list[_Path]:
    """Return the best continuations of ``paths`` by any option at word ``index``, or by skipping it."""
    candidates: list[tuple[int, _Path, _Option | None]] = []
    for path in paths:
        key, end, own_end, used, own_used, _ = path
        if used >> index & 1:
            candidates.append((key, path, None))
            continue
        ended = _CHUNK if end >= 0 else 0
        next_position = own_end if end == index else -1  # where a match would extend the chunk
        for option in options:
            match, mask, own_mask, gain, distance = option
            if used & mask or own_used & own_mask:
                continue
            candidates.append((key - gain + (0 if match[0] == next_position else ended), path, option))
            key += distance
        candidates.append((key + ended, path, None))
    candidates.sort(key=itemgetter(0))
    return [_continue_path(key, path, option) for key, path, option in candidates[:BEAM]]


def _continue_path(key: int, path: _Path, option: _Option | None) -> _Path:
    """Extend a path by a match, or past a word that it has used or skips."""
    _, _, _, used, own_used, chain = path
    if option is None:
        return path if key == path[0] else (key, -1, -1, used, own_used, chain)
    match, mask, own_mask, _, _ = option
    position, own, start, words, _ = match
    return key, start + words, position + own, used | mask, own_used | own_mask, (chain, match)
