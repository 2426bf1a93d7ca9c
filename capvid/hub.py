"""Weights from the Hugging Face Hub: always one commit, always verified.

``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` work as in every tool that uses the Hub.
Resuming a download that breaks off and sharing one between processes is left to the Hub's own client.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from capvid.errors import HubError
from capvid.files import file_digest
from capvid.records import record, recorded

_SOURCE = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[0-9a-f]{40}))?")


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file in the cache: its path there, its name in the repository, and the commit it is of."""

    path: Path
    name: str
    revision: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """A repository at a commit, and what a user can do where a file cannot be had from there.

    Attributes:
        repository: ``OWNER/NAME``.
        revision: the commit's 40 hexadecimal digits; ``None`` before the first download from a branch.
        branch: the branch or tag that is meant where there is no commit.
        files: those to name in the command that downloads by hand; empty names the one that is sought.
        whole: whether that command is to download all of the repository.
        instead: what will do in place of a download.
    """

    repository: str
    revision: str | None = None
    branch: str = "main"
    files: tuple[str, ...] = ()
    whole: bool = False
    instead: str = "give the file with --weights FILE"

    def __str__(self) -> str:
        return f"{self.repository} at {self.revision[:8] if self.revision else self.branch}"

    @property
    def reference(self) -> str:
        """The name under which the branch's commit is recorded."""
        return f"{self.repository}@{self.branch}"

    def remedy(self, filename: str) -> str:
        """Say how to get the file by hand."""
        wanted = self.revision or ("" if self.branch == "main" else self.branch)
        revision = f" --revision {wanted}" if wanted else ""
        files = "" if self.whole else f" {' '.join(self.files or (filename,))}"
        return f"run `hf download {self.repository}{files}{revision}`, or {self.instead}"


def fetch(
    source: str | Place, filename: str, *, sha256: str | None = None, alternatives: Sequence[str] = ()
) -> Path:
    """Give a file of a Hub repository at one commit, downloaded unless it is in the cache.

    Where no commit is given, that of the branch at the first download is recorded in ``HF_HOME`` and stays.
    Where no digest is known, that of the first download is recorded there too and checked from then on.

    Args:
        source: ``hub:OWNER/NAME@COMMIT`` with the 40 hexadecimal digits of the commit, ``hub:OWNER/NAME``,
            or the place itself.
        filename: path of the file in the repository.
        sha256: the digest, where it is known.
        alternatives: files that will do where the repository has none of that name, in their order.

    Raises:
        HubError: a source of another form, no such file, no connection, or content that has changed.
    """
    place = _place(source)
    names = (filename, *alternatives)
    file = _cached(place, names) or _download(place, names)
    if place.revision is None:
        record(place.reference, file.revision)
    found = file_digest(file.path)
    expected = sha256 or record(f"{place.repository}@{file.revision}/{file.name}", found)
    if found != expected:
        raise HubError(
            f"{place.repository}: {file.name} has changed (sha256 {found[:12]}..., expected "
            f"{expected[:12]}...)",
            remedy=f"delete {file.path.resolve()} and try again; if it stays so, do not trust the file",
        )
    return file.path


def cached(source: str | Place, filename: str, *, alternatives: Sequence[str] = ()) -> Path | None:
    """Give the file that ``fetch`` would give if it is in the cache, not verified.

    Raises:
        HubError: a source of another form.
    """
    file = _cached(_place(source), (filename, *alternatives))
    return None if file is None else file.path


def _place(source: str | Place) -> Place:
    if isinstance(source, Place):
        return replace(source, revision=source.revision or recorded(source.reference))
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise HubError(
            f"{source}: not a pinned Hub source", remedy="write it as hub:OWNER/NAME@40-HEX-COMMIT"
        )
    return _place(Place(repository=match["repository"], revision=match["revision"]))


def _cached(place: Place, names: Sequence[str]) -> _File | None:
    from huggingface_hub import try_to_load_from_cache

    for name in names:
        found = try_to_load_from_cache(place.repository, name, revision=place.revision or place.branch)
        if isinstance(found, str):
            path = Path(found)
            folder = path.parents[name.count("/")]  # of the commit, and named by it
            return _File(path=path, name=name, revision=folder.name)
    return None


def _download(place: Place, names: Sequence[str]) -> _File:
    """Download the first of the files that there is."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    name = names[0]
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{place}: {name} is not in the cache, and HF_HUB_OFFLINE forbids downloads",
            remedy=f"where there is a network {place.remedy(name)}",
        )
    try:
        with quiet():
            # one question without retries: the download itself goes on trying for half a minute or more
            url = hf_hub_url(place.repository, name, revision=place.revision or place.branch)
            commit = get_hf_file_metadata(url).commit_hash
            if commit is None:
                raise HubError(f"{place}: {constants.ENDPOINT} does not say which commit that is")
            revision = place.revision or record(place.reference, commit)
            path = Path(hf_hub_download(place.repository, name, revision=revision))
            return _File(path=path, name=name, revision=revision)
    except HubError:
        raise
    except Exception as error:  # which of the HTTP library's errors come through depends on the version
        gone = isinstance(error, errors.EntryNotFoundError)
        if gone and not isinstance(error, errors.LocalEntryNotFoundError) and len(names) > 1:
            return _download(place, names[1:])
        raise _explained(error, place, name) from error


def _explained(error: Exception, place: Place, name: str) -> HubError:
    """Say why a download failed and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{place}: access is restricted", remedy="ask for it, then set HF_TOKEN")
    gone = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
    if isinstance(error, gone) and not isinstance(error, errors.LocalEntryNotFoundError):
        hidden = isinstance(error, errors.RepositoryNotFoundError)
        private = ", log in with `hf auth login` if it is private" if hidden else ""
        return HubError(
            f"{place}: {constants.ENDPOINT} has no such file ({name})",
            remedy=f"check HF_ENDPOINT{private}, or {place.instead}",
        )
    return HubError(
        f"{place}: {name} cannot be downloaded from {constants.ENDPOINT} ({cause(error)})",
        remedy=f"check the connection, {place.remedy(name)}",
    )


def cause(error: Exception) -> str:
    """Give the first line of what lies behind an error."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = str(root).strip().splitlines()
    return lines[0] if lines else type(root).__name__


@contextmanager
def quiet() -> Iterator[None]:
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
