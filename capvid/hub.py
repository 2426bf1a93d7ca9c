"""Weights from the Hugging Face Hub: always one commit, always verified.

``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` work as in every tool that uses the Hub.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from capvid.errors import HubError
from capvid.files import atomic_write_text, sha256_file

_SOURCE = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})")
_RECORDS = "capvid-digests.json"


def fetch(source: str, filename: str, *, sha256: str | None = None) -> Path:
    """Give a file of a Hub repository at one commit, downloaded unless it is in the cache.

    Where no digest is known, that of the first download is recorded in ``HF_HOME`` and checked from then on
    (a cache that cannot be written to goes without).

    Args:
        source: ``hub:OWNER/NAME@COMMIT`` with the 40 hexadecimal digits of the commit.
        filename: path of the file in the repository.
        sha256: the digest, where it is known.

    Raises:
        HubError: a source of another form, no such file, no connection, or content that has changed.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise HubError(
            f"{source}: not a pinned Hub source", remedy="write it as hub:OWNER/NAME@40-HEX-COMMIT"
        )
    repository, revision = match["repository"], match["revision"]
    path = _download(repository, revision, filename)
    name = f"{repository}@{revision}/{filename}"
    expected = sha256 or _recorded().get(name)
    found = sha256_file(path)
    if expected is None:
        _record(name, found)
    elif found != expected:
        raise HubError(
            f"{repository}: {filename} has changed (sha256 {found[:12]}..., expected {expected[:12]}...)",
            remedy=f"delete {path.resolve()} and try again; if it stays so, do not trust the file",
        )
    return path


def _download(repository: str, revision: str, filename: str) -> Path:
    from huggingface_hub import (
        constants,
        errors,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    cached = try_to_load_from_cache(repository, filename, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    what = f"{repository} at {revision[:8]}"
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{what}: {filename} is not in the cache, and HF_HUB_OFFLINE forbids downloads",
            remedy="unset HF_HUB_OFFLINE once, or give the file with --weights FILE",
        )
    try:
        with _quiet():
            # one question without retries: the download itself goes on trying for half a minute or more
            get_hf_file_metadata(hf_hub_url(repository, filename, revision=revision))
            return Path(hf_hub_download(repository, filename, revision=revision))
    except errors.GatedRepoError as error:
        raise HubError(f"{what}: access is restricted", remedy="ask for it, then set HF_TOKEN") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise HubError(
            f"{what}: {constants.ENDPOINT} has no such file ({filename})",
            remedy="check HF_ENDPOINT, or give the file with --weights FILE",
        ) from error
    except (
        Exception
    ) as error:  # which of the HTTP library's errors come through depends on the client's version
        raise _unreachable(what, constants.ENDPOINT, error) from error


def _unreachable(what: str, endpoint: str, error: Exception) -> HubError:
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = str(root).strip().splitlines()
    cause = lines[0] if lines else type(root).__name__
    return HubError(
        f"{what}: cannot be downloaded from {endpoint} ({cause})",
        remedy="check the connection, or give the file with --weights FILE",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client's log and, unless stderr is a terminal, its progress bars silent."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    hide = not are_progress_bars_disabled() and not (sys.stderr and sys.stderr.isatty())
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hide:
            enable_progress_bars()


def _records_path() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / _RECORDS


def _recorded() -> dict[str, str]:
    path = _records_path()
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise HubError(
            f"{path}: cannot be read ({error})", remedy="delete it; digests are recorded anew"
        ) from error
    if not isinstance(records, dict):
        raise HubError(f"{path}: not a record of digests", remedy="delete it; digests are recorded anew")
    return records


def _record(name: str, digest: str) -> None:
    records = {**_recorded(), name: digest}
    with suppress(OSError):
        atomic_write_text(_records_path(), json.dumps(records, indent=1, sort_keys=True) + "\n")
