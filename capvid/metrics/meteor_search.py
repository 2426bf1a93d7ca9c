"""The choice of METEOR's alignment among all matches of two sentences.

Denkowski and Lavie (2014, section 2) ask for the alignment that covers most words, then has fewest chunks,
then the smallest sum of distances between the starts of its matches, found by a beam search from left to
right. What the published program counts decides which one it finds; observed in its answers and kept here:

- a match whose words, on both sides, no other match touches is always part of the alignment;
- in the search a match adds the integer part of its number of words on each side, times 1/2 unless they are
  equal words: single stems, synonyms and paraphrases add nothing;
- a chunk is counted when it ends;
- the distance of a match is added to the path that it extends, and so to its alternatives, not to itself;
- of paths as good as each other the earlier one stays first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

BEAM = 40
# Matched words, chunks and distance of a path make one number to sort by, the smallest first.
_CHUNK = 1 << 30
_WORD = 1 << 60

Chain = tuple[Any, ...]  # (earlier chain, match), or nothing


class Match(NamedTuple):
    """Words of the prediction matched with words of the reference; module 0 is that of equal words."""

    start: int
    length: int
    reference_start: int
    reference_length: int
    module: int


class Alignment(NamedTuple):
    """Matches by their place in the reference, and the number of chunks they form."""

    matches: list[Match]
    chunks: int


class _Path(NamedTuple):
    """The beginning of an alignment."""

    key: int
    end: int  # of the open chunk in the reference, -1 when there is none
    own_end: int  # of the open chunk in the prediction
    used: int  # words of the reference, as bits
    own_used: int
    chain: Chain


class _Option(NamedTuple):
    """A match that the search may take."""

    match: Match
    mask: int
    own_mask: int
    gain: int
    distance: int


def align(starts: Sequence[Sequence[Match]], length: int) -> Alignment:
    """Choose among matches.

    Args:
        starts: for each word of the reference the matches that begin there; of equally good ones the first in
            a list is preferred.
        length: words of the prediction.
    """
    fixed, free = _split(starts, length)
    chosen = _search(fixed, free) if any(free) else [match for match in fixed if match is not None]
    chunks, end = 0, (-1, -1)
    for match in chosen:
        chunks += (match.reference_start, match.start) != end
        end = match.reference_start + match.reference_length, match.start + match.length
    return Alignment(chosen, chunks)


def _split(starts: Sequence[Sequence[Match]], length: int) -> tuple[list[Match | None], list[list[_Option]]]:
    """Matches that overlap with no other one, at most one a start, and the options that remain."""
    touched, own_touched = [0] * len(starts), [0] * length
    for matches in starts:
        for place, own, start, words, _ in matches:
            for i in range(place, place + own):
                own_touched[i] += 1
            for j in range(start, start + words):
                touched[j] += 1
    fixed: list[Match | None] = [None] * len(starts)
    free: list[list[_Option]] = [[] for _ in starts]
    for at, matches in enumerate(starts):
        for match in matches:
            place, own, start, words, module = match
            if sum(own_touched[place : place + own]) == own and sum(touched[start : start + words]) == words:
                fixed[at] = match
                continue
            gain = words + own if module == 0 else words // 2 + own // 2
            mask, own_mask = ((1 << words) - 1) << start, ((1 << own) - 1) << place
            free[at].append(_Option(match, mask, own_mask, gain * _WORD, abs(start - place)))
    return fixed, free


def _search(fixed: Sequence[Match | None], free: Sequence[Sequence[_Option]]) -> list[Match]:
    """Go through the reference word by word with the ``BEAM`` best beginnings of an alignment."""
    used = own_used = 0
    for match in fixed:
        if match is not None:
            used |= ((1 << match.reference_length) - 1) << match.reference_start
            own_used |= ((1 << match.length) - 1) << match.start
    paths = [_Path(0, -1, -1, used, own_used, ())]
    for at, (match, options) in enumerate(zip(fixed, free, strict=True)):
        if match is not None:
            paths = [_extended(path, match) for path in paths]
        else:
            paths = _grown(paths, at, options)
    best = min(paths, key=lambda path: path.key + (_CHUNK if path.end >= 0 else 0))
    return _unchained(best.chain)


def _extended(path: _Path, match: Match) -> _Path:
    """The path with a match whose words are marked as used already."""
    place, own, start, words, _ = match
    new_chunk = path.end >= 0 and (path.end != start or path.own_end != place)
    key = path.key + (_CHUNK if new_chunk else 0)
    return _Path(key, start + words, place + own, path.used, path.own_used, (path.chain, match))


def _grown(paths: Sequence[_Path], at: int, options: Sequence[_Option]) -> list[_Path]:
    """The best paths that go on from ``paths`` by any of the options at a word, or by leaving it out."""
    found: list[tuple[int, _Path, _Option | None]] = []
    for path in paths:
        key, end, own_end, used, own_used, _ = path
        if used >> at & 1:
            found.append((key, path, None))
            continue
        for option in options:
            (place, _, _, _, _), mask, own_mask, gain, distance = option
            if used & mask or own_used & own_mask:
                continue
            new_chunk = end >= 0 and (end != at or own_end != place)
            found.append((key - gain + (_CHUNK if new_chunk else 0), path, option))
            key += distance
        found.append((key + (_CHUNK if end >= 0 else 0), path, None))
    found.sort(key=itemgetter(0))
    return [_continued(key, path, option, at) for key, path, option in found[:BEAM]]


def _continued(key: int, path: _Path, option: _Option | None, at: int) -> _Path:
    _, _, _, used, own_used, chain = path
    if option is None:
        if used >> at & 1:
            return path
        return _Path(key, -1, -1, used, own_used, chain)
    (place, own, start, words, _), mask, own_mask, _, _ = option
    return _Path(key, start + words, place + own, used | mask, own_used | own_mask, (chain, option.match))


def _unchained(chain: Chain) -> list[Match]:
    matches: list[Match] = []
    while chain:
        chain, match = chain
        matches.append(match)
    return matches[::-1]
