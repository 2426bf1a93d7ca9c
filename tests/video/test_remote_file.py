"""Of a large remote MP4, only what the chosen frames need is fetched, and the frames are the same."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from make_video import numbers, write_numbers

from capvid.errors import VideoError
from capvid.features.prefetch import local_file
from capvid.utils.storage import Blob
from capvid.video import probe, remote_file
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import open_video, read_frames


class Server(ThreadingHTTPServer):
    """Serves one folder, with or without ranges, and counts the bytes that it sends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.ranges, self.sent, self.broken = folder, True, 0, False

    def blob(self, name: str) -> Blob:
        return Blob(f"http://127.0.0.1:{self.server_port}/{name}")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path = self.server.folder / self.path.lstrip("/")
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = 0, size
        if match and self.server.ranges:
            start, stop = int(match[1]), min(int(match[2] or stop - 1) + 1, stop)
        if self.server.broken and start > 0:
            self.send_error(403)
            return
        self.send_response_only(206 if match and self.server.ranges else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            self.wfile.write(file.read(stop - start))
        self.server.sent += stop - start

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for module, name in ((remote_file, "MIN_BYTES"), (probe, "_MIN_INDEXED"), (remote_file, "_BLOCK")):
        monkeypatch.setattr(module, name, 4096)
    with Server(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["faststart", ""])
def test_only_the_ranges_needed_are_fetched(server: Server, tmp_path: Path, flags: str) -> None:
    container = {"movflags": flags} if flags else {}
    path = write_numbers(tmp_path / "v.mp4", noise=200, frames=900, bits=10, container=container)
    whole = read_frames(path, UniformSampling(4))
    with local_file(server.blob("v.mp4"), ranges=True) as file:
        sampled = read_frames(file, UniformSampling(4))
    assert (sampled.frames == whole.frames).all() and (sampled.times == whole.times).all()
    assert server.sent < path.stat().st_size / 2  # FFmpeg reads the first five seconds


def test_all_frames_of_a_remote_file(server: Server, tmp_path: Path) -> None:
    write_numbers(tmp_path / "v.mp4", noise=60, frames=120)
    with local_file(server.blob("v.mp4"), ranges=True) as file, open_video(file) as source:
        assert numbers(source.read(range(120))) == list(range(120))


def test_damage_is_found_in_a_remote_file(server: Server, tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "v.mp4", noise=60, container={"movflags": "faststart"})
    content = bytearray(path.read_bytes())
    start, end = len(content) // 2, len(content) * 6 // 10
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    with local_file(server.blob("v.mp4"), ranges=True) as file:
        sampled = read_frames(file, UniformSampling(120))
    assert numbers(sampled.frames) == np.round(sampled.times * 25).tolist()
    assert sampled.info.lost > 0


@pytest.mark.parametrize("name", ["v.mkv", "parts.mp4", "v.mp4"])
def test_other_files_are_fetched_as_a_whole(server: Server, tmp_path: Path, name: str) -> None:
    server.ranges = name != "v.mp4"
    container = {"movflags": "frag_keyframe+empty_moov"} if name == "parts.mp4" else {}
    path = write_numbers(tmp_path / name, noise=60, container=container)
    with local_file(server.blob(name), ranges=True) as file:
        assert file.read_bytes() == path.read_bytes()
        assert numbers(read_frames(file, UniformSampling(3)).frames) == [20, 60, 100]


def test_a_request_that_fails_is_the_error_of_the_input(server: Server, tmp_path: Path) -> None:
    write_numbers(tmp_path / "v.mp4", noise=200, frames=300, bits=10, container={"movflags": "faststart"})
    blob = server.blob("v.mp4")
    with (
        pytest.raises(VideoError, match=re.escape(f"{blob}")),
        local_file(blob, ranges=True) as file,
        open_video(file) as source,
    ):
        server.broken = True
        source.read([299])
