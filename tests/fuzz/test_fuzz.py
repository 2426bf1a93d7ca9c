"""Mutants of every kind of file that capvid reads are read or refused, quickly and with little memory.

``CAPVID_FUZZ_SCALE=10`` tries ten times as many mutants, ``CAPVID_FUZZ_SEED=1`` others.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from artefacts import ARTEFACTS
from sandbox import Sandbox

SEED = os.environ.get("CAPVID_FUZZ_SEED", "0")
SCALE = float(os.environ.get("CAPVID_FUZZ_SCALE", "1"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


def cause(report: str) -> str:
    """Name the cause of a failure: the error's type and the last line of capvid in its traceback."""
    lines = report.strip().splitlines()
    frames = [line.strip() for line in lines if "/capvid/" in line and "/site-packages/" not in line]
    errors = [line for line in lines if not line.startswith((" ", "Traceback"))]
    return f"{errors[-1].partition(':')[0] if frames else errors[-1]} {frames[-1] if frames else ''}"


@pytest.mark.parametrize("name", ARTEFACTS)
def test_mutants_are_read_or_refused(
    name: str, sandbox: Sandbox, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    artefact = ARTEFACTS[name]
    (tmp_path / "valid").mkdir()
    original = artefact.write(tmp_path / "valid")
    data = other = original.read_bytes()
    if artefact.splice:
        (tmp_path / "other").mkdir()
        other = ARTEFACTS[artefact.splice].write(tmp_path / "other").read_bytes()
    sandbox.prepare(name, original)
    mutants = round(artefact.mutants * SCALE)
    folder = tmp_path / "mutant"
    failures: dict[str, list[str]] = {}
    for number in range(mutants):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original.parent, folder)
        mutant = folder / original.name
        mutant.write_bytes(artefact.mutate(data, other, random.Random(f"{SEED} {name} {number}")))
        if report := sandbox.read(name, original, mutant):
            failed_path = shutil.copytree(folder, tmp_path / f"failed-{number}") / original.name
            failures.setdefault(cause(report), []).append(
                f"python tests/support/sandbox.py {name} '{failed_path}'\n{report[-2000:]}"
            )
    record_property("mutants", mutants)
    if failures:
        count = sum(map(len, failures.values()))
        causes = "\n\n".join(
            f"{len(reports)} x {reason}:\n{reports[0]}" for reason, reports in failures.items()
        )
        pytest.fail(f"{count} of {mutants} mutants:\n{causes}", pytrace=False)


def test_number_of_mutants() -> None:
    assert sum(artefact.mutants for artefact in ARTEFACTS.values()) >= 5000
