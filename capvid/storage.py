"""Files at addresses (``s3://``, ``gs://``, ``https://``, whatever fsspec reaches), and parts of files.

A server that fails now and then is asked again. What an address needs beside capvid, such as s3fs, comes with
``capvid[remote]``; credentials come from where its library looks for them: the environment, usually.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast
from urllib.parse import unquote

from capvid.errors import CapvidError, UsageError
from capvid.files import open_regular

_T = TypeVar("_T")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BLOCK = 8 << 20  # bytes that are fetched, and fetched again, at a time
_TRIES = 6
_PAUSE = 0.2  # seconds before the second try, twice as many before each further one
_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, NotImplementedError)


class StorageError(CapvidError):
    """What is at an address cannot be read, or nothing be written there."""

    kind = "storage"


@dataclass(frozen=True)
class Blob:
    """A file at an address, or a member of an archive: bytes that have to be fetched before they are decoded.

    Attributes:
        url: the address; of a member of an archive on this machine the archive's path.
        member: its name in the archive; empty for a whole file.
        start: where it begins in the archive.
        size: its bytes; -1 if that is not known.
    """

    url: str
    member: str = ""
    start: int = 0
    size: int = -1

    def __str__(self) -> str:
        return f"{self.url}/{self.member}" if self.member else self.url

    def __fspath__(self) -> str:
        """Give the address, as it is shown."""
        return str(self)

    @property
    def inner(self) -> PurePosixPath:
        """The path at the server, or in the archive."""
        if self.member:
            return PurePosixPath(self.member)
        path = self.url.split("://", 1)[-1].partition("/")[2]
        if protocol_of(self.url).startswith("http"):  # elsewhere these signs are part of a name
            path = unquote(re.split("[?#]", path)[0])
        return PurePosixPath(f"/{path}" if path else self.url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.inner.name

    @property
    def stem(self) -> str:
        """The name without its extension."""
        return self.inner.stem

    @property
    def suffix(self) -> str:
        """The extension with its dot."""
        return self.inner.suffix


VideoPath = Path | Blob


def is_url(text: str) -> bool:
    """Whether the text is an address."""
    return bool(_URL.match(text))


def located(text: str | Path | Blob) -> VideoPath:
    """Give what the text names: an address, or a path; ``file://`` is a path as well."""
    if isinstance(text, Path | Blob):
        return text
    if text.lower().startswith("file://"):
        return Path(unquote(text[len("file://") :].removeprefix("localhost")))
    return Blob(text) if is_url(text) else Path(text)


@lru_cache(maxsize=64)
def filesystem(protocol: str) -> Any:
    """Give fsspec's file system of a protocol, such as ``s3``.

    Raises:
        UsageError: there is none, or what it needs is not installed.
    """
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True} if protocol.startswith("http") else {}
    if protocol in ("s3", "s3a"):  # whose library would wait beside us, and many times longer
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
    try:
        return fsspec.filesystem(protocol, **options)
    except ImportError as error:
        raise UsageError(
            f"{protocol}:// needs what is not installed ({error})", remedy="pip install 'capvid[remote]'"
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{protocol}:// is no address that can be read", remedy="use s3://, gs:// or https://"
        ) from error


def protocol_of(url: str) -> str:
    """What is before ``://``."""
    return url.split("://", 1)[0].lower()


def patiently(url: str, what: str, action: Callable[[], _T]) -> _T:
    """Do what reads or writes at an address, again if it fails, and give what comes of it.

    Args:
        url: the address, for the message.
        what: cannot be done if it fails, for the message, such as ``read``.
        action: to be done; it begins anew each time.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: it fails for good.
    """
    for number in range(1, _TRIES + 1):
        try:
            return action()
        except CapvidError:
            raise
        except Exception as failure:  # each library has errors of its own for a connection that breaks off
            error = failure
            if isinstance(failure, FileNotFoundError):
                cause = failure.__cause__  # with https that is for whatever fails
                if not url.startswith("http") or getattr(cause, "status", 0 if cause else 404) in (404, 410):
                    raise
                error = cast(Exception, cause)
            if isinstance(error, _PERMANENT) or _refused(error) or number == _TRIES:
                raise StorageError(
                    f"{url}: cannot be {what} ({_said(error)})",
                    remedy="see the address, the network and the credentials",
                ) from error
            time.sleep(_PAUSE * 2 ** (number - 1))
    raise AssertionError


def _refused(error: Exception) -> bool:
    """Whether a server said that it will not do it, now or later."""
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in (408, 425, 429)
    return type(error).__name__ in ("NoCredentialsError", "InvalidURL", "PartialCredentialsError")


