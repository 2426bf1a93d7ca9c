from __future__ import annotations

import inspect
import io
import os
import sys
from pathlib import Path

import pytest

from capvid.errors import CapvidError
from capvid.video.input_lists import read_paths
from capvid.video.input_set import find_videos


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def keys(*inputs: Path, recursive: bool = True) -> list[str]:
    return [video.key for video in find_videos(inputs, recursive=recursive)]


def test_folders_are_searched_in_order(tmp_path: Path) -> None:
    touch(tmp_path, "b.MP4", "a.webm", "deep/er/c d'é.Avi", "notes.txt", ".hidden.mp4", ".git/x.mp4")
    assert keys(tmp_path) == ["a", "b", "deep/er/c d'é"]
    assert keys(tmp_path, recursive=False) == ["a", "b"]


def test_names_of_outputs_are_unique(tmp_path: Path) -> None:
    touch(tmp_path, "x/v.mp4", "y/v.mp4", "y/v.avi")
    assert keys(tmp_path) == ["x/v", "y/v.avi", "y/v.mp4"]
    both = keys(tmp_path / "x", tmp_path / "y")
    assert len(set(both)) == 3
    assert "v.avi" in both
    given = keys(tmp_path / "x" / "v.mp4", tmp_path / "y" / "v.mp4")
    assert given == ["x/v.mp4", "y/v.mp4"]


def test_each_video_once_and_missing_files_kept(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    (tmp_path / "again.mp4").symlink_to(tmp_path / "a.mp4")
    found = find_videos([tmp_path / "a.mp4", tmp_path, tmp_path / "gone.mp4"])
    assert [v.path.name for v in found] == ["a.mp4", "gone.mp4"]


def test_links_that_go_round(tmp_path: Path) -> None:
    touch(tmp_path, "sub/a.mp4")
    (tmp_path / "sub" / "up").symlink_to(tmp_path, target_is_directory=True)
    assert keys(tmp_path) == ["sub/a"]


def test_folder_without_videos(tmp_path: Path) -> None:
    touch(tmp_path, "sub/a.mp4", "b.txt")
    with pytest.raises(CapvidError, match="no videos in this folder itself"):
        find_videos([tmp_path], recursive=False)
    (tmp_path / "sub" / "a.mp4").unlink()
    with pytest.raises(CapvidError, match="no videos in this folder"):
        find_videos([tmp_path])


def failures(*inputs: Path, listed: tuple[Path, ...] = ()) -> tuple[list[str], list[str]]:
    """Keys of what is found, and what failed."""
    said: list[CapvidError] = []
    found = find_videos(inputs, listed=listed, on_error=said.append)
    return [video.key for video in found], [str(error) for error in said]


def test_a_folder_that_cannot_be_listed_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "a/1.mp4", "b/2.mp4", "c/3.mp4")
    listed = os.scandir

    def scandir(folder: Path) -> object:
        if folder == tmp_path / "b":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr("os.scandir", scandir)
    said = f"{tmp_path / 'b'}: cannot be listed (Permission denied); check its permissions"
    assert failures(tmp_path) == (["a/1", "c/3"], [said])
    assert failures(tmp_path / "b") == ([], [said])
    assert failures(tmp_path, tmp_path / "b") == (["a/1", "c/3"], [said])
    assert failures(tmp_path / "**" / "*.mp4") == (["a/1", "c/3"], [said])
    with pytest.raises(CapvidError, match="cannot be listed"):
        find_videos([tmp_path])


def test_folders_may_lie_deeper_in_each_other_than_functions(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * 150)
    touch(deep, "v.mp4")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        found = keys(tmp_path)
    finally:
        sys.setrecursionlimit(limit)
    assert found == ["d/" * 150 + "v"]


