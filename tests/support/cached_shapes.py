"""A cache of the backbones' tensor shapes for tests of conversion."""

from __future__ import annotations

import pytest

from capvid.backbones import conversion
from capvid.backbones.catalog import BackboneEntry

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}  # tensor shapes by backbone


@pytest.fixture(autouse=True)
def cached_backbone_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build each network once per test process; a conversion compares a file with all of them."""
    shapes = conversion._shapes

    def cached_shapes(entry: BackboneEntry) -> dict[str, tuple[int, ...]]:
        if entry.name not in SHAPES:
            SHAPES[entry.name] = shapes(entry)
        return dict(SHAPES[entry.name])

    monkeypatch.setattr(conversion, "_shapes", cached_shapes)
