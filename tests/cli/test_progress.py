from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
import typer

from capvid.cli import _batch as common
from capvid.cli._options import RuntimeOptions
from capvid.errors import CapvidError, UsageError


@pytest.mark.parametrize(
    ("done", "skipped", "failed", "code"),
    [(2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 1), (1, 0, 1, 3), (0, 1, 1, 3)],
)
def test_exit_codes(
    done: int, skipped: int, failed: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = common.Batch(verb="captioned", many=True, done=done, skipped=skipped)
    for number in range(failed):
        batch.failed(CapvidError(f"v{number}: broken", remedy="mend it"))
    assert batch.exit_code == code
    if code:
        with pytest.raises(typer.Exit) as stop:
            batch.finish()
        assert stop.value.exit_code == code
    else:
        batch.finish()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[:-1] == [f"error: v{number}: broken; mend it" for number in range(failed)]
    assert lines[-1].startswith(f"{done} captioned")


def test_single_failure_keeps_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    batch = common.Batch(verb="captioned", many=False)
    batch.failed(UsageError("wrong"))
    assert batch.exit_code == 2
    assert capsys.readouterr().err == "error: wrong\n"


class Terminal(io.StringIO):
    """Text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("many", "stderr", "stdout", "visible"),
    [
        (True, Terminal, io.StringIO, True),
        (True, Terminal, Terminal, True),
        (True, io.StringIO, io.StringIO, False),
        (False, Terminal, io.StringIO, False),
    ],
)
def test_progress_bar_only_on_terminals(
    many: bool,
    stderr: type[io.StringIO],
    stdout: type[io.StringIO],
    visible: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", stderr())
    monkeypatch.setattr("sys.stdout", stdout())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    batch = common.Batch(verb="captioned", many=many)
    with batch.progress(2):
        batch.advance()
        print("data")
    import sys

    assert sys.stdout.getvalue() == "data\n"
    assert ("1/2" in sys.stderr.getvalue()) is visible


def test_time_left_and_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    batch = common.Batch(verb="captioned", many=True)
    with batch.progress(30):
        batch.decoded(Path("[red]a.mp4"))
        with batch.paused():
            print("a.mp4\ta dog")
        batch.advance()
        batch.decoded(Path("b.mp4"))
        with batch.paused():
            print("b.mp4\ta cat")
    import sys

    frames = re.findall(
        r"(\d+)/30 captioned \[ ([━╸ ]*) \] (\S+) left (.*?)\s*(?=[\r\n\x1b])", sys.stderr.getvalue()
    )
    assert frames[0][2] == "-:--:--" and frames[-1][1].strip()
    assert re.fullmatch(r"0:\d\d:\d\d", frames[-1][2])
    assert ("0", "1 decoded, last [red]a.mp4") in [(done, note) for done, _, _, note in frames]
    assert ("1", "2 decoded, last b.mp4") in [(done, note) for done, _, _, note in frames]
    assert sys.stdout.getvalue() == "a.mp4\ta dog\nb.mp4\ta cat\n"


def test_error_lines_appear_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    batch = common.Batch(verb="captioned", many=True)
    with batch.progress(2):
        batch.failed(CapvidError("[red]v.mp4[/red]: " + "long " * 60 + "line"))
    assert "error: [red]v.mp4[/red]: " + "long " * 60 + "line\n" in sys.stderr.getvalue()


def test_output_checks_leave_no_files(tmp_path: Path) -> None:
    common.check_writable_file(tmp_path / "x.txt")
    common.check_writable_folder(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]


def test_only_regular_files_may_be_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(UsageError, match="not a regular file"):
            common.check_writable_file(path)


def test_default_number_of_workers() -> None:
    assert 1 <= RuntimeOptions().num_workers <= 4


@pytest.mark.parametrize("many", [True, False])
def test_interrupt_reports_progress(many: bool, capsys: pytest.CaptureFixture[str]) -> None:
    batch = common.Batch(verb="captioned", many=many, interrupted="; so")
    with pytest.raises(KeyboardInterrupt), batch.progress(3):
        batch.done += 1
        raise KeyboardInterrupt
    assert capsys.readouterr() == ("", "interrupted: 1 of 3 captioned; so\n")


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
@pytest.mark.parametrize("columns", ["20", "80"])
def test_progress_bar_colours(
    variables: dict[str, str], coloured: bool, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr("sys.stderr", Terminal())
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "COLUMNS": columns}.items():
        monkeypatch.setenv(name, value)
    batch = common.Batch(verb="captioned", many=True)
    with batch.progress(2):
        batch.failed(CapvidError("a line that is longer than that"))
        batch.advance()
    text = sys.stderr.getvalue()
    assert "error: a line that is longer than that\n" in text
    assert (re.search(r"\x1b\[[\d;]*(3\d|38;)", text) is not None) is coloured
    assert ("1/2" in text) is (variables["TERM"] != "dumb")


def test_full_stderr_does_not_stop_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullStream(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", FullStream())
    batch = common.Batch(verb="captioned", many=True)
    batch.failed(CapvidError("broken"))
    assert len(batch.errors) == 1
