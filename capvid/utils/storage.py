"""Files at addresses (``s3://``, ``gs://``, ``https://``, whatever fsspec reaches), and parts of files.

Failed requests are retried. The libraries that an address needs, such as s3fs, come with ``capvid[remote]``;
they find credentials in their usual places, such as the environment.
"""

from __future__ import annotations

import os
import re
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar, cast
from urllib.parse import unquote

from capvid.errors import CapvidError, UsageError
from capvid.utils.files import atomic_path, open_regular, read_regular
from capvid.utils.validation import limits

_T = TypeVar("_T")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BLOCK = 8 << 20  # bytes fetched, and fetched again, at a time
_SILENCE = 60.0  # seconds without a byte after which an HTTP connection counts as broken
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)$")
_TRIES = 6
_PAUSE = 0.2  # seconds before the second try, doubled before each further one
_MAX_REASON = 200  # characters of another library's message
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory")
_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, NotImplementedError)
_REFUSALS = (  # names of errors that a second try does not cure
    "NoCredentialsError",
    "PartialCredentialsError",
    "InvalidURL",
    "InvalidUrlClientError",
    "InvalidUrlRedirectClientError",
    "NonHttpUrlClientError",
    "NonHttpUrlRedirectClientError",  # such as a redirect to file://
    "TooManyRedirects",
)


class StorageError(CapvidError):
    """An address that cannot be read or written."""

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
        url: the address; for a member of a local archive the archive's path.
        member: name in the archive; empty for a complete file.
        start: offset in the archive, in bytes.
        size: bytes; -1 if unknown.
        siblings: other members of the same WebDataset sample.
    """

    url: str
    member: str = ""
    start: int = 0
    size: int = -1
    siblings: tuple[Blob, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.url}/{self.member}" if self.member else self.url

    def __fspath__(self) -> str:
        """Return the address as text."""
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
Readable = bytes | bytearray | memoryview | IO[bytes]


def is_url(text: str) -> bool:
    """Return whether the text is an address."""
    return bool(_URL.match(text))


def protocol_of(url: str) -> str:
    """Return the part of an address before ``://``."""
    return url.split("://", 1)[0].lower()


def parse_path(text: str | Path | Blob) -> VideoPath:
    """Return the path or address that a text names; ``file://`` is a path as well."""
    if isinstance(text, Path | Blob):
        return text
    if text.lower().startswith("file://"):
        return Path(unquote(text[len("file://") :].removeprefix("localhost")))
    return Blob(text) if is_url(text) else Path(text)


