"""Closed, full or unread standard streams; interrupts; terminals of any width."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toy import Run, Toy, write_video

from capvid.cli.app import main

needs_posix = pytest.mark.skipif(os.name != "posix", reason="a shell closes the streams")
COMMANDS = ["caption", "extract", "train", "score", "models", "convert", "push", "info", "doctor", "data"]


def run_in_shell(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell command line in which ``capvid`` is this checkout's command."""
    line = command.replace("capvid", f"'{sys.executable}' -m capvid")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, timeout=60, check=False, env=environment | variables
    )


@pytest.mark.slow
@needs_posix
@pytest.mark.parametrize(
    ("command", "code", "expected_stderr"),
    [
        ("capvid --help >&-", 1, "error: stdout: Bad file descriptor\n"),
        ("capvid models >&-", 1, "error: stdout: Bad file descriptor\n"),
        ("capvid --help >/dev/full", 1, "error: stdout: No space left on device\n"),
        ("capvid models m3 >/dev/full", 1, "error: stdout: No space left on device\n"),
        ("capvid models vgg99 2>&-", 2, ""),
        ("capvid models vgg99 2>/dev/full", 2, ""),
        ("capvid models vgg99 <&- >&- 2>&-", 2, ""),
        (
            "capvid caption --from-file - <&-",
            1,
            "error: -: there is no path in this list\n0 captioned, 1 failed\n",
        ),
    ],
)
def test_closed_or_full_streams(command: str, code: int, expected_stderr: str) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    completed = run_in_shell(command)
    assert (completed.returncode, completed.stdout.decode(), completed.stderr.decode()) == (
        code,
        "",
        expected_stderr,
    )


@pytest.mark.slow
@needs_posix
def test_extract_succeeds_with_closed_streams(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", seed=1)
    completed = run_in_shell(
        f"capvid extract '{tmp_path}' --backbone colour-grid -o '{tmp_path}/out' <&- >&- 2>&-"
    )
    assert completed.returncode == 0
    assert (tmp_path / "out" / "v.safetensors").is_file()


@pytest.mark.slow
@needs_posix
def test_non_ascii_names_in_the_c_locale(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + "/é".encode() + b"\xff.mp4"
    write_video(tmp_path / "v.mp4", seed=1).rename(os.fsdecode(path))
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    completed = run_in_shell(f"capvid info '{tmp_path}/'*.mp4", **variables)
    assert (completed.returncode, completed.stderr) == (0, b"")
    assert b"codec:     mpeg4" in completed.stdout
    completed = run_in_shell(f"capvid info '{tmp_path}/é'", **variables)
    assert completed.returncode == 1
    assert completed.stderr.startswith(b"error: ") and b"no such file" in completed.stderr
    completed.stderr.decode("ascii")


INTERRUPTIBLE_PROGRAM = """
import sys, time
import capvid.cli.app
from capvid.cli.app import main

def run(arguments):
    try:
        print("working", flush=True)
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(float(arguments[0]))
        print("clean", flush=True)

capvid.cli.app.run = run
sys.exit(main(sys.argv[1:]))
"""


@needs_posix
@pytest.mark.parametrize(("twice", "seconds", "expected_stdout"), [(False, 0, "clean\n"), (True, 60, "")])
def test_second_interrupt_exits_at_once(twice: bool, seconds: int, expected_stdout: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE_PROGRAM, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning\n"
    if twice:
        process.send_signal(signal.SIGINT)
    # communicate() would lose a line that came with the last one and is in the buffer already
    stdout, stderr = process.stdout.read(), process.stderr.read()
    assert (process.wait(timeout=30), stdout, stderr) == (130, expected_stdout, "")


@pytest.mark.parametrize("columns", ["20", "40", "200"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_terminals_of_any_width(
    command: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main([command, *(["check"] if command == "data" else []), "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "\x1b" not in captured.out
    assert f"capvid {command}" in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    for option in {"caption": ["--from-file", "--output-dir"], "train": ["--self-critical"]}.get(command, []):
        assert option in captured.out


@pytest.mark.parametrize(
    "arguments", [["models"], ["models", "m3"], ["train", "--list"], ["models", "vgg99"]]
)
def test_piped_output_has_no_colours(capvid: Run, toy: Toy, arguments: list[str]) -> None:
    _, out, err = capvid(*arguments)
    assert "\x1b" not in out + err
