"""Counts the mutants of a run, over all processes, and prints their number at its end."""

from __future__ import annotations

import pytest
from sandbox import COUNT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many mutants were tried; the reports of xdist's workers carry their counts too."""
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, [])]
    count = sum(
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == COUNT
    )
    if count:
        terminalreporter.write_line(f"fuzz: {count:,} mutants")
