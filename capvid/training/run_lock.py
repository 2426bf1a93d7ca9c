"""One ``capvid train`` per run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from capvid.errors import UsageError
from capvid.files import read_regular

_LOCK = ".capvid-train.lock"
_OWNER = ".capvid-train.pid"  # apart, since opening a lock empties it


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process; of several that accelerate launched, the first one does.

    The system releases the lock when the process ends, however that happens. Where the folder cannot be
    written, or its file system has no locks, nothing is locked.

    Raises:
        UsageError: another process holds it.
    """
    from filelock import FileLock, Timeout

    if int(os.environ.get("RANK", "0")) > 0:
        yield
        return
    lock, owner = FileLock(folder / _LOCK), folder / _OWNER
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        owner.write_text(str(os.getpid()))
    except Timeout:
        raise UsageError(
            f"{folder}: in use by another capvid train{_process(owner)}",
            remedy="wait until it ends, or choose another -o",
        ) from None
    except (OSError, NotImplementedError):
        pass  # what cannot be written is reported when the run is saved
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                owner.unlink(missing_ok=True)
            if fresh and [path.name for path in folder.iterdir()] == [_LOCK]:
                with suppress(OSError):  # nothing came of the run: leave no folder behind
                    (folder / _LOCK).unlink()
                    folder.rmdir()
        lock.release()


def _process(owner: Path) -> str:
    with suppress(OSError, ValueError):
        return f" (process {int(read_regular(owner, max_bytes=100))})"
    return ""
