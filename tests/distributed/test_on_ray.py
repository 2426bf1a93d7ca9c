"""What of the engine on Ray needs no cluster."""

from __future__ import annotations

import io
import os
import socket
import sys

import pytest

pytest.importorskip("ray")

from capvid.distributed import ray_engine as on_ray
from capvid.distributed.ray_engine import _QuietStream, without_chatter
from capvid.errors import CapvidError, UsageError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("per_file", [1, 7, 10, 12, 100, 1000])
@pytest.mark.parametrize("videos", [1, 5, 63, 64, 1000])
def test_blocks_fill_shards(per_file: int, videos: int) -> None:
    size = on_ray._block_size(videos, cpus=2, per_file=per_file)
    assert per_file % size == 0
    assert 1 <= size <= max(1, min(8, videos // 8))
    if per_file % 8 == 0 and videos >= 64:
        assert size == 8


def test_gpus_are_used_where_there_are_some() -> None:
    with_two = {"CPU": 7.0, "GPU": 2.0}
    assert on_ray._processors(with_two, gpu=None) == (7, 2)
    assert on_ray._processors(with_two, gpu=False) == (7, 0)
    assert on_ray._processors({}, gpu=None) == (1, 0)
    with pytest.raises(UsageError, match="no GPU"):
        on_ray._processors({"CPU": 4.0}, gpu=True)


def test_what_failed_is_found_below_rays_errors() -> None:
    class WrapperError(Exception):
        def __init__(self, cause: BaseException) -> None:
            super().__init__("trace\n\n of many lines")
            self.cause = cause

    below = UsageError("no room", remedy="make some")
    assert on_ray._cause(WrapperError(WrapperError(below))) is below
    try:
        raise WrapperError(ValueError("odd")) from None
    except WrapperError as error:
        found = on_ray._cause(error)
    assert type(found) is CapvidError and "of many lines" in str(found)
    died = RuntimeError("The actor died.\n  File x\ncapvid.errors.UsageError: /out: is another; give one\n")
    assert str(on_ray._cause(died)) == "/out: is another; give one"


def test_nobody_waits_for_a_cluster_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        on_ray._knock(f"127.0.0.1:{port}")
        on_ray._knock(f"ray://127.0.0.1:{port}")
    with pytest.raises(OSError):
        on_ray._knock(f"127.0.0.1:{port}")
    on_ray._knock("auto")


def test_no_inputs_begin_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "begin_ray", lambda address: pytest.fail("Ray was begun"))
    assert list(on_ray.run_on_ray(None, None, iter([]), per_file=1, timeout=None)) == []


def test_lines_of_ray_are_passed_over() -> None:
    file = io.BytesIO()
    stream = _QuietStream(file, encoding="utf-8", write_through=True)
    print("one", file=stream)
    print("\x1b[33m(raylet)\x1b[0m Task failed.", file=stream)
    print("(raylet, ip=10.0.0.1) WARNING: workers", file=stream)
    print("two\n\nthree", file=stream)
    assert file.getvalue() == b"one\ntwo\n\nthree\n"


def test_what_is_written_to_the_file_of_stderr_is_not_seen(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stderr
    with without_chatter():
        os.write(2, b"from the core\n")
        print("from Python", file=sys.stderr)
    assert sys.stderr is before
    os.write(2, b"after\n")
    said = capfd.readouterr().err
    assert "from the core" not in said and "after" in said


def test_debugging_shows_everything(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPVID_DEBUG", "1")
    with without_chatter():
        os.write(2, b"from the core\n")
    assert "from the core" in capfd.readouterr().err
