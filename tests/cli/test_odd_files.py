"""``capvid extract`` and ``caption`` on a folder of broken and unusual files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import signal_at
from odd_files import make_odd_files
from toy import TIME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="needs FIFOs, sockets and symlinks"),
]


class Run:
    """A ``capvid`` command that stops itself once (see :func:`signal_at.command`)."""

    def __init__(self, mark: Path, event: str, text: str, count: int, *arguments: object) -> None:
        self._mark = f"CAPVID_TEST_RUN={mark}"
        self.process = subprocess.Popen(
            signal_at.command(signal.SIGSTOP, event, text, count, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CAPVID_TEST_RUN": str(mark)},
            start_new_session=True,
        )
        signal_at.wait_until_stopped(self.process)

    def count_processes(self) -> int:
        """Count the processes of this run, itself included; 0 outside Linux."""
        count = 0
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it ended, or is another user's
                count += self._mark.encode() in entry.read_bytes()
        return count

    def finish(self) -> tuple[str, str]:
        """Wait for the end, also of its workers; return what they wrote to stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=250)
        deadline = time.monotonic() + 10
        while self.count_processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not self.count_processes()
        return stdout, stderr


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
    extract = ["extract", folder, "--backbone", "colour-grid", "--frames", 4, "-o", out, "--timeout", 60]
    run = Run(tmp_path, "os.rename", ".safetensors", 2, *extract)
    assert len(list(out.glob("[!.]*.safetensors"))) == 1
    run.process.send_signal(signal.SIGCONT)
    stdout, stderr = run.finish()
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
    assert run.process.returncode == 3
    assert TIME.sub("", lines[-1]) == f"{readable_count} extracted, {len(expected) - readable_count} failed"
    assert all(line.startswith(("error: ", "warning: ")) for line in lines[:-1]), stderr
    assert len([line for line in lines if line.startswith("error: ")]) == len(expected) - readable_count
    assert any("frames could not be decoded" in line for line in lines)
    feature_files = list(out.rglob("*.safetensors"))
    assert len(feature_files) == readable_count and not list(out.rglob(".*"))

    second_run = subprocess.run(
        capvid_command(*extract), capture_output=True, text=True, timeout=250, check=False
    )
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
    for number in range(1000):  # far more than is decoded before the first file is written
        os.link(readable, copies / f"{number}{readable.suffix}")
    out = tmp_path / "out"
    extract = ["extract", folder, copies, "--backbone", "colour-grid", "-o", out, "--workers", 3]
    run = Run(tmp_path, "os.rename", ".safetensors", 2, *extract)
    assert len(list(out.glob("[!.]*.safetensors"))) == 1
    assert run.count_processes() > 1 or not Path("/proc/self/environ").exists()
    signal_at.interrupt_stopped(run.process)
    _, stderr = run.finish()
    assert run.process.returncode == 130
    assert "Traceback" not in stderr
    assert not list(out.rglob(".*"))
    assert len(list(out.rglob("*.safetensors"))) < sum(expected.values()) + 1000


def test_closed_output_pipe_leaves_no_process(
    odd_files: tuple[Path, dict[str, bool]], tmp_path: Path
) -> None:
    folder, _ = odd_files
    arguments = ("caption", folder, "--model", "kv-memory", "--batch-size", 1)
    run = Run(tmp_path, "stdout", "\t", 1, *arguments)
    assert run.process.stdout is not None
    assert run.process.stdout.readline()
    run.process.stdout.close()
    run.process.send_signal(signal.SIGCONT)
    _, stderr = run.finish()
    assert run.process.returncode == 141
    assert all(line.startswith(("error: ", "warning: ")) for line in stderr.splitlines())
