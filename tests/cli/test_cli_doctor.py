from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import FakeHub
from toy import Run

import capvid as package
from capvid.cli import doctor as diagnosis
from capvid.cli.doctor import BROKEN, diagnose


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.server.shutdown()
    server.server.server_close()


def findings_by_topic(out: str) -> dict[str, tuple[str, str]]:
    """Map each topic to its state and finding."""
    rows = [line for line in out.splitlines() if line.strip() and not line.lstrip().startswith("->")]
    return {row[8:22].strip(): (row[:6].strip(), row[24:]) for row in rows}


def test_doctor_reports_the_installation(capvid: Run, hub: FakeHub) -> None:
    code, out, err = capvid("doctor")
    assert (code, err) == (0, "")
    findings = findings_by_topic(out)
    assert findings["capvid"][0] == "ok" and findings["capvid"][1].startswith(package.__version__)
    assert findings["bundled models"] == (
        "ok",
        "m3, m3-motion, kv-memory, kv-memory-motion, ham, dense-lstm, mart "
        "(by default m3-motion or kv-memory)",
    )
    assert findings["Hub"][0] == "ok" and hub.url in findings["Hub"][1]
    assert "h264" in findings["video codecs"][1]
    assert all(state in ("ok", "gap") for state, _ in findings.values())


def test_gaps_come_with_remedies(
    capvid: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Java
    hub.server.shutdown()
    hub.server.server_close()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10_000_000})())
    code, out, _ = capvid("doctor")
    assert code == 0
    findings = findings_by_topic(out)
    assert findings["Java"] == ("gap", "none")
    assert findings["Hub"][0] == "gap" and f"{hub.url} cannot be reached" in findings["Hub"][1]
    assert findings["cache"][0] == "gap" and "0 GB free" in findings["cache"][1]
    assert out.count("-> ") >= 3 and "-> make room, or move it with HF_HOME" in out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert findings_by_topic(capvid("doctor")[1])["Hub"] == ("gap", "not asked: HF_HUB_OFFLINE is set")


def test_damaged_bundled_model_is_broken(capvid: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capvid.checkpoints.lookup.sha256_file", lambda _: "0" * 64)
    code, out, _ = capvid("doctor")
    assert code == 1
    state, finding = findings_by_topic(out)["bundled models"]
    assert state == "broken" and "damaged, not the captioner m3; install capvid again" in finding
    assert [topic for topic, state, *_ in diagnose() if state == BROKEN] == ["bundled models"]


def test_broken_library_does_not_stop_other_checks(
    capvid: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> None:
        raise ValueError("a\n\x1b[2J")

    monkeypatch.setitem(diagnosis._CHECKS, "torch", fail)
    java = tmp_path / "java"
    java.write_bytes(b"#!/bin/sh\nprintf 'version \\377 \\033[2J' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    code, out, _ = capvid("doctor")
    assert code == 1 and all(line.isprintable() or "\ufffd" in line for line in out.split("\n"))
    assert "broken  torch           ValueError('a" in out and "Java" in out and "Hub" in out
