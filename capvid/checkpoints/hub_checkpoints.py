"""Trained captioners on the Hugging Face Hub: download by ``OWNER/NAME[@REVISION]``, and upload."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from capvid.backbones.catalog import BackboneEntry, StreamHeader, backbone_entry, captioners
from capvid.backbones.weights import local_weights, own_file_name
from capvid.captioners.checkpoint import CONFIG, WEIGHTS
from capvid.errors import HubError, UsageError
from capvid.features.feature_file import FeatureHeader
from capvid.hub import client as hub
from capvid.hub.client import record, recorded
from capvid.utils.files import sha256_file
from capvid.vlm.git import GIT_CONFIG, GIT_OPTIONAL, GIT_REQUIRED, GIT_TYPE, USABLE, model_type

WEIGHTS_FOLDER = "weights"
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_INSTEAD = "give the folder of a captioner that capvid trained, of a GIT or of a chat model"
_ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A downloaded captioner: its repository, the commit, and the folder of that commit's files."""

    repository: str
    commit: str
    folder: Path

    @property
    def label(self) -> str:
        """Name and revision for results."""
        return f"{self.repository}@{self.commit[:12]}"

    def fetch_weights(self, header: FeatureHeader) -> None:
        """Download weights of the captioner's backbones that the repository has and this machine lacks.

        They go to ``folder / "weights"``, where the loader of backbones searches.

        Raises:
            HubError: no connection, or content other than that the captioner was trained with.
        """
        for stream in header.streams:
            entry = known_backbone(stream)
            if entry is None or not published_apart(entry):
                continue
            path = local_weights(entry.name)
            if path is None or stream.weights_sha256 not in (None, sha256_file(path)):
                self.fetch_if_there(f"{WEIGHTS_FOLDER}/{own_file_name(entry)}", stream.weights_sha256)

    def fetch_if_there(self, filename: str, sha256: str | None = None) -> None:
        """Download a file, if the commit has it; a missing one is recorded, since that never changes.

        Raises:
            HubError: no connection, or content other than that of the digest.
        """
        from huggingface_hub import constants

        repo = hub.HubRepository(repository=self.repository, revision=self.commit)
        name = f"{self.repository}@{self.commit}/{filename}"
        if recorded(name) == _ABSENT:
            return
        if constants.HF_HUB_OFFLINE and hub.cached(repo, filename) is None:
            return  # the loader reports what is missing if it finds no weights elsewhere
        try:
            hub.fetch(repo, filename, sha256=sha256)
        except HubError as error:
            if not _is_missing(error):
                raise
            record(name, _ABSENT)


def is_name(name: str) -> bool:
    """Whether this is the form of a captioner's name on the Hub: exactly one slash before the revision."""
    try:
        _parse_name(name)
    except UsageError:
        return False
    return True


def _parse_name(name: str) -> tuple[str, str | None]:
    """Return the repository and the revision in a captioner's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name}: not a name on the Hub", remedy="write OWNER/NAME or OWNER/NAME@REVISION")
    check_repository(match["repository"])
    return match["repository"], match["revision"]


def fetch_model(name: str) -> HubModel:
    """Download a captioner from the Hub unless it is in the cache: one of capvid's, a GIT or a chat model.

    A branch or tag (``main`` without a revision) means the commit it was at when first asked for.

    Args:
        name: ``OWNER/NAME``, ``OWNER/NAME@COMMIT`` or ``OWNER/NAME@BRANCH``.

    Raises:
        UsageError: not such a name.
        HubError: there is no such captioner, no connection, or content that has changed.
    """
    repository, revision = _parse_name(name)
    revision = revision or "main"
    known = any(entry.repository == repository for entry in captioners().values())
    repo = hub.HubRepository(
        repository=repository,
        revision=revision if _COMMIT.fullmatch(revision) else None,
        branch=revision,
        all_files=True,
        instead=_INSTEAD,
    )
    first, *others = (GIT_CONFIG,) if known else (CONFIG, GIT_CONFIG)
    try:
        config = hub.fetch(repo, first, alternatives=others)
    except HubError as error:
        if not _is_missing(error):
            raise
        raise HubError(
            f"{repo}: no captioner (neither {CONFIG} nor {GIT_CONFIG} is there)", remedy=USABLE
        ) from error
    folder = config.parent  # named by the commit
    repo = replace(repo, revision=folder.name)
    model = HubModel(repository=repo.repository, commit=folder.name, folder=folder)
    if config.name == CONFIG:
        hub.fetch(repo, WEIGHTS)
        return model
    kind = model_type(folder)
    optional: tuple[str, ...] = GIT_OPTIONAL
    required: tuple[tuple[str, ...], ...] = GIT_REQUIRED
    if kind != GIT_TYPE:
        from capvid.vlm import chat

        if not chat.is_chat_type(kind):
            what = "no captioner" if kind is None else f"a model of the type {kind}, which capvid cannot use"
            raise HubError(f"{repo}: {what}", remedy=USABLE)
        optional, required = chat.OPTIONAL, ((chat.WEIGHTS, chat.INDEX),)
    for filename in optional:
        model.fetch_if_there(filename)
    for filename, *alternatives in required:
        hub.fetch(repo, filename, alternatives=alternatives)
    if kind != GIT_TYPE:
        for path in chat.chat_weights(folder):
            hub.fetch(repo, path.name)
    return model


@dataclass(frozen=True, kw_only=True)
class RemoteModel:
    """A captioner in a Hub repository, before it is downloaded."""

    repository: str
    commit: str
    kind: str | None  # type of the model in transformers, or "capvid"
    licence: str | None
    bytes: int  # of its weights
    parameters: int  # number of weights; estimated if the Hub does not count them

    @property
    def supported(self) -> bool:
        """Whether capvid runs models of this type."""
        from capvid.vlm.chat import is_chat_type

        return self.kind in ("capvid", GIT_TYPE) or is_chat_type(self.kind)


def inspect_model(name: str) -> RemoteModel:
    """Ask the Hub about a captioner by ``OWNER/NAME[@REVISION]``, without downloading it.

    Raises:
        UsageError: this is not such a name.
        HubError: there is no such repository, or no connection.
    """
    from huggingface_hub import HfApi, constants

    repository, revision = _parse_name(name)
    try:
        with hub.quiet():
            info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception as error:  # which of the HTTP library's errors come through depends on the version
        problem = f"{name}: {constants.ENDPOINT} does not describe it ({hub.cause(error)})"
        raise HubError(problem, remedy="check the name and the connection") from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    single = next((sizes[file] for file in (WEIGHTS, *GIT_REQUIRED[-1]) if file in sizes), None)
    shards = sum(size for file, size in sizes.items() if re.fullmatch(r"[^/]+\.safetensors", file))
    size = shards if single is None else single
    counted = info.safetensors.total if info.safetensors else size // 2  # half precision, as most are
    return RemoteModel(
        repository=repository,
        commit=info.sha or "",
        kind="capvid" if CONFIG in sizes else (info.config or {}).get("model_type"),
        licence=getattr(info.card_data, "license", None),
        bytes=size,
        parameters=counted,
    )


def _is_missing(error: HubError) -> bool:
    """Whether the Hub answered that the commit has no such file."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cause = error.__cause__  # LocalEntryNotFoundError, a subclass, is no answer from the Hub
    return isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError)


