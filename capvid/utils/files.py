"""Atomic writes, safe opening and digests of files."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

MANIFEST = "capvid-manifest.jsonl"  # in a folder of captions: the outcome of each video

_BLOCK = 1 << 20
_TEMPORARY = re.compile(r"\.([0-9a-f]{8})-([0-9]+)-[0-9a-f]{8}\.tmp$")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block succeeds and vanishes when it raises.

    The folder is created if need be. The temporary name begins with a dot, so that nothing picks it up.

    Raises:
        OSError: where the folder or the file cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # the name is shortened because with the suffix it could be longer than a file system allows
    temporary = target.with_name(f".{target.name[:40]}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(targets: Iterable[Path]) -> None:
    """Remove temporary files beside ``targets`` that killed processes of this machine left behind.

    Raises:
        OSError: where a folder cannot be read or written.
    """
    for folder in {target.parent for target in targets}:
        for path in folder.glob(".*.tmp"):  # none where there is no such folder
            match = _TEMPORARY.search(path.name)
            if match and match[1] == _host() and not _is_alive(int(match[2])):
                path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Return capvid's cache: ``CAPVID_CACHE``, or a folder in the user's home folder."""
    return Path(os.environ.get("CAPVID_CACHE") or Path.home() / ".cache" / "capvid")


def _host() -> str:
    """Return eight hexadecimal digits for this machine: process ids mean nothing on another one."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _is_alive(process: int) -> bool:
    if os.name != "posix":
        return True  # asking would end it
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, with newlines as they are, replacing the file at once."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    A FIFO or device could block forever or never end, so it is refused without waiting for its other end.

    Raises:
        OSError: no such file, or it is a folder, FIFO, socket or device; ``strerror`` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file but a pipe, socket or device", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, *, max_bytes: int) -> bytes:
    """Read a regular file of at most ``max_bytes``.

    Raises:
        OSError: as :func:`open_regular`, or the file is larger.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than the limit of {max_bytes} bytes", str(path))
        return file.read()


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits, computed again only when the file changes."""
    status = Path(path).stat()
    return _digest(str(path), status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=32)
def _digest(path: str, *version: int) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