@lru_cache(maxsize=64)
def filesystem(protocol: str) -> Any:
    """Return fsspec's file system of a protocol, such as ``s3``.

    Raises:
        UsageError: unknown protocol, or a library that it needs is not installed.
    """
    import fsspec

    async def http_client(**options: Any) -> Any:
        """Create a session without aiohttp's limit of five minutes for a complete object."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
        return aiohttp.ClientSession(timeout=timeout, **options)

    options: dict[str, Any] = {}
    if protocol.startswith("http"):
        options = {"skip_instance_cache": True, "get_client": http_client}
    if protocol in ("s3", "s3a"):  # whose library would add retries of its own, many times longer
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


def with_retries(url: str, what: str, action: Callable[[], _T], deadline: Deadline | None = None) -> _T:
    """Return the result of an action on an address, retrying failures that may pass.

    Args:
        url: the address, for the message.
        what: participle for the message, such as ``read``.
        action: function to call; it starts anew each time.
        deadline: limit for all tries together.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: every try failed, or the failure is permanent.
    """
    deadline = deadline or Deadline()
    for number in range(1, _TRIES + 1):
        try:
            return action()
        except CapvidError:
            raise
        except Exception as failure:  # each library has errors of its own for a broken connection
            error = failure
            if isinstance(failure, FileNotFoundError):
                cause = failure.__cause__  # over https any failure is reported as FileNotFoundError
                if not url.startswith("http") or getattr(cause, "status", 0 if cause else 404) in (404, 410):
                    raise
                error = cast(Exception, cause)
            status = getattr(error, "status", None)
            refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)
            permanent = isinstance(error, _PERMANENT) or type(error).__name__ in _REFUSALS
            if permanent or refused or number == _TRIES:
                text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                reason = textwrap.shorten(text, _MAX_REASON) or type(error).__name__
                raise StorageError(
                    f"{url}: cannot be {what} ({reason})",
                    remedy="see the address, the network and the credentials",
                ) from error
            deadline.sleep(url, _PAUSE * 2 ** (number - 1))
    raise AssertionError


def ask(url: str, method: str, *arguments: Any, deadline: Deadline | None = None, **options: Any) -> Any:
    """Call a method of the file system of an address, cancelled at the deadline where it is asynchronous."""
    from fsspec.asyn import sync

    system = filesystem(protocol_of(url))
    left = (deadline or Deadline()).remaining(url)
    if getattr(system, "async_impl", False):
        return sync(system.loop, getattr(system, f"_{method}"), *arguments, timeout=left, **options)
    return getattr(system, method)(*arguments, **options)


def size_of(url: str, *, deadline: Deadline | None = None) -> int | None:
    """Return the bytes of an object or file; None if the server does not say.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: the request failed.
    """
    if not is_url(url):
        return Path(url).stat().st_size
    if protocol_of(url).startswith("http"):
        download = _Download(url, 0, 1, BytesIO(), 1, deadline)
        download.run()
        return download.total

    def action() -> int | None:
        filesystem(protocol_of(url)).invalidate_cache()
        size = ask(url, "info", url, deadline=deadline).get("size")
        return None if size is None else int(size)

    return with_retries(url, "read", action, deadline)


def read_range(url: str, start: int, stop: int, *, deadline: Deadline | None = None) -> bytes:
    """Read the bytes from ``start`` to before ``stop`` of an object or file.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: the request failed, or the object is shorter.
    """
    data = BytesIO()
    fetch(Blob(url, "range", start, stop - start), data, max_bytes=stop - start, deadline=deadline)
    return data.getvalue()


def read_bytes(url: str, *, max_bytes: int | None = None) -> bytes:
    """Read an object completely; see :func:`fetch`."""
    data = BytesIO()
    fetch(Blob(url), data, max_bytes=max_bytes)
    return data.getvalue()


@contextmanager
def local_copy(
    path: VideoPath, *, max_bytes: int | None = None, timeout: float | None = None
) -> Iterator[Path]:
    """Yield a local file: a path itself, or a temporary copy of a blob.

    The copy has no name where possible (Linux), so that nothing is left of it, however the process ends.

    Args:
        path: a path or a blob.
        max_bytes: limit on a blob's size; None takes the limit for remote objects.
        timeout: seconds for fetching a blob, retries included; None sets no limit.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: the blob cannot be fetched.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="capvid-", suffix=path.suffix, delete=False) as file:
        name = Path(file.name)
        copy = Path(f"/proc/self/fd/{file.fileno()}")
        try:
            if copy.exists():
                name.unlink()
            else:
                copy = name
            fetch(path, cast(IO[bytes], file), max_bytes=max_bytes, deadline=Deadline(timeout))
            file.flush()
            yield copy
        finally:
            with suppress(FileNotFoundError):
                name.unlink()


@contextmanager
def saved_copy(data: Readable) -> Iterator[tuple[Path, str]]:
    """Yield a temporary file with the bytes of ``data``, and the name of ``data`` for messages.

    Args:
        data: the bytes, or a file open for reading in binary mode, read from its position to its end.

    Raises:
        UsageError: a file that is not open for reading in binary mode.
        StorageError: more bytes than :attr:`~capvid.utils.validation.Limits.remote_bytes`.
    """
    name = "bytes"
    if not isinstance(data, bytes | bytearray | memoryview):
        name = data.name if isinstance(getattr(data, "name", None), str) else "file"
    max_bytes, size = limits().remote_bytes, 0
    with tempfile.TemporaryDirectory(prefix="capvid-") as folder:
        suffix = PurePosixPath(name).suffix if len(name) < _MAX_REASON else ""
        path = Path(folder) / f"video{suffix}"
        stream = BytesIO(data) if isinstance(data, bytes | bytearray | memoryview) else data
        with path.open("wb") as file:
            while block := stream.read(_BLOCK):
                if not isinstance(block, bytes):
                    raise UsageError(f"{name}: not open in binary mode", remedy='open it with mode "rb"')
                size += len(block)
                if size > max_bytes:
                    problem = f"{name}: larger than the limit of {max_bytes} bytes"
                    raise StorageError(problem, remedy="raise CAPVID_LIMIT_REMOTE_BYTES")
                file.write(block)
        yield path, name


