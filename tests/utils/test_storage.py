from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import ClassVar

import fsspec
import numpy as np
import pytest

from capvid.errors import UsageError
from capvid.utils import storage
from capvid.utils.storage import (
    Blob,
    Storage,
    StorageError,
    local_copy,
    parse_path,
    read_bytes,
    read_range,
    with_retries,
)

DATA = np.random.default_rng(0).bytes(10_000)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    waited: list[float] = []
    monkeypatch.setattr("capvid.utils.storage.time.sleep", waited.append)
    return waited


def test_what_a_text_names() -> None:
    assert parse_path("a/b.mp4") == Path("a/b.mp4")
    assert parse_path("file:///a/b%20c.mp4") == Path("/a/b c.mp4")
    assert parse_path("FILE://localhost/a") == Path("/a")
    assert parse_path("C://x") == Path("C://x")
    assert parse_path("s3://b/a.mp4") == Blob("s3://b/a.mp4")
    assert parse_path(Blob("s3://b/a.mp4")) == Blob("s3://b/a.mp4")


@pytest.mark.parametrize(
    ("url", "inner"),
    [
        ("s3://b/x/take #1?.mp4", "/x/take #1?.mp4"),
        ("s3://b/100%25.mp4", "/100%25.mp4"),
        ("https://h/x/a%20b.mp4?token=c/d.mkv#t=3", "/x/a b.mp4"),
        ("https://[::1]:80/a.mp4", "/a.mp4"),
        ("https://[broken/a.mp4", "/a.mp4"),
        ("memory://videos/é 'q'.MP4", "/é 'q'.MP4"),
    ],
)
def test_the_path_at_an_address(url: str, inner: str) -> None:
    blob = Blob(url)
    assert (blob.inner, os.fspath(blob)) == (PurePosixPath(inner), url)
    assert (blob.name, blob.stem, blob.suffix) == (
        PurePosixPath(inner).name,
        PurePosixPath(inner).stem,
        PurePosixPath(inner).suffix,
    )


def test_a_member_is_shown_below_its_archive() -> None:
    blob = Blob("s3://b/a.tar", "x/y.mkv", 512, 7)
    assert (str(blob), blob.name, blob.suffix) == ("s3://b/a.tar/x/y.mkv", "y.mkv", ".mkv")


def test_what_fails_now_and_then_is_done_again(pauses: list[float]) -> None:
    tries = []

    def action() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise OSError("broken off")
        return "done"

    assert with_retries("s3://b/x", "read", action) == "done"
    assert (len(tries), pauses) == (4, [0.2, 0.4, 0.8])


