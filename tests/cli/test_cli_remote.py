"""Web servers that never finish, never answer, misstate sizes or redirect to other protocols."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from toy import Run, Toy

from capvid.errors import VideoError
from capvid.utils.storage import Blob, Deadline, StorageError, fetch, local_copy
from capvid.video.input_lists import members

DATA = bytes(range(256)) * 40
BLOCK = b"x" * 65536


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stopped: threading.Event
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.headers.get("Range", ""))
        self.close_connection = True
        getattr(self, "_" + self.path.split(".")[0].strip("/"))()

    def _head(self, status: int = 200, **headers: object) -> None:
        self.send_response_only(status)
        self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def _endless(self) -> None:
        """Send without end, but slowly enough that deadlines of a second pass before byte limits."""
        self._head()
        while not self.stopped.wait(0.001):
            self.wfile.write(BLOCK)

    def _chunked(self) -> None:
        self._head(Transfer_Encoding="chunked")
        while not self.stopped.wait(0.001):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(BLOCK), BLOCK))

    def _trickle(self) -> None:
        self._head(Content_Length=10**9)
        while not self.stopped.wait(0.05):
            self.wfile.write(b"x")

    def _silent(self) -> None:
        self.stopped.wait(20)

    def _redirect(self) -> None:
        self._head(302, Location="file:///etc/hostname", Content_Length=0)

    def _other_protocol(self) -> None:
        self._head(302, Location="ftp://host.invalid/x", Content_Length=0)

    def _circle(self) -> None:
        self._head(302, Location=self.path, Content_Length=0)

    def _promises(self) -> None:
        """Announce twice as many bytes as are sent."""
        self._head(Content_Length=len(DATA) * 2)
        self.wfile.write(DATA)

    def _understates(self) -> None:
        self._head(Content_Length=100)
        self.wfile.write(DATA)

    def _huge(self) -> None:
        self._head(Content_Length=10**15)

    def _breaks(self) -> None:
        """Stop after 4000 bytes, but honour range requests for the rest."""
        match = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        if match:
            self._head(
                206,
                Content_Length=len(DATA) - start,
                Content_Range=f"bytes {start}-{len(DATA) - 1}/{len(DATA)}",
            )
        else:
            self._head(Content_Length=len(DATA))
        self.wfile.write(DATA[start : start + 4000])

    def _wrong(self) -> None:
        """Send a range other than the requested one, without end."""
        self._head(206, Content_Range="bytes 7-99/100")
        while not self.stopped.is_set():
            self.wfile.write(BLOCK)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    class Handler(_Handler):
        stopped = threading.Event()
        requests: list[str] = []  # noqa: RUF012

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Handler.requests
    Handler.stopped.set()
    server.shutdown()
    server.server_close()


class _DiscardingFile(io.BytesIO):
    """Discards what is written and records the size of the largest block."""

    largest = 0

    def write(self, block: object) -> int:
        size = len(block)  # type: ignore[arg-type]
        self.largest = max(self.largest, size)
        return size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["endless", "chunked", "trickle", "silent"])
def test_endless_object_is_abandoned_at_the_deadline(server: tuple[str, list[str]], name: str) -> None:
    file, start = _DiscardingFile(), time.monotonic()
    with pytest.raises(StorageError, match=r"not fetched within 0.5 seconds; allow more with --timeout"):
        fetch(Blob(f"{server[0]}/{name}"), file, deadline=Deadline(0.5))
    assert time.monotonic() - start < 10
    assert file.largest < 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["endless", "chunked", "huge"])
def test_objects_above_the_byte_limit_are_refused(server: tuple[str, list[str]], name: str) -> None:
    with pytest.raises(StorageError, match="larger than the limit of 1000000 bytes"):
        fetch(Blob(f"{server[0]}/{name}"), _DiscardingFile(), max_bytes=10**6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["redirect", "other_protocol", "circle"])
def test_redirects_to_other_protocols_are_refused(server: tuple[str, list[str]], name: str) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        fetch(Blob(f"{server[0]}/{name}"), _DiscardingFile())


def test_wrong_content_lengths(server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capvid.utils.storage._PAUSE", 0.0)
    try:
        with local_copy(Blob(f"{server[0]}/understates")) as path:
            assert path.read_bytes() == DATA[:100]
    except StorageError as error:  # if the remaining bytes came in the same packet
        assert len(str(error)) < 400
    with pytest.raises(StorageError, match="does not send parts of a file"):
        fetch(Blob(f"{server[0]}/promises"), _DiscardingFile())
    assert len(server[1]) <= 3  # the object is not fetched again and again
    with pytest.raises(StorageError, match="sent another part"):
        fetch(Blob(f"{server[0]}/wrong", "member", 50, 10), _DiscardingFile())


def test_interrupted_download_resumes(server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capvid.utils.storage._PAUSE", 0.0)
    with local_copy(Blob(f"{server[0]}/breaks")) as path:
        assert path.read_bytes() == DATA
    assert server[1] == ["", "bytes=4000-", "bytes=8000-"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["endless", "trickle", "silent", "wrong"])
def test_endless_archive_is_abandoned(server: tuple[str, list[str]], name: str) -> None:
    with pytest.raises((StorageError, VideoError)):
        list(members(Blob(f"{server[0]}/{name}.tar"), timeout=0.5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["endless", "trickle", "silent"])
def test_endless_features_and_lists_are_abandoned(
    capvid: Run, toy: Toy, server: tuple[str, list[str]], name: str
) -> None:
    features = f"{server[0]}/{name}.safetensors"
    code, out, err = capvid("caption", features, "--model", toy.model, "--timeout", 1)
    assert (code, out) == (1, "")
    assert err == f"error: {features}: not fetched within 1 seconds; allow more with --timeout\n"
    list_url = f"{server[0]}/{name}.txt"
    code, out, err = capvid("caption", "--from-file", list_url, "--model", toy.model, "--timeout", 1)
    assert (code, out) == (1, "")
    assert (
        err.splitlines()[0] == f"error: {list_url}: not fetched within 1 seconds; allow more with --timeout"
    )


def test_endless_video_is_abandoned(capvid: Run, toy: Toy, server: tuple[str, list[str]]) -> None:
    url = f"{server[0]}/trickle.mp4"
    code, out, err = capvid("caption", url, "--model", toy.model, "--timeout", 2)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {url}: not decoded within 2 seconds")


def test_byte_limits_of_features_and_lists(
    capvid: Run, toy: Toy, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPVID_LIMIT_FEATURE_BYTES", "1e6")
    monkeypatch.setenv("CAPVID_LIMIT_LIST_BYTES", "1e6")
    for arguments in (["endless.safetensors"], ["--from-file", "endless.txt"]):
        arguments = [*arguments[:-1], f"{server[0]}/{arguments[-1]}"]
        code, _, err = capvid("caption", *arguments, "--model", toy.model)
        assert code == 1 and "larger than the limit of 1000000 bytes" in err.splitlines()[0]