def fetch(
    blob: Blob, file: IO[bytes], *, max_bytes: int | None = None, deadline: Deadline | None = None
) -> None:
    """Write the bytes of a blob to a file, holding no more than a block of them in memory.

    Args:
        blob: an object at an address, or a member of an archive.
        file: open for writing.
        max_bytes: limit on the size; None takes the limit for remote objects.
        deadline: limit for the transfer, retries included.

    Raises:
        FileNotFoundError: there is nothing at the address.
        StorageError: the transfer failed, or the blob is larger than ``max_bytes``.
    """
    stop = blob.start + blob.size if blob.member else None
    max_bytes = limits().remote_bytes if max_bytes is None else max_bytes
    _Download(blob.url, blob.start, stop, file, max_bytes, deadline).run()


class _Download:
    """One transfer; ``_position`` is the next byte of the object, so that a retry resumes there."""

    def __init__(
        self,
        url: str,
        start: int,
        stop: int | None,
        file: IO[bytes],
        max_bytes: int,
        deadline: Deadline | None,
    ) -> None:
        self.total: int | None = None  # bytes of the object, if an HTTP server says so
        self._url, self._start, self._stop = url, start, stop
        self._position = start
        self._file, self._max_bytes = file, max_bytes
        self._deadline = deadline or Deadline()
        if stop is not None:
            self._check_size(stop - start)

    def run(self) -> None:
        """Transfer everything."""
        if not is_url(self._url):
            self._copy_local()
        elif protocol_of(self._url).startswith("http"):
            complete = self._position == self._stop
            while not complete:
                complete = with_retries(self._url, "read", self._try_http, self._deadline)
        else:
            self._fetch_blocks()

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            problem = f"{self._url}: larger than the limit of {self._max_bytes} bytes"
            raise StorageError(problem, remedy="see the limits in the configuration")

    def _write(self, block: bytes) -> None:
        if self._stop is not None:
            block = block[: self._stop - self._position]
        self._check_size(self._position + len(block) - self._start)
        try:
            self._file.write(block)
        except OSError as error:
            problem = f"{self._url}: cannot be stored ({error.strerror})"
            raise StorageError(problem, remedy="free space in the temporary folder, or set TMPDIR") from error
        self._position += len(block)

    def _copy_local(self) -> None:
        """Copy a part of a local file, such as a member of an archive."""
        assert self._stop is not None
        with open_regular(self._url) as file:
            file.seek(self._position)
            while self._position < self._stop:
                self._deadline.remaining(self._url)
                block = file.read(min(_BLOCK, self._stop - self._position))
                if not block:
                    raise StorageError(f"{self._url}: is cut off")
                self._write(block)

    def _fetch_blocks(self) -> None:
        """Fetch an object from a store that knows its size, such as S3, block by block."""
        if self._stop is None:
            self._stop = size_of(self._url, deadline=self._deadline)
            if self._stop is None:
                with_retries(self._url, "read", self._stream, self._deadline)
                return
            self._check_size(self._stop - self._start)
        while self._position < self._stop:
            end = min(self._position + _BLOCK, self._stop)
            with_retries(self._url, "read", partial(self._fetch_block, end), self._deadline)

    def _fetch_block(self, end: int) -> None:
        block: bytes = ask(
            self._url, "cat_file", self._url, start=self._position, end=end, deadline=self._deadline
        )
        if len(block) < end - self._position:
            raise OSError(f"{len(block)} bytes came of {end - self._position}")
        self._write(block)

    def _stream(self) -> None:
        """Read an object of unknown size; a retry skips what is there already, block by block."""
        with filesystem(protocol_of(self._url)).open(self._url, "rb") as stream:
            skipped = 0
            while skipped < self._position:
                block = stream.read(min(_BLOCK, self._position - skipped))
                if not block:
                    raise OSError(f"ends before byte {self._position}, where the last try was")
                skipped += len(block)
            while block := stream.read(_BLOCK):
                self._write(block)

    def _try_http(self) -> bool:
        """Return whether the rest came; a failure after a block or more does not count as a try."""
        from fsspec.asyn import sync

        system = filesystem(protocol_of(self._url))
        before = self._position
        try:
            sync(system.loop, self._request, system, timeout=self._deadline.remaining(self._url))
        except CapvidError:
            raise
        except Exception:
            if self._position - before >= _BLOCK:
                return False
            raise  # to with_retries(), which interprets it
        return True

    async def _request(self, system: Any) -> None:
        """Request the rest of an object from a web server."""
        session = await system.set_session()
        headers = {"Accept-Encoding": "identity"}
        if self._position or self._stop is not None:
            last = "" if self._stop is None else self._stop - 1
            headers["Range"] = f"bytes={self._position}-{last}"
        async with session.get(system.encode_url(self._url), headers=headers) as response:
            if response.status in (404, 410):
                raise FileNotFoundError(self._url)
            response.raise_for_status()
            if response.status == 206:
                match = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
                if match is None or int(match[1]) != self._position:
                    raise StorageError(
                        f"{self._url}: the server sent another part of the file than was asked for"
                    )
                self.total = None if match[2] == "*" else int(match[2])
            elif self._position:
                raise StorageError(
                    f"{self._url}: the server does not send parts of a file", remedy="fetch the file first"
                )
            if self._stop is None:
                self._check_size(self._position - self._start + (response.content_length or 0))
            async for block in response.content.iter_any():
                self._write(block)
                if self._position == self._stop:
                    return
        if self._stop is not None and self._position < self._stop:
            raise OSError(f"{self._position - self._start} bytes came of {self._stop - self._start}")


