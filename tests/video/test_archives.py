from __future__ import annotations

import io
import tarfile
from pathlib import Path

import fsspec
import pytest

from capvid.errors import VideoError
from capvid.utils.storage import Blob, local_copy
from capvid.video.input_lists import members
from capvid.video.input_set import find_videos, iter_videos

LONG = "long " * 40 + "é.mp4"  # for which pax needs a header of its own
CONTENT = {
    "b.mp4": b"of b",
    'a/it\'s "é".mkv': b"of a",
    "./c/notes.txt": b"no video",
    ".hidden.mp4": b"hidden",
    "a/.git/x.mp4": b"hidden",
    "../out.mp4": b"elsewhere",
    LONG: b"x" * 2000,
    "./a/b.MP4": b"",
}
VISIBLE = ["b.mp4", 'a/it\'s "é".mkv', LONG, "a/b.MP4"]


def write_tar(path: Path, content: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "b.mp4"
        tar.addfile(link)
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def read(blob: Blob) -> bytes:
    with local_copy(blob) as file:
        return file.read_bytes()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("remote", [False, True])
def test_members_are_read_where_they_lie(tmp_path: Path, memory: None, form: int, remote: bool) -> None:
    path = write_tar(tmp_path / "videos.tar", CONTENT, form)
    where: Path | Blob = path
    if remote:
        fsspec.filesystem("memory").pipe("/b/videos.tar", path.read_bytes())
        where = Blob("memory://b/videos.tar")
    found = list(members(where))
    assert {blob.member.removeprefix("./"): read(blob) for blob in found} == {
        name.removeprefix("./"): CONTENT[name]
        for name in CONTENT
        if name.removeprefix("./") in [*VISIBLE, "c/notes.txt"]
    }
    assert {blob.url for blob in found} == {str(where)}
    videos = find_videos([str(where)])
    assert [video.path for video in videos] == [blob for blob in found if blob.suffix != ".txt"]
    # keys are unique although two differ in nothing but their extension
    assert [video.key for video in videos] == [
        "videos/b",
        'videos/a/it\'s "é"',
        f"videos/{LONG[:-4]}",
        "videos/a/b",
    ]
    assert [video.path for video in iter_videos([str(where)])] == [video.path for video in videos]


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_whole_in_an_archive_that_was_cut_off(tmp_path: Path, memory: None, remote: bool) -> None:
    path = write_tar(tmp_path / "cut.tar", {"a.mp4": b"a" * 700, "b.mp4": b"b" * 700, "c.mp4": b"c" * 5000})
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"c" * 700) + 600])
    where: Path | Blob = path
    if remote:
        fsspec.filesystem("memory").pipe("/b/cut.tar", path.read_bytes())
        where = Blob("memory://b/cut.tar")
    said: list[str] = []
    found = find_videos([str(where)], on_error=lambda error: said.append(str(error)))
    assert [read(video.path) for video in found[:2]] == [b"a" * 700, b"b" * 700]
    assert said == [f"{where}: is not a tar archive that can be read (unexpected end of data)"]
    with pytest.raises(VideoError) as raised:
        list(members(where))
    assert raised.value.path == where


@pytest.mark.parametrize("content", [b"", b"no archive at all " * 100])
def test_what_is_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(VideoError, match="is not a tar archive that can be read"):
        find_videos([tmp_path / "x.tar"])


def test_archives_without_videos_and_with_odd_endings(tmp_path: Path) -> None:
    write_tar(tmp_path / "empty.tar", {})
    write_tar(tmp_path / "texts.tar", {"a.txt": b"x"})
    (tmp_path / "zeros.tar").write_bytes(bytes(10240))
    said: list[str] = []
    inputs = [tmp_path / f"{name}.tar" for name in ("empty", "texts", "zeros")]
    assert find_videos(inputs, on_error=lambda error: said.append(str(error))) == []
    assert said == [f"{path}: no videos in this archive; give one with video files" for path in inputs]
    missing = tmp_path / "missing.tar"
    assert [video.path for video in find_videos([missing])] == [missing]  # which opening it will say


def test_equal_names_in_several_archives(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_tar(tmp_path / f"{name}.tar", {"0.mp4": name.encode(), "1.a.mp4": b""})
    inputs = [tmp_path / "x.tar", tmp_path / "y.tar"]
    assert [video.key for video in find_videos(inputs)] == ["x/0", "x/1.a", "y/0", "y/1.a"]
    streamed = list(iter_videos(inputs))
    assert [video.key for video in streamed] == ["x/0", "x/1_a", "y/0", "y/1_a"]
    assert [read(video.path) for video in streamed] == [b"x", b"", b"y", b""]


def test_a_listed_archive_and_one_matched_by_a_pattern(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"0.mp4": b"0"})
    (tmp_path / "d").mkdir()
    write_tar(tmp_path / "d" / "y.z.tar", {"a/1.mp4": b"1"})
    listed = find_videos([], listed=[tmp_path / "x.tar", tmp_path / "d" / "y.z.tar"])
    assert [video.key for video in listed] == [f"{tmp_path}/x/0"[1:], f"{tmp_path}/d/y.z/a/1"[1:]]
    assert [video.key for video in find_videos([tmp_path / "**" / "*.tar"])] == ["d/y.z/a/1", "x/0"]


def test_names_in_an_archive_that_are_no_text(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"\udcff.mp4": b"odd"}, tarfile.GNU_FORMAT)
    (video,) = find_videos([tmp_path / "x.tar"])
    assert isinstance(video.path, Blob) and read(video.path) == b"odd"
    assert (video.path.member, video.key) == ("\udcff.mp4", "x/\udcff")


def test_archives_in_a_folder(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"0.mp4": b"0"})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "v.mp4").touch()
    write_tar(tmp_path / "d" / "y.tar", {"a/1.mp4": b"1"})
    write_tar(tmp_path / "d" / "no videos.tar", {"a.txt": b""})
    said: list[str] = []
    found = find_videos([tmp_path], on_error=lambda error: said.append(str(error)))
    assert ([video.key for video in found], said) == (["d/v", "d/y/a/1", "x/0"], [])
    (tmp_path / "broken.tar").write_bytes(b"no archive" * 99)
    assert len(find_videos([tmp_path], on_error=lambda error: said.append(str(error)))) == 3
    assert [line.split(": ")[0] for line in said] == [str(tmp_path / "broken.tar")]
