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

LOCK_HOLDER = """
import sys, time
from pathlib import Path
from capvid.training.run_folder import locked_run
with locked_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_locked_folder_is_refused(tmp_path: Path) -> None:
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
    assert not (tmp_path / "other").exists()  # an unused folder is removed


def test_only_the_first_process_takes_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with locked_run(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with locked_run(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")


def test_killed_process_releases_the_lock(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", LOCK_HOLDER, str(tmp_path)]
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


def test_lock_ignores_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with locked_run(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize("options", [(), ("--resume",), ("--overwrite",), ("--search", "2")])
def test_train_refuses_a_locked_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    with locked_run(tmp_path):
        command = ["train", "m3-small", "--data", "jsonl:none.jsonl", "--features", "none", *options]
        assert main([*command, "-o", str(tmp_path)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"error: {tmp_path}: in use by another capvid train (process {os.getpid()})")
    assert stderr.count("\n") == 1
