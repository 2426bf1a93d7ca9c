"""Fixtures that every test folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The development data beside the checkout (tests that use it are marked ``shared``)."""
    if not SHARED.is_dir():
        pytest.skip("the development data is not beside this checkout")
    return SHARED