def test_links_to_folders_outside_are_followed_once(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.mp4", "out/b.mp4")
    for name in ("one", "two"):
        (tmp_path / "in" / name).symlink_to(tmp_path / "out", target_is_directory=True)
    (tmp_path / "in" / "circle").symlink_to("circle")
    (tmp_path / "in" / "back").symlink_to(tmp_path / "in", target_is_directory=True)
    assert keys(tmp_path / "in") == ["a", "one/b"]
    assert keys(tmp_path / "in" / "**" / "*.mp4") == ["a", "one/b"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.mp4", ["b", "z"]),
        ("?.MP4", ["c"]),
        ("**/*.mp4", ["b", "sub/b", "sub/e r/é [1]", "z"]),
        ("*/*.mp4", ["sub/b"]),
        ("sub/**", ["b", "e r/é [1]"]),
        ("*", ["b", "c", "sub/b", "sub/e r/é [1]", "z"]),
        ("[!z]*.mp4", ["b"]),
        ("s*/e?r/*.mp4", ["sub/e r/é [1]"]),
        ("sub/e r/é [1].mp4", ["é [1]"]),
        (".h*/*.mp4", [".hidden/h"]),
        ("*.data", ["raw"]),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    touch(tmp_path, "b.mp4", "c.MP4", "z.mp4", "notes.txt", "raw.data", ".dot.mp4", ".hidden/h.mp4")
    touch(tmp_path, "sub/b.mp4", "sub/e r/é [1].mp4")
    assert failures(tmp_path / pattern) == (expected, [])


@pytest.mark.parametrize("pattern", ["*.avi", "gone/**/*.mp4", "Title [id].mp4", "[", "a\0*"])
def test_a_pattern_without_matches_fails(tmp_path: Path, pattern: str) -> None:
    touch(tmp_path, "a.mp4")
    found, said = failures(tmp_path / pattern, tmp_path / "a.mp4")
    assert found == ["a"]
    assert said == [
        f"{tmp_path / pattern}: there is no such file, and no video matches it as a pattern; "
        "check the path; hidden files are skipped"
    ]


def test_the_keys_of_a_list_are_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a/v.mp4", "b/v.mp4", "b/w.mp4", "c[1].mp4")
    monkeypatch.chdir(tmp_path)
    listed = (Path("a/v.mp4"), Path("b"), Path("c[1].mp4"), Path("[gone].mp4"), tmp_path / "a" / "v.mp4")
    assert failures(listed=listed) == (["a/v", "b/v", "b/w", "c[1]", "[gone]"], [])
    assert failures(listed=listed[1:2]) == (["b/v", "b/w"], [])  # whatever else is in it
    absolute = find_videos([], listed=[tmp_path / "a" / "v.mp4"])
    assert absolute[0].key == (tmp_path / "a" / "v").relative_to(tmp_path.anchor).as_posix()


def test_no_key_leads_out_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "in/v.mp4", "in/sub/v.mp4", "v.mp4", "in/...mp4", "in/..mp4")
    monkeypatch.chdir(tmp_path / "in")
    (tmp_path / "in" / "circle.mp4").symlink_to("circle.mp4")
    given = [Path(name) for name in ("../v.mp4", "..", "../in/../in/v.mp4", "nowhere/..", "sub/../..")]
    listed = [Path(name) for name in ("../in/../v.mp4", "../nowhere.mp4", ".", "sub/..", "..")]
    for inputs in ({"inputs": given}, {"inputs": [], "listed": listed}):
        found = find_videos(**inputs, on_error=[].append)
        assert len({video.key for video in found}) == len(found) >= 4
        for video in found:
            parts = f"{video.key}.json".split("/")
            assert not {"", ".", ".."} & set(parts), video


def test_keys_are_short_enough_for_file_systems(tmp_path: Path) -> None:
    names = ["é" * 125 + ".mp4", "é" * 125 + ".avi", "x" * 240]
    touch(tmp_path, *names[:2])
    found = keys(tmp_path, tmp_path / names[2], Path("y" * 6000), Path("/".join(["z" * 100] * 50)))
    assert len(set(found)) == 5
    for key in found:
        target = tmp_path / "out" / f"{key}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    assert keys(tmp_path)[0] == found[0]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a.mp4\nb c.mp4\n", ["a.mp4", "b c.mp4"]),
        (b"a.mp4\r\n\r\n  \n b'\"#.mp4 \r\n", ["a.mp4", " b'\"#.mp4 "]),
        (b"a\nb.mp4\0c.mp4\0", ["a\nb.mp4", "c.mp4"]),
        (b"\xff.mp4\n", ["\udcff.mp4"]),
        ("é.mp4".encode(), ["é.mp4"]),
        (b"\xef\xbb\xbfa.mp4\n", ["a.mp4"]),
        ("a.mp4\r\né.mp4\r\n".encode("utf-16"), ["a.mp4", "é.mp4"]),
        (b"", []),
        (b"\n\n", []),
    ],
)
def test_lists(data: bytes, expected: list[str]) -> None:
    assert list(read_paths(io.BytesIO(data))) == list(map(Path, expected))
