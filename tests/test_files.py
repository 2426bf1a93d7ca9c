from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from capvid.files import atomic_path, atomic_write_text, sha256_file


def test_text_is_written_as_given_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "new" / "caption.txt"
    atomic_write_text(target, "ein Mädchen\nläuft\r\n")
    assert target.read_bytes() == "ein Mädchen\nläuft\r\n".encode()
    assert [item.name for item in target.parent.iterdir()] == ["caption.txt"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    with pytest.raises(ValueError, match="half way"), atomic_path(target) as temporary:
        temporary.write_text("new, but")
        assert target.read_text() == "old"
        raise ValueError("half way")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_temporary_file_is_hidden_and_in_the_same_folder(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "a.safetensors") as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".")
        assert temporary.suffix != ".safetensors"
        temporary.write_bytes(b"x")
    assert (tmp_path / "a.safetensors").read_bytes() == b"x"


def test_a_name_as_long_as_a_file_system_takes(tmp_path: Path) -> None:
    target = tmp_path / ("v" * 251 + ".txt")
    atomic_write_text(target, "a man sings\n")
    assert target.read_text() == "a man sings\n"


def test_sha256_of_a_file_of_several_blocks(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    path = tmp_path / "blob"
    path.write_bytes(content)
    assert sha256_file(path) == hashlib.sha256(content).hexdigest()
