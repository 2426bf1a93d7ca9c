"""Threads that compute batches side by side.

Two networks that run side by side on one core each get more done than one on two cores: no core waits at
every layer for the other, or for one that decodes for a while. On CUDA each lane has a stream of its own, so
that one brings its batch over while the other computes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MOST = 8  # lanes of a processor; with more cores each has several


class Lanes:
    """A fixed number of threads of one device, each with its share of the processor's cores.

    Args:
        device: where is computed.
        threads: cores to share out.

    Attributes:
        count: how many lanes there are.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device
        self.count = {"cpu": min(threads, _MOST), "cuda": 2}.get(device.type, 1)
        self._threads = max(1, threads // self.count)
        self._local = threading.local()
        self._begun = threading.Barrier(self.count + 1)
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="capvid-lane")
        for _ in range(self.count):
            self._pool.submit(self._begin)
        self._begun.wait()
        torch.set_num_threads(torch.get_num_threads())  # the lanes' number is not that of other threads

    def _begin(self) -> None:
        torch.set_num_threads(self._threads)
        torch.get_num_threads()  # at the first question a thread takes over the number that was set last
        if self._device.type == "cuda":
            self._local.stream = torch.cuda.Stream(self._device)
        self._begun.wait()

    def submit(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Call the function in the next lane that is free."""
        return self._pool.submit(self._run, function, *args, **kwargs)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stream = getattr(self._local, "stream", None)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            return function(*args, **kwargs)


@functools.cache
def lanes(device: torch.device, threads: int) -> Lanes:
    """Give the lanes of a device, the same for all backbones on it."""
    return Lanes(device, threads)
