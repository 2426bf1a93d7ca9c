"""Files at addresses (``s3://``, ``gs://``, ``https://``, whatever fsspec reaches), and parts of files.

A server that fails now and then is asked again. What an address needs beside capvid, such as s3fs, comes with
``capvid[remote]``; credentials come from where its library looks for them: the environment, usually.
"""

from __future__ import annotations

import os
import re
import tempfile
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar, cast
from urllib.parse import unquote

from capvid.errors import CapvidError, UsageError
from capvid.files import open_regular, read_regular
from capvid.limits import limits

_T = TypeVar("_T")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BLOCK = 8 << 20  # bytes that are fetched, and fetched again, at a time
_SILENCE = 60.0  # seconds without a byte after which an HTTP connection counts as broken
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)$")
_TRIES = 6
_MAX_REASON = 200  # characters of another library's message
_PAUSE = 0.2  # seconds before the second try, twice as many before each further one
_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, NotImplementedError)


class StorageError(CapvidError):
    """What is at an address cannot be read, or nothing be written there."""

    kind = "storage"


class Deadline:
    """Time limit for fetching one object, retries included.

    Args:
        seconds: from now; None sets no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def remaining(self, url: str) -> float | None:
        """Return the seconds left, None if there is no limit.

        Raises:
            StorageError: no time is left; ``url`` is named.
        """
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise StorageError(
                f"{url}: not fetched within {self._seconds:g} seconds", remedy="allow more with --timeout"
            )
        return left

    def sleep(self, url: str, seconds: float) -> None:
        """Wait, but not beyond the deadline.

        Raises:
            StorageError: the deadline passed meanwhile.
        """
        left = self.remaining(url)
        time.sleep(seconds if left is None else min(seconds, left))
        self.remaining(url)


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

    options: dict[str, Any] = {}
    if protocol.startswith("http"):
        options = {"skip_instance_cache": True, "get_client": _http_client}
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


async def _http_client(**options: Any) -> Any:
    """Create a session without aiohttp's limit of five minutes for a whole object."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
    return aiohttp.ClientSession(timeout=timeout, **options)


def protocol_of(url: str) -> str:
    """What is before ``://``."""
    return url.split("://", 1)[0].lower()


def patiently(url: str, what: str, action: Callable[[], _T], deadline: Deadline | None = None) -> _T:
    """Do what reads or writes at an address, again if it fails, and give what comes of it.

    Args:
        url: the address, for the message.
        what: cannot be done if it fails, for the message, such as ``read``.
        action: to be done; it begins anew each time.
        deadline: for all tries together.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: it fails for good.
    """
    deadline = deadline or Deadline()
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
            deadline.sleep(url, _PAUSE * 2 ** (number - 1))
    raise AssertionError


def _refused(error: Exception) -> bool:
    """Whether a server said that it will not do it, now or later."""
    if type(error).__name__ in _REFUSALS:
        return True
    status = getattr(error, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)


_REFUSALS = frozenset(
    (
        "NoCredentialsError",
        "PartialCredentialsError",
        "InvalidURL",
        "InvalidUrlClientError",
        "InvalidUrlRedirectClientError",
        "NonHttpUrlClientError",
        "NonHttpUrlRedirectClientError",  # such as a redirect to file://
        "TooManyRedirects",
    )
)


