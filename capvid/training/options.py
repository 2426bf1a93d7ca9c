"""Options of recipes, checked one by one against the dataclass that holds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from capvid.errors import RecipeError

_KINDS = {"int": int, "float": float, "str": str, "bool": bool, "tuple[str, ...]": tuple}


def checked(
    cls: type,
    section: str,
    values: Mapping[str, Any],
    *,
    choices: Mapping[str, Sequence[str]],
    may_be_zero: Collection[str],
) -> dict[str, Any]:
    """The values of a recipe's section, if they fit the fields of ``cls``.

    Args:
        cls: a dataclass of numbers, words, switches and lists of words.
        section: its name in the recipe, for messages.
        values: what the recipe says; whole numbers stand for others as well, lists for tuples.
        choices: by option, the words that it takes.
        may_be_zero: numbers that may be 0; none may be negative.

    Raises:
        RecipeError: an option that is not known, or a value that does not fit.
    """
    kinds: dict[str, Any] = {field.name: _KINDS[str(field.type)] for field in fields(cls)}
    chosen: dict[str, Any] = {}
    for key, value in values.items():
        if key not in kinds:
            raise RecipeError(
                f"{section}.{key}: no such option", remedy=f"known are {', '.join(sorted(kinds))}"
            )
        kind = kinds[key]
        if kind is float and type(value) is int:
            value = float(value)
        if kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = tuple(value)
        if type(value) is not kind:
            raise RecipeError(f"{section}.{key} = {value!r}: expected {kind.__name__}")
        if value not in choices.get(key, (value,)):
            raise RecipeError(
                f"{section}.{key} = {value!r}: not known", remedy=f"choose {', '.join(choices[key])}"
            )
        if kind in (int, float) and (value < 0 or (value == 0 and key not in may_be_zero)):
            raise RecipeError(f"{section}.{key} = {value}: must be positive")
        chosen[key] = value
    return chosen
