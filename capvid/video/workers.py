"""Processes that decode: each can be killed, and is replaced, without harm to the others.

A decoder may crash the process it runs in, or never come back. So it runs in a process of its own, which
takes one call at a time and has a deadline for it. Arrays come back through a file in memory that has no
name: nothing is left of it when both sides are gone, however they went. The processes are plain children,
started without ``multiprocessing``, which would run the caller's main module again in each of them.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from capvid.errors import UsageError
from capvid.limits import limits
from capvid.video.worker import receive, send

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
_START = "import sys; sys.path[:] = sys.argv[2:]; from capvid.video.worker import main; main()"
_MAX_WORKERS = 1024
_CALLS = 1000  # after which a process is replaced: codecs leak, a little


class WorkerError(Exception):
    """A call to which no answer came; the worker has been replaced."""


class WorkerTimeoutError(WorkerError):
    """The deadline passed."""


class WorkerDiedError(WorkerError):
    """The process ended.

    Attributes:
        code: its exit status; minus the signal that ended it, if one did.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    @property
    def crashed(self) -> bool:
        """Whether it ended by a fault of its own, such as a segmentation fault, and not by a kill."""
        return self.code != 0 and -self.code not in _KILLS

    def __str__(self) -> str:
        with suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"exit status {self.code}"


_KILLS = {
    number for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if (number := getattr(signal, name, None))
}


class Worker:
    """One process, started at the first call. Not for several threads, except :meth:`close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: int | None = None
        self._calls = 0
        self._closed = False
        self._lock = threading.Lock()  # while the process is started or taken away

    def call(self, function: Callable[..., _T], *arguments: Any, timeout: float | None = None) -> _T:
        """Call a function, which must be importable, in the process.

        Args:
            function: what to call.
            arguments: for it; they and the result must be such as can be pickled.
            timeout: seconds after which the process is killed; None waits for ever.

        Raises:
            WorkerTimeoutError: there was no answer in time.
            WorkerDiedError: the process ended instead.
            CapvidError: that of the function.
            RemoteError: another error of the function.
        """
        message = pickle.dumps((function, arguments), protocol=5)
        process = self._send(message)
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        # a timer that is due after TIMEOUT_MAX (centuries) would fail
        timer = threading.Timer(min(timeout, threading.TIMEOUT_MAX), stop) if timeout else None
        if timer:
            timer.daemon = True
            timer.start()
        try:
            answer = self._receive(process)
        except BaseException:
            self._discard()  # what is left of the answer would be taken for the next one
            raise
        finally:
            if timer:
                timer.cancel()
        if answer is None:
            self._discard()
            raise WorkerTimeoutError if late.is_set() else WorkerDiedError(process.returncode)
        good, result, exhausted = answer
        if exhausted or late.is_set():  # memory is fragmented, or the answer and the deadline crossed
            self._discard()
        if not good:
            raise result
        return result

    def _send(self, message: bytes) -> subprocess.Popen[bytes]:
        """Give the call to the process; one that ended while it was idle costs nobody's file."""
        self._calls += 1
        if self._calls % _CALLS == 0:
            self._discard()
        for attempt in range(2):
            process = self._started()
            if process.stdin is None:
                raise WorkerDiedError(0)
            try:
                send(process.stdin, message)
                return process
            except OSError:
                self._discard()
                if attempt:
                    raise WorkerDiedError(process.returncode) from None
        raise WorkerDiedError(process.returncode)

    def _receive(self, process: subprocess.Popen[bytes]) -> tuple[bool, Any, bool] | None:
        """Return success, result and whether memory ran out; None if the process ended."""
        max_bytes = limits().worker_bytes or None
        stream = process.stdout
        try:
            message = receive(stream, max_bytes) if stream else b""
            if not message or stream is None:
                return None
            body, sizes = pickle.loads(message)
            if max_bytes is not None and sum(sizes) > max_bytes:
                return None
            buffers = []
            offset = 0
            for size in sizes:
                buffer = bytearray(size)
                if self._shared is not None:
                    _fill(buffer, self._shared, offset)
                elif len(part := stream.read(size)) == size:
                    buffer[:] = part
                else:
                    return None
                buffers.append(buffer)
                offset += size
            answer: tuple[bool, Any, bool] = pickle.loads(body, buffers=buffers)
            return answer
        except (OSError, ValueError, EOFError):  # closed from another thread, or cut off
            return None

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise WorkerDiedError(-signal.SIGTERM)
            if self._process is None:
                self._shared = _memory_file()
                passed = [] if self._shared is None else [str(self._shared)]
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, *(passed or [""]), *sys.path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=() if self._shared is None else (self._shared,),
                    start_new_session=True,  # Ctrl-C is for the parent alone
                )
            return self._process

    def _discard(self) -> None:
        """End the process, however it stands, and forget it."""
        with self._lock:
            process, shared = self._process, self._shared
            self._process = self._shared = None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError, ValueError):
                    if pipe:
                        pipe.close()
        if shared is not None:
            os.close(shared)

    def close(self) -> None:
        """End the process at once, from any thread; a call that is under way ends with WorkerDiedError."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()


def _memory_file() -> int | None:
    """A file in memory without a name; None where children cannot be given one."""
    if os.name != "posix":
        return None
    if hasattr(os, "memfd_create"):
        return os.memfd_create("capvid-frames", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _fill(buffer: bytearray, file: int, offset: int) -> None:
    view, done = memoryview(buffer), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            raise EOFError
        done += count
    view.release()


class WorkerPool:
    """Workers that take calls in the order in which they are submitted.

    Args:
        workers: their number.
        timeout: seconds that a call may take; None sets no limit.

    Raises:
        UsageError: there are none or too many workers, or the timeout is negative or NaN.
    """

    def __init__(self, workers: int, *, timeout: float | None = None) -> None:
        if not 1 <= workers <= _MAX_WORKERS:
            raise UsageError(f"workers must be between 1 and {_MAX_WORKERS}, got {workers:g}")
        if timeout is not None and not timeout >= 0:
            raise UsageError(f"timeout must be a positive number of seconds, got {timeout}")
        limits()  # a limit that is not understood fails here and not in every process
        self.size = workers
        self.timeout = timeout
        self._calls: queue.SimpleQueue[Callable[[Worker], None] | None] = queue.SimpleQueue()
        self._workers = [Worker() for _ in range(workers)]
        for number, worker in enumerate(self._workers):
            # daemons: neither a hanging decoder nor a forgotten pool keeps the interpreter from its end
            name = f"capvid-worker-{number}"
            threading.Thread(target=self._serve, args=(worker,), name=name, daemon=True).start()

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Call a function in one of the processes; the future raises what :meth:`Worker.call` raises."""
        future: Future[_T] = Future()

        def run(worker: Worker) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(worker.call(function, *arguments, timeout=self.timeout))
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(run)
        return future

    def _serve(self, worker: Worker) -> None:
        while (run := self._calls.get()) is not None:
            run(worker)
        worker.close()

    def close(self) -> None:
        """End all processes at once; may be called twice. Calls under way fail, as do those not begun."""
        for worker in self._workers:
            worker.close()
            self._calls.put(None)

    def __enter__(self) -> Self:
        """Give the pool itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the pool."""
        self.close()
