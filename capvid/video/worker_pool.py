"""Decoding processes, each of which can be killed and replaced without harm to the others.

A decoder may crash its process or never return, so it runs in a process of its own, which takes one call at a
time with a deadline. Arrays come back through a file in memory that has no name, so that nothing is left of
it when both sides are gone. The processes are plain children, started without ``multiprocessing``, which
would run the caller's main module again in each of them.
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
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from capvid.errors import UsageError
from capvid.utils.limits import limits
from capvid.video.worker_process import receive, send

if TYPE_CHECKING:
    from typing_extensions import Self


_T = TypeVar("_T")
_START = "import sys; sys.path[:] = sys.argv[2:]; from capvid.video.worker_process import main; main()"
_MAX_WORKERS = 1024
_CALLS = 1000  # after which a process is replaced: codecs leak a little
_KILLS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


class WorkerError(Exception):
    """A call without answer; the worker has been replaced."""


class WorkerTimeoutError(WorkerError):
    """The deadline passed."""


class WorkerDiedError(WorkerError):
    """The process ended.

    Attributes:
        code: its exit status, or minus the signal that ended it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    @property
    def crashed(self) -> bool:
        """Whether it ended by a fault of its own, such as a segmentation fault, not by a kill."""
        return self.code != 0 and str(self) not in _KILLS

    def __str__(self) -> str:
        with suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"exit status {self.code}"


class Worker:
    """One process, started at the first call. Not for several threads, except :meth:`close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: int | None = None
        self._calls = 0
        self._closed = False
        self._lock = threading.Lock()  # while the process is started or taken away

    def call(self, function: Callable[..., _T], *arguments: Any, timeout: float | None = None) -> _T:
        """Call an importable function in the process; arguments and result must be picklable.

        Args:
            function: the function.
            arguments: its arguments.
            timeout: seconds after which the process is killed; None sets no limit.

        Raises:
            WorkerTimeoutError: no answer in time.
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
            self._discard()  # the rest of the answer would be taken for the next one
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
        """Send the call to the process, to a new one if it died while it was idle."""
        self._calls += 1
        if self._calls % _CALLS == 0:
            self._discard()
        for _ in range(2):
            process = self._started()
            try:
                send(cast(IO[bytes], process.stdin), message)
                return process
            except OSError:
                self._discard()
        raise WorkerDiedError(process.returncode)

    def _receive(self, process: subprocess.Popen[bytes]) -> tuple[bool, Any, bool] | None:
        """Return success, result and whether memory ran out; None if the process ended."""
        max_bytes = limits().worker_bytes or None
        stream = cast(IO[bytes], process.stdout)
        try:
            message = receive(stream, max_bytes)
            if not message:
                return None
            body, sizes = pickle.loads(message)
            if max_bytes is not None and sum(sizes) > max_bytes:
                return None
            buffers, offset = [bytearray(size) for size in sizes], 0
            for buffer in buffers:
                with memoryview(buffer) as view:
                    done = 0
                    while done < len(view):
                        if self._shared is None:
                            count = stream.readinto(view[done:])  # type: ignore[attr-defined]
                        else:
                            count = os.preadv(self._shared, [view[done:]], offset + done)
                        if not count:
                            return None
                        done += count
                offset += len(buffer)
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
        """End the process in whatever state and forget it."""
        with self._lock:
            process, shared = self._process, self._shared
            self._process = self._shared = None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError, ValueError):
                    cast(IO[bytes], pipe).close()
        if shared is not None:
            os.close(shared)

    def close(self) -> None:
        """End the process at once, from any thread; a call in progress ends with WorkerDiedError."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()


def _memory_file() -> int | None:
    """Open a file in memory without a name; None where children cannot inherit one."""
    if os.name != "posix":
        return None
    if hasattr(os, "memfd_create"):
        return os.memfd_create("capvid-frames", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class WorkerPool:
    """Pool of workers that take calls in the order of submission.

    Args:
        workers: number of processes.
        timeout: seconds per call; None sets no limit.

    Raises:
        UsageError: the number or the timeout is out of range.
    """

    def __init__(self, workers: int, *, timeout: float | None = None) -> None:
        if not 1 <= workers <= _MAX_WORKERS:
            raise UsageError(f"workers must be between 1 and {_MAX_WORKERS}, got {workers:g}")
        if timeout is not None and not timeout >= 0:
            raise UsageError(f"timeout must be a positive number of seconds, got {timeout}")
        limits()  # an invalid limit fails here and not in every process
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
        """End all processes at once; calls in progress and pending ones fail. May be called twice."""
        for worker in self._workers:
            worker.close()
            self._calls.put(None)

    def __enter__(self) -> Self:
        """Return the pool itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the pool."""
        self.close()
