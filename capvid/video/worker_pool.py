"""Pool of decoding processes that can be killed and replaced individually.

A decoder may crash its process or never return, so it runs in a separate process, which takes one call at a
time with a deadline. The processes are plain children that end with their parent. ``multiprocessing`` is not
used, since it would run the caller's main module again in each of them.

A message is its length in eight bytes and a pickle. An answer is success, result or error, and whether memory
ran out. Its arrays follow through an anonymous file in memory, which vanishes with its last user, or through
the pipe where there is no such file.
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
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar, cast

from capvid.errors import CapvidError, RemoteError, RunError, UsageError
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
_CALLS = 1000  # after which a process is replaced, since codecs leak some memory
_KILLS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
_INHERITS_FILES = os.name == "posix"  # whether children can inherit a file in memory


class WorkerDiedError(Exception):
    """The process ended during a call; it will be replaced."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code  # exit status, or minus the number of the signal that ended it

    @property
    def crashed(self) -> bool:
        """Whether it ended by a fault such as a segmentation fault, and was not killed."""
        return self.code != 0 and str(self) not in _KILLS

    def __str__(self) -> str:
        with suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"exit status {self.code}"


@dataclass(eq=False)
class Worker:
    """One process, started by the first call. Not thread-safe, except :meth:`close`."""

    _process: subprocess.Popen[bytes] | None = None
    _shared: int | None = None  # descriptor of the file in memory
    _calls: int = 0
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)  # held to start or discard the process

    def call(self, function: Callable[..., _T], *arguments: Any, timeout: float | None = None) -> _T:
        """Call an importable function in the process, which is killed after ``timeout`` seconds.

        Arguments and result must be picklable.

        Raises:
            TimeoutError: there was no answer within ``timeout`` seconds.
            WorkerDiedError: the process ended during the call.
            CapvidError: the function raised it.
            RemoteError: the function raised any other error.
        """
        process = self._send(pickle.dumps((function, arguments), protocol=5))
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        # longer intervals than TIMEOUT_MAX (centuries) make the timer fail
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
            raise TimeoutError if late.is_set() else WorkerDiedError(process.returncode)
        succeeded, result, exhausted = answer
        if exhausted or late.is_set():  # memory is fragmented, or the deadline passed during the answer
            self.discard()
        if not succeeded:
            raise result
        return result

    def _send(self, message: bytes) -> subprocess.Popen[bytes]:
        """Send a call to the process; start one if there is none, or if it died while idle."""
        self._calls += 1
        if self._calls % _CALLS == 0:
            self.discard()
        for _ in range(2):
            with self._lock:
                if self._closed:
                    raise WorkerDiedError(-signal.SIGTERM)
                if self._process is None:
                    if _INHERITS_FILES and hasattr(os, "memfd_create"):
                        self._shared = os.memfd_create("capvid-frames", os.MFD_CLOEXEC)
                    elif _INHERITS_FILES:
                        with tempfile.TemporaryFile() as file:
                            self._shared = os.dup(file.fileno())
                    inherited = () if self._shared is None else (self._shared,)
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", _START, ",".join(map(str, inherited)), *sys.path],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        pass_fds=inherited,
                        start_new_session=True,  # Ctrl-C must reach only the parent
                    )
                process = self._process
            try:
                stdin = cast(IO[bytes], process.stdin)
                stdin.write(_LENGTH.pack(len(message)) + message)
                stdin.flush()
                return process
            except OSError:
                self.discard()
        raise WorkerDiedError(process.returncode)

    def _receive(self, stream: IO[bytes]) -> tuple[bool, Any, bool] | None:
        """Return success, result or error, and whether memory ran out; None if the process ended."""
        max_bytes = limits().worker_bytes or sys.maxsize
        try:
            size = _LENGTH.unpack(stream.read(_LENGTH.size))[0]
            if size > max_bytes:
                return None
            body, sizes = pickle.loads(stream.read(size))
            if sum(sizes) > max_bytes:
                return None
            buffers = [bytearray(size) for size in sizes]
            if self._shared is None:
                counts = [stream.readinto(buffer) for buffer in buffers]  # type: ignore[attr-defined]
            else:
                with os.fdopen(self._shared, "rb", closefd=False) as file:
                    file.seek(0)
                    counts = [file.readinto(buffer) for buffer in buffers]
            return pickle.loads(body, buffers=buffers) if counts == sizes else None
        except (OSError, ValueError, EOFError, struct.error, pickle.UnpicklingError):
            return None  # truncated, or closed by another thread

    def discard(self) -> None:
        """Kill the process and release its resources; not while another thread is in a call."""
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
        """Kill the process, from any thread; a call in progress raises WorkerDiedError."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()


class WorkerPool:
    """Pool of workers that take calls in the order of submission, with at most ``timeout`` seconds for each.

    Raises:
        UsageError: the number of workers or the timeout is out of range.
    """

    def __init__(self, workers: int, *, timeout: float | None = None) -> None:
        if not 1 <= workers <= _MAX_WORKERS:
            raise UsageError(f"workers must be between 1 and {_MAX_WORKERS}, got {workers:g}")
        if timeout is not None and not timeout >= 0:
            raise UsageError(f"timeout must be a positive number of seconds, got {timeout}")
        limits()  # an invalid limit must fail here, not in every process
        self.size, self._owner = workers, os.getpid()
        self.timeout = timeout
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of future, function and arguments
        self._workers = [Worker() for _ in range(workers)]
        for number, worker in enumerate(self._workers):
            # daemon threads: neither a hanging decoder nor an open pool delays the interpreter's exit
            name = f"capvid-worker-{number}"
            threading.Thread(target=self._work, args=(worker,), name=name, daemon=True).start()

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Submit a call to the next free process; the future raises what :meth:`Worker.call` raises."""
        check_process(self._owner, "these worker processes were started")  # its threads are not here
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
            del call, future, arguments  # so that results are not kept until the next call
        worker.discard()

    def close(self) -> None:
        """Kill all processes; calls in progress and pending calls fail. May be called twice."""
        if self._owner != os.getpid():  # they are those of the process that forked
            return
        for worker in self._workers:
            worker.close()
            self._calls.put(None)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_process(owner: int, what: str) -> None:
    """Raise RunError in a process that was forked from ``owner``, where threads and locks are missing."""
    if owner != os.getpid():
        raise RunError(
            f"{what} before this process was forked, and cannot be used in it",
            remedy="call capvid.load after the fork (gunicorn: without --preload; multiprocessing: spawn)",
        )