def check_repository(name: str) -> None:
    """Raise UsageError unless a repository can have this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if name.count("/") != 1 or not name.isascii():
            raise HFValidationError
        for part in (name, *name.split("/")):
            validate_repo_id(part)
    except HFValidationError as error:
        problem = f"{name}: not the name of a repository"
        raise UsageError(problem, remedy="write it as OWNER/NAME, of letters, digits and . - _") from error


def known_backbone(stream: StreamHeader) -> BackboneEntry | None:
    """Return the backbone that made a stream of features; None where capvid does not know it."""
    try:
        return None if stream.backbone is None else backbone_entry(stream.backbone)
    except UsageError:
        return None


def published_apart(entry: BackboneEntry) -> bool:
    """Whether a backbone has weights that do not come with capvid."""
    return entry.source != "none" and not entry.source.startswith("bundled:")


def upload(
    files: Mapping[str, Path | bytes],
    repository: str,
    *,
    private: bool,
    message: str,
    branch: str,
    replaces: Callable[[str], bool],
) -> str:
    """Upload files in one commit and return its hash; repository and branch are created if need be.

    Args:
        files: paths on this machine, or contents, by their names in the repository.
        repository: ``OWNER/NAME``.
        private: create it private; one that is public already is refused.
        message: commit message.
        branch: to commit to.
        replaces: whether a file in the repository is removed unless it is among ``files``.

    Raises:
        HubError: HF_HUB_OFFLINE forbids it, no token, no permission, or no connection.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{repository}: HF_HUB_OFFLINE forbids uploads", remedy="unset it where there is a network"
        )
    if not get_token():
        raise HubError(f"{repository}: no token for the Hub", remedy="run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:
        with hub.quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            api.create_repo(repository, private=private or None, exist_ok=True)
            if private and not api.model_info(repository).private:
                raise HubError(
                    f"{repository}: public already", remedy="make it private on the Hub, or give another name"
                )
            if branch != "main":
                api.create_branch(repository, branch=branch, exist_ok=True)
            siblings = api.model_info(repository, revision=branch).siblings or []
            old = [s.rfilename for s in siblings if s.rfilename not in files and replaces(s.rfilename)]
            operations: list[CommitOperationAdd | CommitOperationDelete] = [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=files[name]) for name in files),
                *(CommitOperationDelete(path_in_repo=name) for name in old),
            ]
            commit = api.create_commit(repository, operations, commit_message=message, revision=branch)
            return str(commit.oid)
    except HubError:
        raise
    except Exception as error:  # which of the HTTP library's errors come through depends on the version
        raise _upload_error(error, repository) from error


def _upload_error(error: Exception, repository: str) -> HubError:
    """Say why an upload failed and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, HfHubHTTPError):
        reason = reason.__cause__
    status = getattr(getattr(reason, "response", None), "status_code", None)
    what = hub.cause(
        error if reason is None or not reason.server_message else Exception(reason.server_message)
    )
    if status == 401:
        problem = f"{constants.ENDPOINT} does not accept the token"
        remedy = "run `hf auth login` again, or set HF_TOKEN to a valid one"
    elif status == 403:
        problem = "the token may not write there"
        remedy = "take a token with the right to write, or a name under your own account"
    elif status is not None:
        problem = f"{constants.ENDPOINT} refuses the upload ({what})"
        remedy = "check the name and the branch, and try again"
    else:
        problem = f"cannot be uploaded to {constants.ENDPOINT} ({what})"
        remedy = "check the connection and HF_ENDPOINT, and try again"
    return HubError(f"{repository}: {problem}", remedy=remedy)
