from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from toy import write_video

import capvid
from capvid.cli.app import main
from capvid.errors import UsageError, VideoError

HEAVY = {"torch", "decord", "transformers", "huggingface_hub", "timm", "torchvision", "numpy", "av"}
MODULES = """
import json, sys
from capvid.cli.app import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["caption", "--help"], ["train", "--help"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", MODULES, *arguments], capture_output=True, text=True, check=True
    )
    code, modules = json.loads(completed.stderr)
    assert code == 0
    assert "typer" in modules
    assert not HEAVY & set(modules)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"capvid {capvid.__version__}\n"


def test_python_dash_m_runs_the_command() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "capvid", "--version"], capture_output=True, text=True, check=True
    )
    assert completed.stdout == f"capvid {capvid.__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("caption", "convert", "data", "extract", "info", "models", "push", "train"):
        assert f"\n  {command} " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["caption", "--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
        (["caption", "v.mp4", "--model", "m", "--beam", "0"], "--beam"),
        (["caption", "v.mp4", "--model", "m", "--format", "docx"], "docx"),
        (["extract", "v.mp4", "-o", "x"], "--backbone"),
        (["extract", "v.mp4", "--backbone", "googlenet"], "--output"),
        (["info"], "VIDEO"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def make_failing_run(error: BaseException) -> object:
    def run(arguments: list[str]) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (VideoError("v.mp4", "is\nbroken", remedy="mend it"), 1, "error: v.mp4: is broken; mend it\n"),
        (UsageError("no such thing"), 2, "error: no such thing\n"),
        (OSError(28, "No space left on device", "/x/y"), 1, "error: /x/y: No space left on device\n"),
        (
            ZeroDivisionError("division\nby zero"),
            1,
            "internal error: ZeroDivisionError: division by zero; run with --debug for the traceback\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
    ],
)
def test_errors_print_one_line(
    error: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CAPVID_DEBUG", raising=False)
    monkeypatch.setattr("capvid.cli.app.run", make_failing_run(error))
    assert main([]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line)


@pytest.mark.parametrize("way", ["before", "after", "environment"])
def test_debug_shows_the_traceback(
    way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPVID_DEBUG", "1" if way == "environment" else "0")
    arguments = ["models", "no-such-model"]
    if way != "environment":
        arguments.insert(0 if way == "before" else 2, "--debug")
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("error: unknown model 'no-such-model'")


def test_debug_after_double_dash_is_an_argument(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAPVID_DEBUG", raising=False)
    assert main(["models", "--", "--debug"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown model '--debug'")


def test_closed_pipe_prints_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "capvid", "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate(timeout=60)
    assert stderr == b""
    assert process.returncode == 141  # the shells' exit status after SIGPIPE


INTERRUPTED = """
import sys, threading
import capvid.cli.app
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire).start()
def run(*_, **__):
    print("last output")
    return capvid.cli.app.INTERRUPTED
capvid.cli.app._run = run
sys.exit(capvid.cli.app.main())
"""


@pytest.mark.slow
def test_interrupted_process_does_not_wait_for_its_threads() -> None:
    """A thread may wait for a lock that the main thread held when interrupted."""
    completed = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=100
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (130, "last output\n", "")


def test_a_mistyped_choice_has_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", "a.mp4", "--format", "srtt"]) == 2
    assert "'srtt' is not one of 'txt', " in (err := capsys.readouterr().err)
    assert err.endswith("Did you mean srt?\n") and "Value error" not in err
    assert main(["caption", "a.mp4", "--format", "bmp"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_long_values_are_shortened_in_messages(capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ("x" * 1_000_000, "x y " * 250_000):
        assert main(["score", "--predictions", argument, "--references", argument]) in (1, 2)
        assert 0 < len(capsys.readouterr().err) < 1200
    long_path = "/".join(["d" * 200] * 3)
    assert str(UsageError(f"{long_path}: no such file")) == f"{long_path}: no such file"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ((resource.RLIMIT_NOFILE, 8), "too many open files; raise the limit with ulimit -n"),
        ((resource.RLIMIT_AS, 10**9), "too little memory; close other programs, or raise the limit"),
    ],
    ids=["files", "memory"],
)
def test_a_machine_with_too_little(limit: tuple[int, int], message: str, tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", seed=0)
    kind, size = limit
    completed = subprocess.run(
        [sys.executable, "-m", "capvid", "caption", tmp_path / "a.mp4", "--model", "kv-memory"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(kind, (size, size)),
    )
    assert completed.returncode == 1 and message in completed.stderr
    assert completed.stderr.startswith("error: ") and completed.stderr.count("\n") == 1
