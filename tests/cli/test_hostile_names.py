"""File names that are not valid text or contain terminal control codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from toy import Run, Toy

from capvid.errors import CapvidError
from capvid.utils.files import MANIFEST

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file names are bytes only on POSIX")

NAMES = [b"byte \xff.mp4", b"new\nline.mp4", b"\x1b]0;title\x07.mp4", "\u202egpj.mp4".encode(), b"=1+1.mp4"]


def hostile_folder(folder: Path, video: Path) -> list[str]:
    """Write a good and a broken video under each name; return the stems of the good ones."""
    folder.mkdir()
    for name in NAMES:
        (folder / os.fsdecode(name)).write_bytes(video.read_bytes())
        (folder / os.fsdecode(b"broken " + name)).write_bytes(b"no video" * 100)
    (folder / "good.mp4").write_bytes(video.read_bytes())
    return sorted(os.fsdecode(name).removesuffix(".mp4") for name in (*NAMES, b"good.mp4"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "srt"])
def test_hostile_names_in_a_folder(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path, form: str
) -> None:
    good_stems = hostile_folder(tmp_path / "in", video_files[0])
    command = ["caption", tmp_path / "in", "--model", toy.model, "--format", form, "--workers", 1]
    for summary in ("6 captioned, 5 failed", "0 captioned, 6 skipped (already done), 5 failed"):
        code, out, err = capvid(*command, "--output-dir", tmp_path / "out")
        assert (code, out) == (3, "")
        *errors, last_line = err.split("\n")[:-1]
        assert (
            last_line == summary and len(errors) == 5 and all(line.startswith("error: ") for line in errors)
        )
        assert all(line.isprintable() for line in errors), errors
        written_stems = {path.stem for path in (tmp_path / "out").iterdir() if path.name != MANIFEST}
        assert written_stems >= set(good_stems)
        lines = (tmp_path / "out" / MANIFEST).read_bytes().decode("utf-8").splitlines()
        assert len([json.loads(line) for line in lines]) == 11


def test_hostile_names_on_stdout(capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path) -> None:
    hostile_folder(tmp_path / "in", video_files[0])
    command = ["caption", tmp_path / "in", "--model", toy.model, "--workers", 1]
    code, out, err = capvid(*command)
    lines = out.split("\n")[:-1]
    assert code == 3 and len([line for line in lines if "\t\terror: " not in line]) == 6
    assert all(line.replace("\t", "").isprintable() for line in lines)
    assert all(
        name in out for name in (r"byte \xff.mp4", r"new\nline.mp4", r"\x1b]0;title\x07", r"\u202egpj")
    )
    assert all(line.isprintable() for line in err.split("\n"))


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_manifest_path_that_is_not_a_file(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / MANIFEST
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    code, out, err = capvid("caption", *video_files[:2], "--model", toy.model, "--output-dir", tmp_path)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert err.startswith(f"error: {path}: ") and ("not a regular file" in err or "Is a directory" in err)


@pytest.mark.parametrize("name", ["\x1b7\n\u202e.mp4", "byte \udcff.mp4"])
@pytest.mark.parametrize("command", [["caption"], ["info"], ["caption", "--from-file"], ["score", "a.json"]])
def test_errors_are_one_printable_line(
    capvid: Run, name: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = capvid(*command, f"no {name}")
    assert code and not out
    assert err.count("\n") == 1 and err[:-1].isprintable() and err.startswith("error: "), err


def test_library_errors_are_one_printable_line(
    capvid: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for error in (
        ValueError("a\n\x1b[2J"),
        OSError(5, "a\n\x1b[2J", "b\n\x9b"),
        CapvidError("\u202ea\n\x1b[2J"),
    ):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("capvid.video.readers.open_video", fail)
        code, _, err = capvid("info", "v.mp4")
        assert code == 1 and err.count("\n") == 1 and err[:-1].isprintable(), err


@pytest.mark.parametrize(
    "command",
    [
        ["info", "a.mp4", "\x1b[2Jb"],
        ["info", "--\x1b[2J"],
        ["--\u202e"],
        ["\x1b[2J"],
        ["caption", "--format=\x1b"],
    ],
)
def test_usage_errors_escape_control_codes(capvid: Run, command: list[str]) -> None:
    code, out, err = capvid(*command)
    assert (code, out) == (2, "") and all(line.isprintable() for line in err.split("\n")), err
    assert "x1b" in err or "u202e" in err
