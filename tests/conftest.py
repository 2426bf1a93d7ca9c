"""Test tiers, and fixtures shared by all test folders."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

# Tests run in parallel; with several threads each they would slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing is downloaded but from servers of the tests, which say so.
os.environ["HF_HUB_OFFLINE"] = "1"

# Background shells ignore SIGINT, and commands started by the tests would inherit that.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

TIERS = ("slow", "exhaustive", "gpu")
# A recurrent captioner, one on feature maps, a transformer, and a paragraph captioner.
ARCHITECTURES = {"m3", "ham", "vanilla-transformer", "mart"}

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tiers that ``-m`` does not name, unless tests are named one by one."""
    _mark_variants(items)
    if any("::" in argument for argument in config.args):
        return
    expression = config.getoption("markexpr")
    disabled = [tier for tier in TIERS if tier not in expression]
    excluded = [item for item in items if any(item.get_closest_marker(tier) for tier in disabled)]
    if excluded:
        config.hook.pytest_deselected(items=excluded)
        items[:] = [item for item in items if item not in set(excluded)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many mutants were tried; the reports of xdist's workers carry their counts too."""
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, [])]
    counts = [
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "mutants"
    ]
    if counts:
        terminalreporter.write_line(f"fuzz: {sum(counts):,} mutants")


def _mark_variants(items: list[pytest.Item]) -> None:
    """Leave one captioner per architecture to the default run of each test; the others are exhaustive."""
    by_test: dict[str, list[tuple[str, pytest.Item]]] = {}
    for item in items:
        variant = item.callspec.params.get("variant") if hasattr(item, "callspec") else None
        if variant is not None:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append((variant, item))
    for cases in by_test.values():
        variants = {variant for variant, _ in cases}
        kept = variants & ARCHITECTURES or {cases[0][0]}
        for variant, item in cases:
            if variant not in kept:
                item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the development data beside the checkout; its tests are marked ``shared``."""
    if not SHARED.is_dir():
        pytest.skip("the development data is not beside this checkout")
    return SHARED


@pytest.fixture
def memory() -> Iterator[None]:
    """Start with an empty store at ``memory://``."""
    store = fsspec.filesystem("memory").store
    store.clear()
    yield
    store.clear()