def test_what_fails_for_good(pauses: list[float]) -> None:
    tries = []

    def action() -> None:
        tries.append(1)
        raise OSError("broken off")

    with pytest.raises(StorageError, match=r"s3://b/x: cannot be read \(broken off\); see the address"):
        with_retries("s3://b/x", "read", action)
    assert len(tries) == 6 and sum(pauses) == pytest.approx(6.2)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PermissionError(13, "Forbidden"), StorageError),
        (NotImplementedError(), StorageError),
        (FileNotFoundError("x"), FileNotFoundError),
        (UsageError("no"), UsageError),
    ],
)
def test_what_there_is_no_use_in_repeating(error: Exception, raised: type, pauses: list[float]) -> None:
    tries = []

    def action() -> None:
        tries.append(1)
        raise error

    with pytest.raises(raised):
        with_retries("s3://b/x", "read", action)
    assert (len(tries), pauses) == (1, [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the ftp library
@pytest.mark.parametrize("url", ["nonsense://x/y", "ftp://"])
def test_protocols_that_there_are_not(url: str) -> None:
    with pytest.raises(UsageError, match="is no address that can be read; use s3://"):
        read_bytes(url)


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*arguments: object, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    storage.filesystem.cache_clear()
    monkeypatch.setattr("fsspec.filesystem", lacking)
    try:
        with pytest.raises(UsageError, match=r"s3:// needs .*; pip install 'capvid\[remote\]'"):
            read_bytes("s3://b/x")
    finally:
        storage.filesystem.cache_clear()


@pytest.mark.parametrize("block", [1, 999, 5000, 10_000, 20_000])
def test_bytes_come_block_by_block(memory: None, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(storage, "_BLOCK", max(block, 50))
    fsspec.filesystem("memory").pipe("/b/x.bin", DATA)
    assert read_bytes("memory://b/x.bin") == DATA
    assert read_range("memory://b/x.bin", 17, 1234) == DATA[17:1234]
    with local_copy(Blob("memory://b/x.bin")) as file:
        assert file.read_bytes() == DATA
    with local_copy(Blob("memory://b/x.bin", "inner", 100, 5555)) as file:
        assert file.read_bytes() == DATA[100:5655]


def test_a_stream_that_breaks_off_goes_on_where_it_was(
    memory: None, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an object whose size nobody knows, what a retry skips is never read at once."""
    asked: list[int] = []

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size or 0)
            if len(asked) == 6:
                raise OSError("broken")
            return super().read(min(size or 0, 300))  # less than is asked for

    monkeypatch.setattr(storage, "_BLOCK", 1000)
    monkeypatch.setattr(storage, "size_of", lambda url, **_: None)
    fsspec.filesystem("memory").pipe_file("/videos/v", DATA)
    monkeypatch.setattr(fsspec.filesystem("memory"), "open", lambda *_: Stream(DATA))
    with local_copy(Blob("memory://videos/v")) as path:
        assert path.read_bytes() == DATA
    assert max(asked) <= 1000 and len(pauses) == 1


def test_nothing_and_less_than_was_asked_for(memory: None, pauses: list[float], tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe({"/b/empty": b"", "/b/x": DATA})
    assert read_bytes("memory://b/empty") == b""
    with pytest.raises(FileNotFoundError):
        read_bytes("memory://b/missing")
    with pytest.raises(FileNotFoundError), local_copy(Blob("memory://b/missing")):
        pass
    with pytest.raises(StorageError, match="5 bytes came of 10"):
        read_range("memory://b/x", 9_995, 10_005)
    (tmp_path / "x").write_bytes(DATA)
    assert read_range(str(tmp_path / "x"), 3, 9) == DATA[3:9]
    with pytest.raises(StorageError, match="is cut off"):
        read_range(str(tmp_path / "x"), 9_995, 10_005)


def test_copies_leave_nothing_behind(
    memory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fsspec.filesystem("memory").pipe("/b/x.mp4", DATA)
    with local_copy(Blob("memory://b/x.mp4")) as file:
        assert file.read_bytes() == DATA
        if Path("/proc/self/fd").exists():
            assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError), local_copy(Blob("memory://b/x.mp4", "m", 9_000, 5_000)):
        pass
    with pytest.raises(ValueError, match="mine"), local_copy(Blob("memory://b/x.mp4")):
        raise ValueError("mine")
    monkeypatch.setattr(Path, "exists", lambda path: False)  # a system without /proc
    with local_copy(Blob("memory://b/x.mp4")) as file:
        assert (file.parent, file.suffix, file.read_bytes()) == (tmp_path, ".mp4", DATA)
    assert list(tmp_path.iterdir()) == []
    with local_copy(tmp_path / "y") as same:
        assert same == tmp_path / "y"


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_a_folder_of_whole_files(memory: None, tmp_path: Path, kind: str) -> None:
    here = tmp_path / "a b"
    folder = Storage(
        {"path": str(here), "file": f"file://{tmp_path}/a%20b", "memory": "memory://out/a b"}[kind]
    )
    assert folder.names() == []
    folder.remove("x")
    for name, data in (("x", b"1"), ("é y", b""), ("x", DATA)):
        folder.write(name, data)
    assert folder.names() == ["x", "é y"]
    assert (folder.read("x"), folder.read("é y")) == (DATA, b"")
    with pytest.raises(FileNotFoundError):
        folder.read("z")
    folder.remove("x")
    assert folder.names() == ["é y"]
    assert (here / "é y").exists() is (kind != "memory")
    assert folder.local == (None if kind == "memory" else here)


def test_a_folder_that_cannot_be_written(tmp_path: Path, pauses: list[float]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Storage(tmp_path / "file").write("x", b"")
    with pytest.raises(StorageError, match="cannot be listed"):
        Storage(tmp_path / "file").names()


class _Web(BaseHTTPRequestHandler):
    """A server that knows no ranges, and answers by ``plan`` before it does what it is asked for."""

    plan: ClassVar[list[int]]
    asked: ClassVar[list[str]]
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        self.asked.append(self.command)
        status = self.plan.pop(0) if self.plan else 200 if self.path.startswith("/x.bin") else 404
        body = DATA if status == 200 else b""
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = _serve  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[tuple[str, type[_Web]]]:
    class Handler(_Web):
        plan: ClassVar[list[int]] = []
        asked: ClassVar[list[str]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    server.shutdown()
    server.server_close()


def test_a_web_server_that_knows_no_ranges(
    web: tuple[str, type[_Web]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_BLOCK", 3000)
    url, handler = web
    with local_copy(Blob(f"{url}/x.bin?a=1")) as file:
        assert file.read_bytes() == DATA
    assert handler.asked == ["GET"]  # what came whole is not asked for again
    assert read_range(f"{url}/x.bin", 0, 50) == DATA[:50]
    with pytest.raises(StorageError, match="does not send parts of a file; fetch the file first"):
        read_range(f"{url}/x.bin", 5, 50)
    assert read_bytes(f"{url}/x.bin") == DATA


def test_a_web_server_that_fails(web: tuple[str, type[_Web]], pauses: list[float]) -> None:
    url, handler = web
    handler.plan[:] = [503, 500, 503]
    assert read_bytes(f"{url}/x.bin") == DATA
    assert pauses == [0.2, 0.4, 0.8]
    with pytest.raises(FileNotFoundError):
        read_bytes(f"{url}/missing")
    assert len(pauses) == 3
    handler.plan[:] = [403]
    with pytest.raises(StorageError, match="403"):
        read_bytes(f"{url}/x.bin")
    assert len(pauses) == 3


def test_a_web_server_that_is_gone(pauses: list[float]) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Web)
    server.server_close()
    with pytest.raises(StorageError, match="cannot be read"):
        read_bytes(f"http://127.0.0.1:{server.server_port}/x.bin")
    assert len(pauses) == 5


def test_a_member_of_an_archive_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "x", "x.mp4")
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[:5000])
    with (
        pytest.raises(StorageError, match="is cut off"),
        local_copy(Blob(str(tmp_path / "a.tar"), "x.mp4", 512, len(DATA))),
    ):
        pass