def serve() -> None:
    """Answer calls read from stdin on the original stdout: the main function of a worker process.

    It imports only what the called functions need, and no deep learning library.
    """
    max_bytes = limits().worker_bytes
    if resource is not None and max_bytes:  # bounds the memory that a malicious file can use
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    # numpy's threads, one per core, would reserve address space and stay idle
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    keep_freed_memory()
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # decoders may print, which must not mix with the answers
    if not os.environ.get("CAPVID_DEBUG"):
        os.dup2(null, 2)
    shared = int(sys.argv[1]) if sys.argv[1] else None
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        stdin = sys.stdin.buffer
        while len(head := stdin.read(_LENGTH.size)) == _LENGTH.size:
            calls.put(stdin.read(*_LENGTH.unpack(head)))
        os._exit(0)  # the parent has ended: exit at once, even while decoding

    threading.Thread(target=listen, daemon=True).start()
    while True:
        _answer(calls.get(), answers, shared)


def _answer(message: bytes, answers: IO[bytes], shared: int | None) -> None:
    """Call a function and send its result, or its error in a form that can always be pickled."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        function, arguments = pickle.loads(message)
        answer = (True, function(*arguments), False)
        body = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
    except Exception as error:
        exhausted = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        portable = error if isinstance(error, CapvidError) else RemoteError.of(error)
        body, arrays = pickle.dumps((False, portable, exhausted), protocol=5), []
    if shared is not None:
        with os.fdopen(shared, "wb", closefd=False) as file:  # it grows as needed and keeps its size
            file.seek(0)
            file.writelines(arrays)
    message = pickle.dumps((body, [len(array) for array in arrays]))
    answers.write(_LENGTH.pack(len(message)) + message)
    if shared is None:
        answers.writelines(arrays)
    answers.flush()