def _said(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def read_range(url: str, start: int, stop: int) -> bytes:
    """Read the bytes from ``start`` to before ``stop`` of what is at an address, or in a file.

    Raises:
        FileNotFoundError: there is nothing.
        StorageError: it cannot be read, or is shorter.
    """
    found = _asked(url, start, stop)
    return found if len(found) == stop - start else found[start:stop]


def _asked(url: str, start: int, stop: int) -> bytes:
    """What comes if these bytes are asked for: they, or from some servers always all of it."""
    if not is_url(url):
        with Path(url).open("rb") as file:
            file.seek(start)
            here = file.read(stop - start)
        if len(here) < stop - start:
            raise StorageError(f"{url}: is cut off")
        return here

    def action() -> bytes:
        found: bytes = filesystem(protocol_of(url)).cat_file(url, start=start, end=stop)
        if len(found) < stop - start:
            raise OSError(f"{len(found)} bytes came of {stop - start}")
        return found

    return patiently(url, "read", action)


def size_of(url: str) -> int | None:
    """The bytes of what is at an address, or of a file; None if the server does not say.

    Raises:
        FileNotFoundError: there is nothing.
        StorageError: it cannot be asked.
    """
    if not is_url(url):
        return Path(url).stat().st_size

    def action() -> int | None:
        system = filesystem(protocol_of(url))
        system.invalidate_cache()
        size = system.info(url).get("size")
        return None if size is None else int(size)

    return patiently(url, "read", action)


def read_bytes(url: str) -> bytes:
    """Read all of what is at an address.

    Raises:
        FileNotFoundError: there is nothing.
        StorageError: it cannot be read.
    """
    size = size_of(url)
    if size is None:
        return patiently(url, "read", lambda: bytes(filesystem(protocol_of(url)).cat_file(url)))
    starts = range(0, size, _BLOCK)  # an empty file is no block
    return b"".join(read_range(url, at, min(at + _BLOCK, size)) for at in starts)


@contextmanager
def local_copy(path: VideoPath) -> Iterator[Path]:
    """Give a file of this machine with these bytes: a path itself; for a blob a copy, while the block runs.

    The copy has no name where that can be had (Linux), so that nothing is left of it, however a process ends.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: it cannot be fetched.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="capvid-", suffix=path.suffix, delete=False) as file:
        name = Path(file.name)
        place = Path(f"/proc/self/fd/{file.fileno()}")
        try:
            if place.exists():
                name.unlink()
            else:
                place = name
            _fetch(path, file.write)
            file.flush()
            yield place
        finally:
            with suppress(FileNotFoundError):
                name.unlink()


def _fetch(blob: Blob, write: Callable[[bytes], Any]) -> None:
    """Hand the bytes of a blob to ``write``, block by block."""
    size = blob.size if blob.member else size_of(blob.url)
    if size is None:  # then there is no asking for a part of it
        write(read_bytes(blob.url))
        return
    at, stop = blob.start, blob.start + size
    while at < stop:
        end = min(at + _BLOCK, stop)
        found = _asked(blob.url, at, end)
        found = found if len(found) == end - at else found[at:stop]
        write(found)
        at += len(found)


class Storage:
    """A folder of this machine, or one at an address, with files that appear whole or not at all.

    Args:
        folder: a path or an address.

    Attributes:
        url: the address, or the path, as text.
    """

    def __init__(self, folder: str | Path) -> None:
        self.url = os.fspath(folder)
        if self.url.lower().startswith("file://"):
            self.url = os.fspath(located(self.url))
        self.local = None if is_url(self.url) else Path(self.url)

    def __str__(self) -> str:
        return self.url

    def place(self, name: str) -> str:
        """Where a file is, as text."""
        return f"{self.url.rstrip('/')}/{name}" if self.local is None else os.fspath(self.local / name)

    def names(self) -> list[str]:
        """Names of the files in the folder itself, in order; none if there is no such folder.

        Raises:
            StorageError: it cannot be listed.
        """
        if self.local is not None:
            try:
                return sorted(entry.name for entry in os.scandir(self.local) if entry.is_file())
            except FileNotFoundError:
                return []
            except OSError as error:
                raise StorageError(f"{self}: cannot be listed ({error.strerror})") from error

        def action() -> list[str]:
            system = filesystem(protocol_of(self.url))
            system.invalidate_cache()
            found = system.ls(self.url, detail=True)
            return sorted(entry["name"].rsplit("/", 1)[-1] for entry in found if entry["type"] == "file")

        try:
            return patiently(self.url, "listed", action)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it cannot be read.
        """
        if self.local is None:
            return read_bytes(self.place(name))
        try:
            with open_regular(self.local / name) as file:
                return file.read()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"{self.place(name)}: cannot be read ({error.strerror})") from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file, or put it in the place of another, at once.

        Raises:
            StorageError: it cannot be written.
        """
        from capvid.files import atomic_path

        if self.local is not None:
            try:
                with atomic_path(self.local / name) as temporary:
                    temporary.write_bytes(data)
            except OSError as error:
                raise StorageError(f"{self.place(name)}: cannot be written ({error.strerror})") from error
            return
        place = self.place(name)
        try:
            patiently(place, "written", lambda: self._put(place, data))
        except FileNotFoundError as error:
            raise StorageError(f"{place}: cannot be written (there is no such place)") from error

    @staticmethod
    def _put(place: str, data: bytes) -> None:
        """Write an object; where there are files instead, under a name beside it first."""
        system = filesystem(protocol_of(place))
        if protocol_of(place) in _OBJECTS:
            system.pipe_file(place, data)
            return
        folder, name = place.rsplit("/", 1)
        system.makedirs(folder, exist_ok=True)
        system.pipe_file(f"{folder}/.{name}.tmp", data)
        system.mv(f"{folder}/.{name}.tmp", place)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises:
            StorageError: it cannot be removed.
        """
        try:
            if self.local is not None:
                (self.local / name).unlink(missing_ok=True)
            else:
                place = self.place(name)
                patiently(place, "removed", lambda: filesystem(protocol_of(place)).rm_file(place))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"{self.place(name)}: cannot be removed ({error.strerror})") from error


_OBJECTS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"))
