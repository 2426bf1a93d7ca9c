from __future__ import annotations

from pathlib import Path

import pytest

from capvid.errors import CapvidError
from capvid.video.inputs import find_videos


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
