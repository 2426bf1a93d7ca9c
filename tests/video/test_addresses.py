"""Videos at addresses."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest

from capvid.errors import VideoError
from capvid.utils.storage import Blob, parse_path
from capvid.video.input_set import find_videos, iter_videos, stands_for_many

ROOT = "memory://b/videos"
NAMES = [
    "a.mp4",
    'b c/it\'s "é".MKV',
    "b c/[1].mp4",
    "b c/take #1?.mp4",
    "100%25.mp4",
    ".hidden.mp4",
    ".git/x.mp4",
    "notes.txt",
    "deep/er/z.webm",
]


@pytest.fixture(autouse=True)
def objects() -> Iterator[None]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name in NAMES:
        system.pipe(f"/b/videos/{name}", name.encode())
    yield
    system.store.clear()


def found(*inputs: str, listed: tuple[str, ...] = (), recursive: bool = True) -> dict[str, str]:
    """Keys by addresses."""
    said: list[str] = []
    videos = find_videos(
        inputs, listed=listed, recursive=recursive, on_error=lambda error: said.append(str(error))
    )
    streamed = iter_videos(inputs, listed=listed, recursive=recursive, on_error=lambda error: None)
    assert [video.path for video in streamed] == [video.path for video in videos]
    return {str(video.path): video.key for video in videos} | ({"said": said[0]} if said else {})


def test_a_folder() -> None:
    expected = {
        f"{ROOT}/100%25.mp4": "100%25",
        f"{ROOT}/a.mp4": "a",
        f"{ROOT}/b c/[1].mp4": "b c/[1]",
        f'{ROOT}/b c/it\'s "é".MKV': 'b c/it\'s "é"',
        f"{ROOT}/b c/take #1?.mp4": "b c/take #1?",
        f"{ROOT}/deep/er/z.webm": "deep/er/z",
    }
    assert found(ROOT) == found(f"{ROOT}/") == expected
    assert found(ROOT, recursive=False) == {
        f"{ROOT}/100%25.mp4": "100%25",
        f"{ROOT}/a.mp4": "a",
    }
    assert found(listed=(ROOT,)) == {url: f"b/videos/{key}" for url, key in expected.items()}


def test_patterns() -> None:
    assert found(f"{ROOT}/*.mp4") == {f"{ROOT}/100%25.mp4": "100%25", f"{ROOT}/a.mp4": "a"}
    assert set(found(f"{ROOT}/**/[az].*")) == {f"{ROOT}/a.mp4", f"{ROOT}/deep/er/z.webm"}
    assert found(f"{ROOT}/deep/*/z.webm") == {f"{ROOT}/deep/er/z.webm": "er/z"}
    assert found(f"{ROOT}/*.mov") == {
        "said": f"{ROOT}/*.mov: no video matches it as a pattern; check the path; hidden files are skipped"
    }


def test_a_file_whose_name_looks_like_a_pattern() -> None:
    url = f"{ROOT}/b c/[1].mp4"
    assert found(url) == {url: "[1]"}
    assert found(listed=(url,)) == {url: "b/videos/b c/[1]"}
    assert not stands_for_many(parse_path(f"{ROOT}/b c/take #1?.mp4"))


def test_files_are_taken_as_they_are() -> None:
    assert found(f"{ROOT}/a.mp4", f"{ROOT}/gone.mp4") == {f"{ROOT}/a.mp4": "a", f"{ROOT}/gone.mp4": "gone"}
    assert found(listed=(f"{ROOT}/*.mp4",)) == {
        f"{ROOT}/*.mp4": "b/videos/*"
    }  # in lists nothing is a pattern
    assert found(f"{ROOT}/gone") == {f"{ROOT}/gone": "gone"}


def test_web_addresses_are_files() -> None:
    """None of them is asked."""
    url = "https://host.invalid/x/a%20b.mp4?key=[c/d*e]"
    assert found(url) == {url: "a b"}
    assert found(listed=(url,)) == {url: "host.invalid/x/a b"}
    first, second = "https://host.invalid/watch?v=1", "https://host.invalid/watch?v=2"
    assert found(first, second) == {first: "watch", second: "watch-2"}


def test_what_cannot_be_had() -> None:
    assert "zip files must be on this machine" in found(f"{ROOT}/x.zip")["said"]
    fsspec.filesystem("memory").pipe("/b/empty/notes.txt", b"")
    assert found("memory://b/empty")["said"].startswith("memory://b/empty: no videos in this folder; ")
    assert found(f"{ROOT}/x.tar")["said"] == f"{ROOT}/x.tar: there is no such file"
    with pytest.raises(VideoError) as raised:
        find_videos([f"{ROOT}/*.mov"])
    assert raised.value.path == Blob(f"{ROOT}/*.mov")


@pytest.mark.parametrize(
    ("text", "many"),
    [
        ("https://h/a.mp4", False),
        ("https://h/a.mp4?x=*", False),
        ("https://h/watch?v=1", False),
        ("https://h/a.tar", True),
        ("s3://b/a.safetensors", False),
        ("s3://b/a.mp4", False),
        ("s3://b/*.mp4", True),
        ("s3://b/x", True),
        ("s3://b", True),
        ("a.mp4", False),
        ("a.tar", True),
        ("*.mp4", True),
    ],
)
def test_what_stands_for_many(text: str, many: bool) -> None:
    assert stands_for_many(parse_path(text)) is many
