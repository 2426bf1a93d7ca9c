"""Decoding processes, each of which can be killed and replaced without harm to the others.

A decoder may crash its process or never return, so it runs in a process of its own, which takes one call at a
time with a deadline. The processes are plain children, started without ``multiprocessing``, which would run
the caller's main module again in each of them; they end with their parent.

A message is its length in eight bytes and a pickle. An answer says whether it is a result or an error and
whether memory ran out; its arrays come back behind each other, through a file in memory that has no name, so
that nothing is left of it when both sides are gone, or else through the pipe.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any, TypeVar, cast

from capvid.errors import CapvidError, RemoteError, UsageError
from capvid.utils.device import keep_freed_memory
from capvid.utils.validation import limits

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_T = TypeVar("_T")
_START = "import sys; sys.path[:] = sys.argv[2:]; from capvid.video.worker_pool import serve; serve()"
_LENGTH = struct.Struct("<Q")
_MAX_WORKERS = 1024
_CALLS = 1000  # after which a process is replaced: codecs leak a little
_KILLS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


class WorkerTimeoutError(Exception):
    """A call without answer within its deadline; the worker has been replaced."""


class WorkerDiedError(Exception):
    """A call without answer, since the process ended; it has been replaced."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code  # exit status, or minus the signal that ended it

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
        self._shared: int | None = None  # descriptor of the file in memory
        self._calls = 0
        self._closed = False
        self._lock = threading.Lock()  # while the process is started or taken away

    def call(self, function: Callable[..., _T], *arguments: Any, timeout: float | None = None) -> _T:
        """Call an importable function in the process, which is killed after ``timeout`` seconds.

        Arguments and result must be picklable.

        Raises:
            WorkerTimeoutError: no answer in time.
            WorkerDiedError: the process ended instead.
            CapvidError: that of the function.
            RemoteError: another error of the function.
        """
        process = self._send(pickle.dumps((function, arguments), protocol=5))
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        # a timer that is due after TIMEOUT_MAX (centuries) would fail
        timer = threading.Timer(min(timeout or 0, threading.TIMEOUT_MAX), stop)
        timer.daemon = True
        if timeout:
            timer.start()
        try:
            answer = self._receive(cast(IO[bytes], process.stdout))
        except BaseException:
            self.discard()  # the rest of the answer would be taken for the next one
            raise
        finally:
            timer.cancel()
        if answer is None:
            self.discard()
            raise WorkerTimeoutError if late.is_set() else WorkerDiedError(process.returncode)
        good, result, exhausted = answer
        if exhausted or late.is_set():  # memory is fragmented, or the answer and the deadline crossed
            self.discard()
        if not good:
            raise result
        return result

    def _send(self, message: bytes) -> subprocess.Popen[bytes]:
        """Send a call to the process, which is started if there is none, or if it died while it was idle."""
        self._calls += 1
        if self._calls % _CALLS == 0:
            self.discard()
        for _ in range(2):
            with self._lock:
                if self._closed:
                    raise WorkerDiedError(-signal.SIGTERM)
                if self._process is None:
                    self._shared = _open_memory_file()
                    passed = () if self._shared is None else (self._shared,)
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", _START, ",".join(map(str, passed)), *sys.path],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        pass_fds=passed,
                        start_new_session=True,  # Ctrl-C is for the parent alone
                    )
                process = self._process
            try:
                _write(cast(IO[bytes], process.stdin), message)
                return process
            except OSError:
                self.discard()
        raise WorkerDiedError(process.returncode)

    def _receive(self, stream: IO[bytes]) -> tuple[bool, Any, bool] | None:
        """Return success, result and whether memory ran out; None if the process ended."""
        max_bytes = limits().worker_bytes or None
        try:
            body, sizes = pickle.loads(_read(stream, max_bytes))
            if max_bytes is not None and sum(sizes) > max_bytes:
                return None
            buffers = [bytearray(size) for size in sizes]
            if self._shared is None:
                counts = [stream.readinto(buffer) for buffer in buffers]  # type: ignore[attr-defined]
            else:
                with os.fdopen(self._shared, "rb", closefd=False) as file:
                    file.seek(0)
                    counts = [file.readinto(buffer) for buffer in buffers]
            return pickle.loads(body, buffers=buffers) if counts == sizes else None
        except (OSError, ValueError, EOFError):  # cut off, too long, or closed from another thread
            return None

    def discard(self) -> None:
        """End the process in whatever state and forget it; not while another thread is in a call."""
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


class WorkerPool:
    """Pool of workers that take calls in the order of submission, each of at most ``timeout`` seconds.

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
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of future, function and arguments
        self._workers = [Worker() for _ in range(workers)]
        for number, worker in enumerate(self._workers):
            # daemons: neither a hanging decoder nor a forgotten pool keeps the interpreter from its end
            name = f"capvid-worker-{number}"
            threading.Thread(target=self._work, args=(worker,), name=name, daemon=True).start()

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Call a function in one of the processes; the future raises what :meth:`Worker.call` raises."""
        future: Future[_T] = Future()
        self._calls.put((future, function, arguments))
        return future

    def _work(self, worker: Worker) -> None:
        """Take calls until the pool is closed."""
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(worker.call(function, *arguments, timeout=self.timeout))
                except BaseException as error:
                    future.set_exception(error)
            del call, future, arguments  # results are not kept until the next call
        worker.discard()

    def close(self) -> None:
        """End all processes at once; calls in progress and pending ones fail. May be called twice."""
        for worker in self._workers:
            worker.close()
            self._calls.put(None)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve() -> None:
    """Answer the calls that come on stdin, on what stdout was when the process began.

    This is the process's side. It imports no more than the functions need, and no deep learning library.
    """
    max_bytes = limits().worker_bytes
    if resource is not None and max_bytes:  # a malicious file exhausts no more address space than that
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
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

    def listen() -> None:
        while message := _read(sys.stdin.buffer):
            calls.put(message)
        os._exit(0)  # the parent is gone: end at once, even in the midst of decoding

    threading.Thread(target=listen, daemon=True).start()
    while True:
        _answer(calls.get(), answers, shared)


def _answer(message: bytes, answers: IO[bytes], shared: int | None) -> None:
    """Call a function and send its result, or its error as one that can be pickled for certain."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        function, arguments = pickle.loads(message)
        answer = (True, function(*arguments), False)
        body = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
    except Exception as error:
        exhausted = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        portable = error if isinstance(error, CapvidError) else RemoteError.of(error)
        body, parts = pickle.dumps((False, portable, exhausted), protocol=5), []
    if shared is not None:
        with os.fdopen(shared, "wb", closefd=False) as file:  # it grows as needed, and keeps its size
            file.seek(0)
            file.writelines(parts)
    _write(answers, pickle.dumps((body, [len(part) for part in parts])))
    if shared is None:
        answers.writelines(parts)
        answers.flush()


def _open_memory_file() -> int | None:
    """Open a file in memory without a name; None where children cannot inherit one."""
    if os.name != "posix":
        return None
    if hasattr(os, "memfd_create"):
        return os.memfd_create("capvid-frames", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(stream: IO[bytes], message: bytes) -> None:
    """Write one message."""
    stream.write(_LENGTH.pack(len(message)) + message)
    stream.flush()


def _read(stream: IO[bytes], max_bytes: int | None = None) -> bytes:
    """Read one message; empty when the other side is gone, or announces more than ``max_bytes``."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    size = _LENGTH.unpack(head)[0]
    if max_bytes is not None and size > max_bytes:
        return b""
    message = stream.read(size)
    return message if len(message) == size else b""
