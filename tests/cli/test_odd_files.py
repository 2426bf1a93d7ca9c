"""``capvid extract`` and ``caption`` on a folder of broken and unusual files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from odd_files import make_odd_files
from toy import TIME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="needs FIFOs, sockets and symlinks"),
]


def marked_processes(mark: str) -> list[int]:
    """Return the ids of all processes with ``mark`` in their environment; empty outside Linux."""
    pids = []
    for entry in Path("/proc").iterdir() if Path("/proc/self/environ").exists() else ():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def child_processes(parent: int) -> list[int]:
    """Return the ids of the running children of a process; empty outside Linux."""
    pids = []
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                pids.append(int(entry.name))
    return pids


@pytest.fixture(scope="module")
def odd_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bool]]:
    folder = tmp_path_factory.mktemp("odd") / "files"
    return folder, make_odd_files(folder)


def capvid_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "capvid", *map(str, arguments)]


def test_every_file_is_extracted_or_reported(odd_files: tuple[Path, dict[str, bool]], tmp_path: Path) -> None:
    folder, expected = odd_files
    assert len(expected) >= 60
    out = tmp_path / "out"
    extract = capvid_command(
        "extract", folder, "--backbone", "colour-grid", "--frames", 4, "-o", out, "--timeout", 60
    )
    mark = f"CAPVID_TEST_RUN={tmp_path}"
    environment = {**os.environ, "CAPVID_TEST_RUN": str(tmp_path)}
    process = subprocess.Popen(
        extract, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    # the workers may have decoded everything, and ended, before the first feature file is written
    while Path("/proc/self/environ").exists() and len(marked_processes(mark)) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    while not list(out.glob("*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    stdout, stderr = process.communicate(timeout=250)
    deadline = time.monotonic() + 5
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not marked_processes(mark)
    readable_count = sum(expected.values())
    lines = stderr.splitlines()
    reported = {
        name
        for name in expected
        for line in lines
        if line.startswith("error: ") and " ".join(f"{folder / name}:".split()) in line
    }
    assert reported == {name for name, readable in expected.items() if not readable}, stderr
    assert stdout == ""
    assert process.returncode == 3
    assert TIME.sub("", lines[-1]) == f"{readable_count} extracted, {len(expected) - readable_count} failed"
    assert all(line.startswith(("error: ", "warning: ")) for line in lines[:-1]), stderr
    assert len([line for line in lines if line.startswith("error: ")]) == len(expected) - readable_count
    assert any("frames could not be decoded" in line for line in lines)
    feature_files = list(out.rglob("*.safetensors"))
    assert len(feature_files) == readable_count and not list(out.rglob(".*"))

    second_run = subprocess.run(extract, capture_output=True, text=True, timeout=250, check=False)
    assert second_run.returncode == 3
    assert second_run.stderr.splitlines()[-1] == (
        f"0 extracted, {readable_count} skipped (already done), {len(expected) - readable_count} failed"
    )


def test_fail_fast_stops_at_first_failure(odd_files: tuple[Path, dict[str, bool]], tmp_path: Path) -> None:
    folder, _ = odd_files
    extract = capvid_command("extract", folder, "--backbone", "colour-grid", "-o", tmp_path, "--fail-fast")
    completed = subprocess.run(extract, capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode in (1, 3)
    assert len([line for line in completed.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_interrupt_leaves_no_process(odd_files: tuple[Path, dict[str, bool]], tmp_path: Path) -> None:
    folder, expected = odd_files
    copies = tmp_path / "copies"
    copies.mkdir()
    readable = next(folder / name for name, is_readable in expected.items() if is_readable)
    for number in range(1000):  # a second of work or more, to be interrupted in
        os.link(readable, copies / f"{number}{readable.suffix}")
    extract = capvid_command(
        "extract", folder, copies, "--backbone", "colour-grid", "-o", tmp_path / "out", "--workers", 3
    )
    process = subprocess.Popen(
        extract, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    while not list((tmp_path / "out").rglob("*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    worker_pids = child_processes(process.pid)
    assert worker_pids or not Path("/proc/self/stat").exists()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in worker_pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in worker_pids)
    assert not list((tmp_path / "out").rglob(".*"))
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) < sum(expected.values()) + 1000


def test_closed_output_pipe_leaves_no_process(odd_files: tuple[Path, dict[str, bool]]) -> None:
    folder, _ = odd_files
    process = subprocess.Popen(
        capvid_command("caption", folder, "--batch-size", 1), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    worker_pids = child_processes(process.pid)
    process.stdout.close()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 141
    assert all(line.startswith((b"error: ", b"warning: ")) for line in stderr.splitlines())
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in worker_pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in worker_pids)