class Storage:
    """A local folder, or one at an address, whose files are written atomically.

    Args:
        folder: a path or an address.

    Attributes:
        url: the address, or the path, as text.
        local: the path of a local folder; None for an address.

    Raises:
        UsageError: the name is empty, such as that of an unset shell variable.
    """

    def __init__(self, folder: str | Path) -> None:
        self.url = os.fspath(folder)
        if not self.url:
            raise UsageError("the output folder has an empty name", remedy="give a folder, . for this one")
        if self.url.lower().startswith("file://"):
            self.url = os.fspath(parse_path(self.url))
        self.local = None if is_url(self.url) else Path(self.url)

    def __str__(self) -> str:
        return self.url

    def place(self, name: str) -> str:
        """Return the path or address of a file as text."""
        return f"{self.url.rstrip('/')}/{name}" if self.local is None else os.fspath(self.local / name)

    def names(self) -> list[str]:
        """Return the sorted names of the files in the folder itself; none if there is no such folder.

        Raises:
            StorageError: the folder cannot be listed.
        """

        def action() -> list[str]:
            system = filesystem(protocol_of(self.url))
            system.invalidate_cache()
            entries = system.ls(self.url, detail=True)
            return sorted(entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file")

        try:
            if self.local is None:
                return with_retries(self.url, "listed", action)
            return sorted(entry.name for entry in os.scandir(self.local) if entry.is_file())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self}: cannot be listed ({error.strerror})") from error

    def read(self, name: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: there is none.
            StorageError: the file cannot be read.
        """
        if self.local is None:
            return read_bytes(self.place(name), max_bytes=limits().feature_bytes)
        try:
            return read_regular(self.local / name, max_bytes=limits().feature_bytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"{self.place(name)}: cannot be read ({error.strerror})") from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically.

        Raises:
            StorageError: the file cannot be written.
        """
        url = self.place(name)

        def action() -> None:
            system = filesystem(protocol_of(url))
            if protocol_of(url) in _OBJECT_STORES:
                system.pipe_file(url, data)
                return
            system.makedirs(url.rsplit("/", 1)[0], exist_ok=True)
            temporary = f"{url.rsplit('/', 1)[0]}/.{url.rsplit('/', 1)[1]}.tmp"
            system.pipe_file(temporary, data)
            system.mv(temporary, url)

        try:
            if self.local is None:
                with_retries(url, "written", action)
            else:
                with atomic_path(self.local / name) as path:
                    path.write_bytes(data)
        except OSError as error:
            missing = self.local is None and isinstance(error, FileNotFoundError)
            reason = "there is no such place" if missing else error.strerror
            raise StorageError(f"{url}: cannot be written ({reason})") from error

    def remove(self, name: str) -> None:
        """Remove a file, if it exists.

        Raises:
            StorageError: the file cannot be removed.
        """
        url = self.place(name)
        try:
            if self.local is None:
                with_retries(url, "removed", lambda: filesystem(protocol_of(url)).rm_file(url))
            else:
                (self.local / name).unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"{url}: cannot be removed ({error.strerror})") from error
