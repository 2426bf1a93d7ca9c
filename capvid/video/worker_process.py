"""The other side of :mod:`capvid.video.worker_pool`: a process that calls functions until its parent is gone.

It imports no more than the functions need, and no deep learning library. A message is its length in eight
bytes and a pickle. An answer says whether it is a result or an error and whether memory ran out; its arrays
go through the shared file, if there is one, behind each other.
"""

from __future__ import annotations

import os
import pickle
import queue
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from capvid.errors import CapvidError, RemoteError
from capvid.utils.device import keep_freed_memory
from capvid.utils.limits import limits

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

LENGTH = struct.Struct("<Q")
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def main() -> None:
    """Answer the calls that come on stdin, on what stdout was when the process began."""
    _limit_memory(limits().worker_bytes)
    # numpy's threads, one for each core, would reserve address space and do nothing here
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    keep_freed_memory()
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # what a decoder prints is no answer
    if not os.environ.get("CAPVID_DEBUG"):
        os.dup2(null, 2)
    shared = int(sys.argv[1]) if sys.argv[1] else None
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, calls), daemon=True).start()
    while True:
        _answer(calls.get(), answers, shared)


def _limit_memory(max_bytes: int) -> None:
    """Limit this process's address space, so that a malicious file exhausts no more than that."""
    if resource is not None and max_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _listen(stream: IO[bytes], calls: queue.SimpleQueue[bytes]) -> None:
    """Hand on calls; when the parent is gone, end at once, even in the midst of decoding."""
    while message := receive(stream):
        calls.put(message)
    os._exit(0)


def _answer(message: bytes, answers: IO[bytes], shared: int | None) -> None:
    buffers: list[pickle.PickleBuffer] = []
    try:
        function, arguments = pickle.loads(message)
        answer = (True, function(*arguments), False)
        body = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
    except Exception as error:
        exhausted = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        body, parts = pickle.dumps((False, _portable(error), exhausted), protocol=5), []
    if shared is not None:
        _store(shared, parts)
    send(answers, pickle.dumps((body, [len(part) for part in parts])))
    if shared is None:
        for part in parts:
            answers.write(part)
    answers.flush()


def _portable(error: Exception) -> Exception:
    """The error itself if it can be pickled for certain, else one that says the same."""
    return error if isinstance(error, CapvidError) else RemoteError.of(error)


def _store(shared: int, parts: Sequence[memoryview]) -> None:
    """Write arrays behind each other from the file's start; it grows as needed, and keeps its size."""
    offset = 0
    for part in parts:
        done = 0
        while done < len(part):
            done += os.pwrite(shared, part[done:], offset + done)
        offset += len(part)


def send(stream: IO[bytes], message: bytes) -> None:
    """Write one message."""
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


def receive(stream: IO[bytes], max_bytes: int | None = None) -> bytes:
    """Read one message; empty when the other side is gone, or announces more than ``max_bytes``."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    size = LENGTH.unpack(head)[0]
    if max_bytes is not None and size > max_bytes:
        return b""
    message = stream.read(size)
    return message if len(message) == size else b""
