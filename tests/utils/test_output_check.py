from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save
from toy import video_files

from capvid.errors import UsageError
from capvid.utils.output_check import check_outputs
from capvid.utils.storage import Blob

__all__ = ["video_files"]


def refused(output: Path | str, *inputs: Path | str | Blob, **options: str | None) -> bool:
    try:
        check_outputs([("-o", output)], inputs, **options)  # type: ignore[arg-type]
    except UsageError as error:
        return "is the file that is read" in error.message and error.remedy == "give another name with -o"
    return False


def test_an_output_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clips" / "list.txt"
    path.parent.mkdir()
    path.write_text("a.mp4\n")
    (tmp_path / "link.txt").symlink_to(path)
    (tmp_path / "folder").symlink_to(path.parent)
    (tmp_path / "hard.txt").hardlink_to(path)
    monkeypatch.chdir(path.parent)
    for output in (
        path,
        tmp_path / "link.txt",
        tmp_path / "hard.txt",
        tmp_path / "folder" / "list.txt",
        tmp_path / "clips" / ".." / "clips" / "list.txt",
        Path("list.txt"),
        path.with_name("LIST.TXT"),  # one file on the file systems of macOS and Windows
        tmp_path / "folder" / "List.txt",
    ):
        assert refused(output, path), output
        assert refused(path, output) or not output.exists()
        assert refused(output, f"file://{path}")
    assert refused(path, tmp_path / "other", path)
    for output in (tmp_path / "list.txt", path.with_name("list2.txt")):
        assert not refused(output, path)


def test_names_that_differ_in_normalization_are_one(tmp_path: Path) -> None:
    assert refused(tmp_path / "re\u0301sume\u0301.txt", tmp_path / "r\u00e9sum\u00e9.txt")


def test_a_member_stands_for_its_archive(tmp_path: Path) -> None:
    archive = tmp_path / "list.txt"  # whatever its name is
    archive.write_text("x")
    assert refused(archive, Blob(str(archive), "a/b.mp4", 512, 10))
    assert refused(archive, archive / "folder" / "of" / "images")


@pytest.mark.parametrize("output", ["s3://bucket/a/x.tar", "s3a://bucket/a/x.tar", "S3://bucket/a/x.tar"])
def test_addresses(output: str) -> None:
    for name in ("s3://bucket/a/x.tar", Blob("s3://bucket/a/x.tar"), Blob("s3://bucket/a/x.tar", "v.mp4")):
        assert refused(output, name)
    assert not refused(output, "s3://bucket/b/x.tar", Path("x.tar"))


def test_two_outputs_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("page")
    (tmp_path / "b.html").hardlink_to(path)
    for other in (path, tmp_path / "b.html", tmp_path / "A.html"):
        with pytest.raises(UsageError, match=r"--report and -o .* are one file"):
            check_outputs([("-o", path), ("--report", other)], [])
    check_outputs([("-o", path), ("--report", tmp_path / "c.html")], [])


def tar_of(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        member = tarfile.TarInfo("a")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def zip_of(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", data)
    return file.getvalue()


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    return file.getvalue()


WEIGHTS = save({"a": np.zeros(3, np.float32)}, {"format": "pt"})
FEATURES = save({"stream0": np.zeros((1, 3), np.float32)}, {"capvid": "{}"})
CONTENTS = {
    "an image": png(),
    "an archive": tar_of(b"x"),
    "a checkpoint": WEIGHTS,
    "features": FEATURES,
    "a binary file": bytes(range(256)),
    "a document": b"%PDF-1.7\n",
}


@pytest.mark.parametrize(("what", "data"), [*CONTENTS.items(), ("an archive", zip_of(b"x"))])
def test_text_replaces_text_only(tmp_path: Path, what: str, data: bytes) -> None:
    path = tmp_path / "captions.txt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=f"captions.txt: is {what}, which -o would replace"):
        check_outputs([("-o", path)], [])
    check_outputs([("-o", path)], [], kind=None)


@pytest.mark.parametrize(
    "text", [b"", b"plain\n", '{"id": {}}'.encode("utf-16"), b"caf\xe9;1\r\n", b"\x1b[0m"]
)
def test_text_is_replaced(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "captions.txt"
    path.write_bytes(text)
    check_outputs([("-o", path)], [])
    os.mkfifo(tmp_path / "pipe")
    check_outputs([("-o", tmp_path / "pipe")], [])  # not opened, and reported elsewhere


def test_videos(tmp_path: Path, video_files: list[Path]) -> None:
    path = tmp_path / "captions"
    path.write_bytes(video_files[0].read_bytes())
    with pytest.raises(UsageError, match="is a video, which -o would replace"):
        check_outputs([("-o", path)], [])


def test_names_of_other_kinds(tmp_path: Path) -> None:
    for name in ("new.mp4", "new.PNG", "new.tar", "new.safetensors"):
        with pytest.raises(UsageError, match=r"is the name of an? "):
            check_outputs([("-o", tmp_path / name)], [])
    (tmp_path / "empty.mp4").touch()
    with pytest.raises(UsageError, match=r"empty\.mp4: is the name of a video"):
        check_outputs([("-o", tmp_path / "empty.mp4")], [])


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [
        ("image", {"an image", "a document"}),
        ("weights", {"a checkpoint"}),
        ("features", {"features", "a binary file"}),
    ],
)
def test_other_outputs(tmp_path: Path, kind: str, allowed: set[str]) -> None:
    for what, data in CONTENTS.items():
        path = tmp_path / "x"
        path.write_bytes(data)
        if what in allowed:
            check_outputs([("-o", path)], [], kind=kind)  # type: ignore[arg-type]
            continue
        with pytest.raises(UsageError, match=f"is {what}, which -o would replace"):
            check_outputs([("-o", path)], [], kind=kind)  # type: ignore[arg-type]
