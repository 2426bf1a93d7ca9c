"""Videos in tar archives, such as the shards of WebDataset: each is read where it lies, none is unpacked."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from capvid.errors import VideoError
from capvid.storage import Blob, VideoPath, filesystem, is_url, patiently, protocol_of

_HEADERS = 1 << 16  # bytes fetched at a time where only the headers between members are read


def is_archive(path: VideoPath) -> bool:
    """Whether the name is that of a tar archive; compressed ones are none, for they have no places."""
    return path.suffix.lower() == ".tar"


def members(archive: VideoPath) -> Iterator[Blob]:
    """Give the files in a tar archive, in their order; hidden ones are passed over.

    Raises:
        VideoError: it is no tar archive, or cut off.
        StorageError: it cannot be fetched.
    """
    url = str(archive)
    if not is_url(url):
        yield from _listed(archive, url)
        return
    found, error = patiently(url, "read", lambda: _all(archive, url))
    yield from found
    if error is not None:
        raise error


def _all(archive: VideoPath, url: str) -> tuple[list[Blob], VideoError | None]:
    """All members, and what comes after them if that is an error: a try that is made again begins anew."""
    found = []
    try:
        for blob in _listed(archive, url):
            found.append(blob)
    except VideoError as error:
        return found, error
    return found, None


def _listed(archive: VideoPath, url: str) -> Iterator[Blob]:
    try:
        with _opened(url) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (entry := tar.next()) is not None:
                parts = PurePosixPath(entry.name).parts
                tar.members.clear()  # type: ignore[attr-defined]  # of which it would keep all
                if (
                    entry.isreg()
                    and not entry.issparse()
                    and parts
                    and not any(part.startswith(".") for part in parts)
                ):
                    yield Blob(url, entry.name, entry.offset_data, entry.size)
    except tarfile.TarError as error:
        raise VideoError(archive, f"is not a tar archive that can be read ({error})") from error
    except FileNotFoundError as error:
        raise VideoError(archive, "there is no such file") from error


def _opened(url: str) -> Any:
    if not is_url(url):
        return Path(url).open("rb")
    return filesystem(protocol_of(url)).open(url, "rb", cache_type="bytes", block_size=_HEADERS)
