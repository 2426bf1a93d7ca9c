"""Files from the Hugging Face Hub: always one commit, always verified.

``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` work as in every tool that uses the Hub.
The Hub's own client resumes broken downloads and shares one between processes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from capvid.errors import HubError
from capvid.utils.files import atomic_write_text, read_regular, sha256_file
from capvid.utils.validation import parse_json

_SOURCE = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[0-9a-f]{40}))?")


_RECORDS = "capvid-digests.json"
_MAX_RECORD_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class HubRepository:
    """A repository at a commit, and the remedies for files that cannot be fetched from there.

    Attributes:
        repository: ``OWNER/NAME``.
        revision: 40 hexadecimal digits of the commit; None before the first download from a branch.
        branch: branch or tag that applies without a commit.
        all_files: whether the command for a manual download is for the complete repository.
        instead: alternative to a download.
    """

    repository: str
    revision: str | None = None
    branch: str = "main"
    all_files: bool = False
    instead: str = "give the file with --weights FILE"

    def __str__(self) -> str:
        return f"{self.repository} at {self.revision[:8] if self.revision else self.branch}"

    @property
    def reference(self) -> str:
        """Name under which the branch's commit is recorded."""
        return f"{self.repository}@{self.branch}"

    def remedy(self, filename: str) -> str:
        """Return how to get the file manually."""
        wanted = self.revision or ("" if self.branch == "main" else self.branch)
        revision = f" --revision {wanted}" if wanted else ""
        file = "" if self.all_files else f" {filename}"
        return f"run `hf download {self.repository}{file}{revision}`, or {self.instead}"


def fetch(
    source: str | HubRepository, filename: str, *, sha256: str | None = None, alternatives: Sequence[str] = ()
) -> Path:
    """Return the path of a file of a Hub repository at one commit, downloading it unless it is cached.

    Without a commit, that of the branch at the first download is recorded in ``HF_HOME`` and stays. Without a
    digest, that of the first download is recorded there too and checked from then on.

    Args:
        source: ``hub:OWNER/NAME@COMMIT`` with the 40 hexadecimal digits of the commit, ``hub:OWNER/NAME``, or
            a :class:`HubRepository`.
        filename: path of the file in the repository.
        sha256: digest of the file, if known.
        alternatives: names to try in this order where the repository has no ``filename``.

    Raises:
        HubError: malformed source, no such file, no connection, or changed content.
    """
    repo = _pinned(source)
    names = (filename, *alternatives)
    path, name = _cached(repo, names) or _download(repo, names)
    commit = path.parents[name.count("/")].name
    if repo.revision is None:
        record(repo.reference, commit)
    digest = sha256_file(path)
    expected = sha256 or record(f"{repo.repository}@{commit}/{name}", digest)
    if digest != expected:
        raise HubError(
            f"{repo.repository}: {name} has changed (sha256 {digest[:12]}..., expected {expected[:12]}...)",
            remedy=f"delete {path.resolve()} and try again; if it stays so, do not trust the file",
        )
    return path


def cached(source: str | HubRepository, filename: str, *, alternatives: Sequence[str] = ()) -> Path | None:
    """Return the path that ``fetch`` would return if the file is cached, without verification.

    Raises:
        HubError: malformed source.
    """
    file = _cached(_pinned(source), (filename, *alternatives))
    return file and file[0]


def _pinned(source: str | HubRepository) -> HubRepository:
    if isinstance(source, HubRepository):
        return replace(source, revision=source.revision or recorded(source.reference))
    match = _SOURCE.fullmatch(source)
    if match is None:
        remedy = "write it as hub:OWNER/NAME@40-HEX-COMMIT"
        raise HubError(f"{source}: not a pinned Hub source", remedy=remedy)
    return _pinned(HubRepository(repository=match["repository"], revision=match["revision"]))


def _cached(repo: HubRepository, names: Sequence[str]) -> tuple[Path, str] | None:
    """Return path and name of the first of the files that is in the cache."""
    from huggingface_hub import try_to_load_from_cache

    for name in names:
        cached_path = try_to_load_from_cache(repo.repository, name, revision=repo.revision or repo.branch)
        if isinstance(cached_path, str):
            return Path(cached_path), name
    return None


def _download(repo: HubRepository, names: Sequence[str]) -> tuple[Path, str]:
    """Download the first of the files that exists; return its path and name."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    name = names[0]
    if constants.HF_HUB_OFFLINE:
        problem = f"{repo}: {' or '.join(names)} is not in the cache, and HF_HUB_OFFLINE forbids downloads"
        raise HubError(problem, remedy=f"where there is a network {repo.remedy(name)}")
    try:
        with quiet():
            # one request without retries: the download itself retries for half a minute or more
            url = hf_hub_url(repo.repository, name, revision=repo.revision or repo.branch)
            commit = get_hf_file_metadata(url).commit_hash
            if commit is None:
                raise HubError(f"{repo}: {constants.ENDPOINT} does not say which commit that is")
            revision = repo.revision or record(repo.reference, commit)
            return Path(hf_hub_download(repo.repository, name, revision=revision)), name
    except HubError:
        raise
    except Exception as error:  # which of the HTTP library's errors come through depends on the version
        missing = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
        gone = isinstance(error, missing) and not isinstance(error, errors.LocalEntryNotFoundError)
        if gone and isinstance(error, errors.EntryNotFoundError) and len(names) > 1:
            return _download(repo, names[1:])
        if isinstance(error, errors.GatedRepoError):
            message, remedy = f"{repo}: access is restricted", "ask for it, then set HF_TOKEN"
        elif gone:
            hidden = isinstance(error, errors.RepositoryNotFoundError)
            private = ", log in with `hf auth login` if it is private" if hidden else ""
            message = f"{repo}: {constants.ENDPOINT} has no such file ({name})"
            remedy = f"check HF_ENDPOINT{private}, or {repo.instead}"
        else:
            message = f"{repo}: {name} cannot be downloaded from {constants.ENDPOINT} ({cause(error)})"
            remedy = f"check the connection, {repo.remedy(name)}"
        raise HubError(message, remedy=remedy) from error


def cause(error: Exception) -> str:
    """Return the first line of an error's root cause."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = str(root).strip().splitlines()
    return lines[0] if lines else type(root).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the client's log and, unless stderr is a terminal, its progress bars."""
    from huggingface_hub import utils

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    hide = not utils.are_progress_bars_disabled() and not (sys.stderr and sys.stderr.isatty())
    if hide:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hide:
            utils.enable_progress_bars()


def recorded(name: str) -> str | None:
    """Return the value recorded for ``name``; raise HubError if the records are damaged."""
    return _read().get(name)


def record(name: str, value: str) -> str:
    """Record ``value`` for ``name`` unless there is one, and return the recorded value.

    Raises:
        HubError: the records are damaged.
    """
    from huggingface_hub.utils import WeakFileLock

    path = _path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(path.with_suffix(".lock")):
            records = _read()
            if name not in records:
                records[name] = value
                atomic_write_text(path, json.dumps(records, indent=1, sort_keys=True) + "\n")
            return records[name]
    return recorded(name) or value


def _path() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / _RECORDS


def _read() -> dict[str, str]:
    path, remedy = _path(), "delete it; digests are recorded anew"
    try:
        records = parse_json(read_regular(path, max_bytes=_MAX_RECORD_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise HubError(f"{path}: cannot be read ({error})", remedy=remedy) from error
    if not isinstance(records, dict) or not all(isinstance(value, str) for value in records.values()):
        raise HubError(f"{path}: not a record of digests", remedy=remedy)
    return records
