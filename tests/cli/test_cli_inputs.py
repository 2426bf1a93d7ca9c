"""Inputs of the batch commands: lists, patterns and folders."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image
from toy import Run, Toy

from capvid.utils.files import MANIFEST


@pytest.fixture
def clips(tmp_path: Path, video_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copy videos into the current folder; return their relative paths."""
    monkeypatch.chdir(tmp_path)
    names = ["a/clip.MP4", "b/clip.mp4", 'b/it\'s "é" [1].mp4']
    for name, video in zip(names, video_files, strict=False):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(video, name)
    return names


def printed_paths(out: str) -> list[str]:
    return [line.split("\t")[0] for line in out.splitlines()]


def test_an_image_is_captioned_as_one_frame(capvid: Run, toy: Toy, tmp_path: Path) -> None:
    for name in ("photo.jpg", "photo.png", "photo.webp"):
        Image.new("RGB", (64, 48), (200, 40, 60)).save(tmp_path / name)
        code, out, err = capvid("caption", tmp_path / name, "--model", toy.model)
        assert (code, err) == (0, "") and out.strip()


@pytest.mark.slow
def test_from_file_list(capvid: Run, toy: Toy, clips: list[str]) -> None:
    Path("list.txt").write_text("\r\n".join([*clips, "", "gone.mp4"]), encoding="utf-8")
    arguments = ["caption", "--from-file", "list.txt", "--model", toy.model]
    code, out, err = capvid(*arguments, "--output-dir", "out", "--format", "json")
    assert (code, out) == (3, "")
    assert err == "error: gone.mp4: no such file; check the name\n3 captioned, 1 failed\n"
    output_paths = {path.relative_to("out").as_posix() for path in Path("out").rglob("*.json")}
    assert output_paths == {*(name[:-4] + ".json" for name in clips), "gone.json"}
    assert json.loads(Path("out/gone.json").read_text())["status"] == "error"
    Path("list.txt").write_text(f"{clips[0]}\n")
    assert capvid(*arguments, "--output-dir", "out", "--format", "json") == (
        0,
        "",
        "0 captioned, 1 skipped (already done)\n",
    )
    code, out, err = capvid(*arguments, clips[1])  # arguments come before listed paths
    assert (code, printed_paths(out), err) == (0, [clips[1], clips[0]], "2 captioned\n")


@pytest.mark.slow
def test_from_file_stdin_with_undecodable_name(
    capvid: Run, toy: Toy, clips: list[str], video_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    undecodable = os.fsencode("b") + b"/odd\xff.mp4"
    shutil.copy(video_files[0], undecodable)
    list_bytes = b"\0".join([os.fsencode(clips[0]), undecodable, b""])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(list_bytes)))
    out = ["-o", "features"]
    assert capvid("extract", "--from-file", "-", "--backbone", "toy", "--frames", 4, *out)[::2] == (
        0,
        "2 extracted\n",
    )
    assert Path("features/a/clip.safetensors").is_file()
    assert Path(os.fsdecode(b"features/b/odd\xff.safetensors")).is_file()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(list_bytes)))
    arguments = ["caption", "--from-file", "-", "--model", toy.model, "--output-dir", "captions"]
    assert capvid(*arguments)[::2] == (0, "2 captioned\n")
    for line in Path("captions", MANIFEST).read_text(encoding="utf-8").splitlines():
        assert Path("captions", json.loads(line)["output"]).is_file()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(list_bytes)))
    assert capvid(*arguments)[::2] == (0, "0 captioned, 2 skipped (already done)\n")


@pytest.mark.parametrize("command", [["caption"], ["extract", "--backbone", "colour-grid", "-o", "out"]])
@pytest.mark.parametrize(
    ("inputs", "code", "message"),
    [
        ([], 2, "no input; give a video, a folder, or a list with --from-file"),
        (["--from-file", "none.txt"], 2, "none.txt: the list cannot be read (No such file or directory)"),
        (["--from-file", "folder"], 2, "folder: the list cannot be read (Is a directory)"),
        (["--from-file", "v.mp4"], 2, "v.mp4: is a video, not a list of paths; leave out --from-file"),
        (["--from-file", "empty.txt"], 1, "empty.txt: there is no path in this list"),
        (["*.avi"], 1, "*.avi: there is no such file, and no video matches it as a pattern"),
    ],
)
def test_missing_or_invalid_inputs(
    capvid: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    inputs: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("folder").mkdir()
    exit_code, out, err = capvid(*command, *inputs)
    first_line, *other_lines = err.splitlines()
    assert (exit_code, out) == (code, "")
    assert first_line.startswith(f"error: {message}")
    verb = "captioned" if command[0] == "caption" else "extracted"
    assert other_lines == ([] if code == 2 else [f"0 {verb}, 1 failed"])
    assert not Path("out").exists()


@pytest.mark.slow
def test_pattern_outputs_mirror_the_folder_tree(capvid: Run, toy: Toy, clips: list[str]) -> None:
    arguments = ["caption", "*/*.[mM][pP]4", "--model", toy.model]
    code, out, err = capvid(*arguments)
    assert (code, printed_paths(out), err) == (0, clips, "3 captioned\n")
    assert capvid(*arguments, "--output-dir", "out", "--format", "json")[0] == 0
    assert sorted(path.relative_to("out").as_posix() for path in Path("out").rglob("*.json")) == sorted(
        name[:-4] + ".json" for name in clips
    )
    code, out, err = capvid("caption", "b/it's*", "--model", toy.model)
    assert (code, printed_paths(out), err) == (0, [clips[2]], "1 captioned\n")
    code, out, err = capvid("caption", clips[2], "--model", toy.model)  # an existing file is not a pattern
    assert (code, out.count("\t"), err) == (0, 0, "")


@pytest.mark.slow
def test_unlistable_folder_does_not_stop_the_batch(
    capvid: Run, toy: Toy, clips: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original_scandir = os.scandir

    def scandir(folder: object) -> object:
        if str(folder) == "a":
            raise PermissionError(13, "Permission denied", str(folder))
        return original_scandir(folder)

    monkeypatch.setattr("os.scandir", scandir)
    code, out, err = capvid("caption", ".", "--model", toy.model)
    assert (code, printed_paths(out)) == (3, clips[1:])
    assert err.splitlines() == [
        "error: a: cannot be listed (Permission denied); check its permissions",
        "2 captioned, 1 failed",
    ]
    code, out, err = capvid("caption", ".", "--model", toy.model, "--fail-fast")
    assert (code, out, err.count("\n")) == (1, "", 1)


@pytest.mark.slow
def test_os_access_is_not_consulted_for_videos(
    capvid: Run, toy: Toy, clips: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode, **_: False)
    code, out, _ = capvid("caption", *clips, "--model", toy.model)
    assert (code, printed_paths(out)) == (0, clips)


@pytest.mark.slow
def test_unreadable_zip_does_not_stop_the_batch(
    capvid: Run, toy: Toy, clips: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original_stat = os.stat

    def refuse_locked(path: object, *arguments: object, **options: object) -> os.stat_result:
        if str(path) == "locked/x.zip":
            raise PermissionError(13, "Permission denied", path)
        return original_stat(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("os.stat", refuse_locked)
    code, out, err = capvid("caption", "locked/x.zip", clips[0], "--model", toy.model)
    assert (code, printed_paths(out)) == (3, ["locked/x.zip", *clips[:1]])
    assert err.startswith("error: locked/x.zip: ") and err.endswith("1 captioned, 1 failed\n")
