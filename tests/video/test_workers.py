from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import calls
import numpy as np
import pytest

from capvid.errors import TruncatedVideoError
from capvid.video import worker_pool as module
from capvid.video.frame_sampling import UniformSampling
from capvid.video.worker_pool import Worker, WorkerDiedError, WorkerPool


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, within: float = 10) -> bool:
    end = time.monotonic() + within
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.mark.parametrize("shared", [True, False])
def test_arrays_come_back_whole(worker: Worker, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shared:  # as where children cannot be given a file
        monkeypatch.setattr(module, "_INHERITS_FILES", False)
    pids = set()
    for count, size in ((3, 5), (2, 3_000_000), (0, 1), (4, 70_000)):
        found = worker.call(calls.arrays, count, size)
        assert [array.tolist() for array in found["many"]] == [[n] * size for n in range(count)]
        assert found["empty"].shape == (0, 3)
        pids.add(found["pid"])
    assert len(pids) == 1 and os.getpid() not in pids
    kept = worker.call(calls.arrays, 1, 10)["many"][0]
    worker.call(calls.arrays, 3, 10)
    kept += 1  # an answer is the caller's own: later ones do not write into it, and it can be written to
    assert (kept == np.ones(10)).all()


def test_errors_come_back(worker: Worker) -> None:
    with pytest.raises(TruncatedVideoError) as found:
        worker.call(calls.fail)
    assert str(found.value) == "a b.mp4: ends too early; get it again"
    assert found.value.path == Path("a b.mp4")
    with pytest.raises(RuntimeError, match=r"^KeyError: .something of a decoder"):
        worker.call(calls.stumble)
    assert worker.call(calls.pid) == worker.call(calls.pid)


def test_what_a_decoder_prints_goes_nowhere(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    assert worker.call(calls.chatter) == "said"
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "code", "crashed"),
    [
        ((calls.crash,), -signal.SIGSEGV, True),
        ((calls.die, signal.SIGABRT), -signal.SIGABRT, True),
        ((calls.die, signal.SIGKILL), -signal.SIGKILL, False),
        ((calls.leave,), 7, True),
    ],
)
def test_a_process_that_dies_is_replaced(worker: Worker, call: tuple, code: int, crashed: bool) -> None:
    before = worker.call(calls.pid)
    with pytest.raises(WorkerDiedError) as died:
        worker.call(*call)
    assert (died.value.code, died.value.crashed) == (code, crashed)
    assert str(died.value) == (f"exit status {code}" if code > 0 else signal.Signals(-code).name)
    assert worker.call(calls.pid) != before
    assert gone(before)


def test_one_that_was_killed_while_idle_costs_no_call(worker: Worker) -> None:
    before = worker.call(calls.pid)
    os.kill(before, signal.SIGKILL)
    process = worker._process
    assert process is not None
    process.wait(20)
    assert worker.call(calls.pid) != before


def test_the_deadline(worker: Worker, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    before = worker.call(calls.pid)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        worker.call(calls.announce_and_sleep, str(note), timeout=1.5)
    assert time.monotonic() - start < 20
    assert int(note.read_text()) == before and gone(before)
    assert worker.call(calls.pid, timeout=20) > 0


def test_a_process_does_not_live_for_ever(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CALLS", 3)
    pids = [worker.call(calls.pid) for _ in range(6)]
    assert len(set(pids)) == 3 and pids[0] == pids[1] and pids[2] == pids[4]


def test_workers_import_no_deep_learning(worker: Worker) -> None:
    from capvid.features.prefetch import decode_video

    with pytest.raises(Exception, match="no such file"):
        worker.call(decode_video, Path("none.mp4"), UniformSampling(3), [], "auto")
    assert not {"torch", "transformers", "timm"} & set(worker.call(calls.modules))


@pytest.mark.slow
def test_a_pool_works_on_several_calls_at_once_and_survives_their_ends(tmp_path: Path) -> None:
    with WorkerPool(2, timeout=10) as pool:
        hanging = pool.submit(calls.announce_and_sleep, str(tmp_path / "pid"))
        futures = [pool.submit(calls.arrays, 1, 10) for _ in range(20)]
        assert len({future.result()["pid"] for future in futures}) == 1  # the other one hangs
        with pytest.raises(TimeoutError):
            hanging.result()
        pids = [worker._process.pid for worker in pool._workers if worker._process]
    assert pids and all(map(gone, pids))


def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    pool = WorkerPool(1)
    hanging, waiting = (pool.submit(calls.announce_and_sleep, str(tmp_path / name)) for name in "ab")
    while not (tmp_path / "a").exists() or not (tmp_path / "a").read_text():
        time.sleep(0.01)
    pool.close()
    pool.close()
    for future in (hanging, waiting):
        with pytest.raises(WorkerDiedError):
            future.result(20)
    assert gone(int((tmp_path / "a").read_text()))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_parent(tmp_path: Path, how: int) -> None:
    """Nor does a script need a main guard, nor may a module beside it hide one of the library's."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    script = tmp_path / "it's a script.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys
            sys.path[0] = {str(Path(calls.__file__).parent)!r}
            import calls
            from capvid.video.worker_pool import WorkerPool
            pool = WorkerPool(1)
            pool.submit(calls.announce_and_sleep, sys.argv[1]).result()
        """),
        encoding="utf-8",
    )
    note = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, str(script), str(note)],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not note.exists() or not note.read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.send_signal(how)
    parent.wait(20)
    assert gone(int(note.read_text()))
