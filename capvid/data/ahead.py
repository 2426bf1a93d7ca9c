"""Reading ahead: the next batches are put together while the present one is learned from."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

THREADS = 2
AHEAD = 4

_T = TypeVar("_T")


def read_ahead(
    jobs: Iterable[Callable[[], _T]], *, threads: int = THREADS, ahead: int = AHEAD
) -> Iterator[_T]:
    """What the jobs give, in their order; up to ``ahead`` of them are done before they are asked for.

    Args:
        jobs: drawn from in a thread of their own, one after another.
        threads: that do them.
        ahead: results that wait at most.

    Raises:
        Exception: whatever a job raises, when its turn comes.
    """
    found: queue.Queue[Future[_T] | None] = queue.Queue(ahead)
    stopped = threading.Event()
    drawing: Future[None] = Future()

    def draw() -> None:
        try:
            for job in jobs:
                _put(found, pool.submit(job), stopped)
                if stopped.is_set():
                    break
            drawing.set_result(None)
        except BaseException as error:
            drawing.set_exception(error)
        _put(found, None, stopped)

    # One thread to a job: the processor's others belong to the step that goes on meanwhile. At the first
    # question a thread takes over the number that was set last, so this one settles its own before.
    torch.set_num_threads(torch.get_num_threads())
    pool = ThreadPoolExecutor(threads, "read-ahead", initializer=torch.set_num_threads, initargs=(1,))
    drawer = threading.Thread(target=draw, name="draw-ahead", daemon=True)
    drawer.start()
    try:
        while (future := found.get()) is not None:
            yield future.result()
        drawing.result()
    finally:
        stopped.set()
        drawer.join()
        pool.shutdown(cancel_futures=True)


def _put(found: queue.Queue[_T], item: _T, stopped: threading.Event) -> None:
    """Wait for room, unless nobody takes anything any more."""
    while not stopped.is_set():
        try:
            found.put(item, timeout=0.05)
        except queue.Full:
            continue
        return
