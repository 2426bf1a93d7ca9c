"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

# Tests run side by side, and on several threads each they would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where interrupts are ignored, as in a shell's background, commands that tests interrupt would do so too.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The development data beside the checkout (tests that use it are marked ``shared``)."""
    if not SHARED.is_dir():
        pytest.skip("the development data is not beside this checkout")
    return SHARED


@pytest.fixture
def memory() -> Iterator[None]:
    """Objects at ``memory://``, none at first."""
    store = fsspec.filesystem("memory").store
    store.clear()
    yield
    store.clear()
