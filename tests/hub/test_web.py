from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from weights_server import WeightsServer

from capvid.hub.web import download

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def server() -> Iterator[WeightsServer]:
    started = WeightsServer()
    started.files["a.bin"] = CONTENT
    yield started
    started.close()


def test_a_file_comes_as_it_is(server: WeightsServer) -> None:
    assert download(f"{server.url}/a.bin", seconds=10, max_bytes=len(CONTENT)) == CONTENT


def test_what_is_not_there_or_too_large_or_cut_short(server: WeightsServer) -> None:
    with pytest.raises(OSError, match="HTTP Error 404"):
        download(f"{server.url}/b.bin", seconds=10, max_bytes=10)
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        download(f"{server.url}/a.bin", seconds=10, max_bytes=1000)
    server.fault = "cut"
    with pytest.raises(OSError, match="128000 bytes came of 256000"):
        download(f"{server.url}/a.bin", seconds=10, max_bytes=len(CONTENT))
    server.fault = "endless"
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        download(f"{server.url}/a.bin", seconds=10, max_bytes=1000)


def test_no_server() -> None:
    with pytest.raises(OSError, match="refused"):
        download("http://127.0.0.1:9/a.bin", seconds=10, max_bytes=10)


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_the_time_is_limited_however_slowly_it_comes(server: WeightsServer, fault: str) -> None:
    server.fault = fault
    begun = time.monotonic()
    with pytest.raises(OSError, match=r"not complete within 0\.5 seconds"):
        download(f"{server.url}/a.bin", seconds=0.5, max_bytes=len(CONTENT))
    assert time.monotonic() - begun < 5
