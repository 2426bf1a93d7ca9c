"""English words that hold a sentence together, and may well stand in it twice."""

from __future__ import annotations

_ARTICLES = "a an the this that these those some other another his her its their"
_PREPOSITIONS = (
    "about across against along around as at away behind by down for from in inside into near of off on onto "
    "out outside over through to toward towards under up with without"
)
_CONJUNCTIONS = "and but how or so then what when where which while who"
_PRONOUNS = "he him himself it she someone something them they"
_AUXILIARIES = "am are be been being can do does has have is not s was were will"  # "s" of "it's"

FUNCTION_WORDS = frozenset(
    " ".join((_ARTICLES, _PREPOSITIONS, _CONJUNCTIONS, _PRONOUNS, _AUXILIARIES)).split()
)
