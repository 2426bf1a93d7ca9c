from __future__ import annotations

from typing import Any

import pytest

from capvid.utils.registry import Registry


def plugin(module: str) -> Any:
    """Return a new function that claims to be defined in ``module``."""

    def function() -> None: ...

    function.__module__ = module
    return function


def test_order_is_that_of_modules_whatever_is_imported_first() -> None:
    registry: Registry[Any] = Registry("toy", "capvid.metrics")
    for name, module in (("c", "z"), ("a", "b"), ("b", "z"), ("d", "b")):
        registry.register(name)(plugin(module))
    assert list(registry) == ["a", "d", "c", "b"]


def test_properties_go_to_the_entry() -> None:
    registry = Registry("toy", "capvid.metrics", lambda name, function, size=1: (name, function, size))
    plain = registry.register("plain")(plugin("m"))
    large = registry.register("large", size=3)(plugin("m"))
    assert [registry["plain"], registry["large"]] == [("plain", plain, 1), ("large", large, 3)]
    with pytest.raises(TypeError, match="colour"):
        registry.register("odd", colour="red")(plugin("m"))
    with pytest.raises(ValueError, match="toy plain is registered twice"):
        registry.register("plain")(plugin("m"))


def test_registry_without_entries_takes_no_properties() -> None:
    registry: Registry[Any] = Registry("toy", "capvid.metrics")
    with pytest.raises(TypeError, match="size"):
        registry.register("a", size=3)(plugin("m"))
    assert "a" not in registry
