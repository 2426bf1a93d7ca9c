from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from capvid.utils.files import atomic_path, atomic_write_text, remove_leftovers, sha256_file


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


def test_leftovers_of_the_dead_go_and_those_of_others_stay(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from capvid.utils.files import atomic_path
with atomic_path(sys.argv[1]) as path:
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "in" / "a.safetensors")], check=False)
    (left,) = (tmp_path / "in").iterdir()
    others = [tmp_path / ".mine.tmp", tmp_path / f".a.0123abcd-{left.name.split('-')[1]}-01234567.tmp"]
    for path in others:
        path.touch()
    with atomic_path(tmp_path / "b") as path:
        path.touch()
        remove_leftovers([tmp_path / "in" / "c", tmp_path / "d", tmp_path / "none" / "e"])
        assert path.exists() and not left.exists() and all(other.exists() for other in others)
