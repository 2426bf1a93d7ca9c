"""A folder of bad and odd files through the command line, in a process of its own as users run it."""

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
    pytest.mark.skipif(os.name != "posix", reason="pipes, sockets and links are made in other ways"),
]


def marked(mark: str) -> list[int]:
    """Process ids of all processes with this in their environment, whoever their parent is now, on Linux."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc/self/environ").exists() else ():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def children(parent: int) -> list[int]:
    """Process ids of all processes below one, on Linux."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bool]]:
    folder = tmp_path_factory.mktemp("odd") / "files"
    return folder, make_odd_files(folder)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "capvid", *map(str, arguments)]


def test_every_file_counts_once(odd: tuple[Path, dict[str, bool]], tmp_path: Path) -> None:
    folder, expected = odd
    assert len(expected) >= 60
    out = tmp_path / "out"
    extract = command(
        "extract", folder, "--backbone", "colour-grid", "--frames", 4, "-o", out, "--timeout", 60
    )
    mark = f"CAPVID_TEST_RUN={tmp_path}"
    environment = {**os.environ, "CAPVID_TEST_RUN": str(tmp_path)}
    process = subprocess.Popen(
        extract, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    while not list(out.glob("*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    if Path("/proc/self/environ").exists():
        assert len(marked(mark)) > 1  # the run and those that decode
    stdout, stderr = process.communicate(timeout=250)
    end = time.monotonic() + 5
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.01)
    assert not marked(mark)
    good = sum(expected.values())
    lines = stderr.splitlines()
    said_to_fail = {
        name
        for name in expected
        for line in lines
        if line.startswith("error: ") and " ".join(f"{folder / name}:".split()) in line
    }
    assert said_to_fail == {name for name, fine in expected.items() if not fine}, stderr
    assert stdout == ""
    assert process.returncode == 3
    assert TIME.sub("", lines[-1]) == f"{good} extracted, {len(expected) - good} failed"
    assert all(line.startswith(("error: ", "warning: ")) for line in lines[:-1]), stderr
    assert len([line for line in lines if line.startswith("error: ")]) == len(expected) - good
    assert any("frames could not be decoded" in line for line in lines)
    written = list(out.rglob("*.safetensors"))
    assert len(written) == good and not list(out.rglob(".*"))

    again = subprocess.run(extract, capture_output=True, text=True, timeout=250, check=False)
    assert again.returncode == 3
    assert again.stderr.splitlines()[-1] == (
        f"0 extracted, {good} skipped (already done), {len(expected) - good} failed"
    )


def test_fail_fast_stops_at_the_first(odd: tuple[Path, dict[str, bool]], tmp_path: Path) -> None:
    folder, _ = odd
    extract = command("extract", folder, "--backbone", "colour-grid", "-o", tmp_path, "--fail-fast")
    done = subprocess.run(extract, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 3)
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_an_interrupt_leaves_no_process(odd: tuple[Path, dict[str, bool]], tmp_path: Path) -> None:
    folder, expected = odd
    extract = command("extract", folder, "--backbone", "colour-grid", "-o", tmp_path / "out", "--workers", 3)
    process = subprocess.Popen(
        extract, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    while not list((tmp_path / "out").glob("*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    below = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)
    assert not list((tmp_path / "out").rglob(".*"))
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) < len(expected)


def test_a_reader_that_goes_leaves_no_process(odd: tuple[Path, dict[str, bool]]) -> None:
    folder, _ = odd
    process = subprocess.Popen(
        command("caption", folder, "--batch-size", 1), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    below = children(process.pid)
    process.stdout.close()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 141
    assert all(line.startswith((b"error: ", b"warning: ")) for line in stderr.splitlines())
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)