def _said(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return textwrap.shorten(text, _MAX_REASON) or type(error).__name__


def ask(url: str, method: str, *arguments: Any, deadline: Deadline | None = None, **options: Any) -> Any:
    """Call a method of the file system of an address, cancelled at the deadline where it is asynchronous."""
    from fsspec.asyn import sync

    system = filesystem(protocol_of(url))
    left = (deadline or Deadline()).remaining(url)
    if getattr(system, "async_impl", False):
        return sync(system.loop, getattr(system, f"_{method}"), *arguments, timeout=left, **options)
    return getattr(system, method)(*arguments, **options)


def read_range(url: str, start: int, stop: int, *, deadline: Deadline | None = None) -> bytes:
    """Read the bytes from ``start`` to before ``stop`` of what is at an address, or in a file.

    Raises:
        FileNotFoundError: there is nothing.
        StorageError: it cannot be read, or is shorter.
    """
    data = BytesIO()
    fetch(Blob(url, "range", start, stop - start), data, max_bytes=stop - start, deadline=deadline)
    return data.getvalue()


def size_of(url: str, *, deadline: Deadline | None = None) -> int | None:
    """The bytes of what is at an address, or of a file; None if the server does not say.

    Raises:
        FileNotFoundError: there is nothing.
        StorageError: it cannot be asked.
    """
    if not is_url(url):
        return Path(url).stat().st_size
    if protocol_of(url).startswith("http"):
        download = _HttpDownload(url, 0, 1, BytesIO(), 1)
        download.run(deadline or Deadline())
        return download.total

    def action() -> int | None:
        filesystem(protocol_of(url)).invalidate_cache()
        size = ask(url, "info", url, deadline=deadline).get("size")
        return None if size is None else int(size)

    return patiently(url, "read", action, deadline)


def read_bytes(url: str, *, max_bytes: int | None = None) -> bytes:
    """Read all of what is at an address.

    Args:
        url: the address.
        max_bytes: of the object; None takes the limit for remote objects.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: it cannot be read, or is larger.
    """
    data = BytesIO()
    fetch(Blob(url), data, max_bytes=max_bytes)
    return data.getvalue()


@contextmanager
def local_copy(
    path: VideoPath, *, max_bytes: int | None = None, timeout: float | None = None
) -> Iterator[Path]:
    """Give a file of this machine with these bytes: a path itself; for a blob a copy, while the block runs.

    The copy has no name where that can be had (Linux), so that nothing is left of it, however a process ends.

    Args:
        path: a path or a blob.
        max_bytes: of a blob; None takes the limit for remote objects.
        timeout: seconds for fetching a blob, retries included; None waits for ever.

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
            fetch(path, cast(IO[bytes], file), max_bytes=max_bytes, deadline=Deadline(timeout))
            file.flush()
            yield place
        finally:
            with suppress(FileNotFoundError):
                name.unlink()


def fetch(
    blob: Blob, file: IO[bytes], *, max_bytes: int | None = None, deadline: Deadline | None = None
) -> None:
    """Write the bytes of a blob to a file, holding no more than a block of them in memory.

    Args:
        blob: an object at an address, or a member of an archive.
        file: open for writing.
        max_bytes: of the blob; None takes the limit for remote objects.
        deadline: for all of it, retries included.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: it cannot be fetched, is larger than ``max_bytes``, or the deadline passed.
    """
    max_bytes = limits().remote_bytes if max_bytes is None else max_bytes
    stop = blob.start + blob.size if blob.member else None
    kind: type[_Download] = _LocalCopy
    if is_url(blob.url):
        kind = _HttpDownload if protocol_of(blob.url).startswith("http") else _BlockDownload
    kind(blob.url, blob.start, stop, file, max_bytes).run(deadline or Deadline())


class _Download(ABC):
    """One transfer; ``at`` is the next byte of the object, so that a retry continues where one broke off."""

    def __init__(self, url: str, start: int, stop: int | None, file: IO[bytes], max_bytes: int) -> None:
        self.url = url
        self.at = start
        self.stop = stop
        self.total: int | None = None
        self._start = start
        self._max_bytes = max_bytes
        self._file = file
        if stop is not None:
            self._check_size(stop - start)

    @abstractmethod
    def run(self, deadline: Deadline) -> None:
        """Transfer everything."""

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise StorageError(
                f"{self.url}: larger than the limit of {self._max_bytes} bytes",
                remedy="see the limits in the configuration",
            )

    def _write(self, block: bytes) -> None:
        if self.stop is not None:
            block = block[: self.stop - self.at]
        self._check_size(self.at + len(block) - self._start)
        try:
            self._file.write(block)
        except OSError as error:
            raise StorageError(
                f"{self.url}: cannot be stored ({error.strerror})",
                remedy="free space in the temporary folder, or set TMPDIR",
            ) from error
        self.at += len(block)

    def _check_length(self) -> None:
        if self.stop is not None and self.at < self.stop:
            raise OSError(f"{self.at - self._start} bytes came of {self.stop - self._start}")


class _LocalCopy(_Download):
    """A part of a file of this machine, such as a member of an archive."""

    def run(self, deadline: Deadline) -> None:
        assert self.stop is not None
        with open_regular(self.url) as file:
            file.seek(self.at)
            while self.at < self.stop:
                deadline.remaining(self.url)
                block = file.read(min(_BLOCK, self.stop - self.at))
                if not block:
                    raise StorageError(f"{self.url}: is cut off")
                self._write(block)


class _BlockDownload(_Download):
    """An object in a store that knows its size, such as S3, fetched and retried block by block."""

    def run(self, deadline: Deadline) -> None:
        if self.stop is None:
            self.total = size_of(self.url, deadline=deadline)
            if self.total is None:
                patiently(self.url, "read", self._stream, deadline)
                return
            self.stop = self.total
            self._check_size(self.stop - self._start)
        while self.at < self.stop:
            patiently(self.url, "read", lambda: self._block(deadline), deadline)

    def _block(self, deadline: Deadline) -> None:
        assert self.stop is not None
        end = min(self.at + _BLOCK, self.stop)
        block: bytes = ask(self.url, "cat_file", self.url, start=self.at, end=end, deadline=deadline)
        if len(block) < end - self.at:
            raise OSError(f"{len(block)} bytes came of {end - self.at}")
        self._write(block)

    def _stream(self) -> None:
        with filesystem(protocol_of(self.url)).open(self.url, "rb") as stream:
            stream.read(self.at)
            while block := stream.read(_BLOCK):
                self._write(block)


class _HttpDownload(_Download):
    """An object on a web server, in one request, and further ones for the rest if that breaks off."""

    def run(self, deadline: Deadline) -> None:
        complete = self.at == self.stop
        while not complete:
            complete = patiently(self.url, "read", lambda: self._try(deadline), deadline)

    def _try(self, deadline: Deadline) -> bool:
        """Whether the rest came; a failure after a good part of it is not counted among the tries."""
        from fsspec.asyn import sync

        system = filesystem(protocol_of(self.url))
        before = self.at
        try:
            sync(system.loop, self._request, system, timeout=deadline.remaining(self.url))
        except CapvidError:
            raise
        except Exception:  # patiently, which gets it otherwise, knows what to make of it
            if self.at - before >= _BLOCK:
                return False
            raise
        return True

    async def _request(self, system: Any) -> None:
        session = await system.set_session()
        headers = {"Accept-Encoding": "identity"}
        if self.at or self.stop is not None:
            headers["Range"] = f"bytes={self.at}-{'' if self.stop is None else self.stop - 1}"
        async with session.get(system.encode_url(self.url), headers=headers) as response:
            if response.status in (404, 410):
                raise FileNotFoundError(self.url)
            response.raise_for_status()
            self._check_range(response.status, response.headers.get("Content-Range", ""))
            if self.stop is None:
                self._check_size(self.at - self._start + (response.content_length or 0))
            async for block in response.content.iter_any():
                self._write(block)
                if self.at == self.stop:
                    return
        self._check_length()

    def _check_range(self, status: int, content_range: str) -> None:
        """See that what the server sends begins where it should."""
        if status != 206:
            if self.at:
                raise StorageError(
                    f"{self.url}: the server does not send parts of a file", remedy="fetch the file first"
                )
            return
        match = _CONTENT_RANGE.match(content_range)
        if match is None or int(match[1]) != self.at:
            raise StorageError(f"{self.url}: the server sent another part of the file than was asked for")
        self.total = None if match[2] == "*" else int(match[2])


class Storage:
    """A folder of this machine, or one at an address, with files that appear whole or not at all.

    Args:
        folder: a path or an address.

    Attributes:
        url: the address, or the path, as text.

    Raises:
        UsageError: the name is empty, as that of a shell variable without a value.
    """

    def __init__(self, folder: str | Path) -> None:
        self.url = os.fspath(folder)
        if not self.url:
            raise UsageError("the output folder has an empty name", remedy="give a folder, . for this one")
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
            return read_bytes(self.place(name), max_bytes=limits().text_bytes)
        try:
            return read_regular(self.local / name, max_bytes=limits().text_bytes)
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
