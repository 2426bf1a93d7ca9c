"""Networks that are built once for many conversions."""

from __future__ import annotations

import pytest

from capvid.backbones import conversion
from capvid.backbones.catalog import BackboneEntry

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}  # of the backbones that were compared with


@pytest.fixture(autouse=True)
def networks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out which backbone a file holds, all are built; once does for a file of tests."""
    shapes = conversion._shapes

    def known(entry: BackboneEntry) -> dict[str, tuple[int, ...]]:
        if entry.name not in SHAPES:
            SHAPES[entry.name] = shapes(entry)
        return dict(SHAPES[entry.name])

    monkeypatch.setattr(conversion, "_shapes", known)
