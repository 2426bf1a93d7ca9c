"""The recipes that come with capvid, as TOML; :mod:`capvid.training.recipe` says what is in them."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Names of the recipes that come with capvid."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def read_recipe(name: str) -> str:
    """Give the text of a recipe that comes with capvid."""
    return (RECIPES / f"{name}.toml").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def all_recipes() -> dict[str, dict[str, Any]]:
    """Read every recipe that comes with capvid, by its name."""
    return {name: tomllib.loads(read_recipe(name)) for name in recipe_names()}
