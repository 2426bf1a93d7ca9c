"""A run folder is used by one command at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from capvid.cli.app import main
from capvid.errors import UsageError
from capvid.training.run_folder import locked_run

HOLD = """
import sys, time
from pathlib import Path
from capvid.training.run_folder import locked_run
with locked_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked_run(run):
        (run / "best").mkdir()
        for _ in range(2):
            with pytest.raises(UsageError) as error, locked_run(run):
                pytest.fail("two commands hold one folder")
        assert str(error.value).startswith(f"{run}: in use by another capvid train (process {os.getpid()})")
        with locked_run(tmp_path / "other"):
            pass
    with locked_run(run):
        pass
    assert not (tmp_path / "other").exists()  # nothing came of it


def test_processes_of_accelerate_leave_the_lock_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with locked_run(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with locked_run(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=rf"in use by .* \(process {process.pid}\)"),
            locked_run(tmp_path),
        ):
            pass
        process.kill()
    with locked_run(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_reported_by_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with locked_run(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize("extra", [(), ("--resume",), ("--overwrite",), ("--search", "2")])
def test_a_second_command_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...]
) -> None:
    with locked_run(tmp_path):
        command = ["train", "m3-small", "--data", "jsonl:none.jsonl", "--features", "none", *extra]
        assert main([*command, "-o", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}: in use by another capvid train (process {os.getpid()})")
    assert said.count("\n") == 1
