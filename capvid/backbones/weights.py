"""Weights files of backbones: lookup, download, verification and loading.

torchvision's file names end with the first digits of the SHA-256, which are always checked; the full digest
is recorded at the first use, as for files of the Hub, and so is that of files from web servers.
``HF_HUB_OFFLINE`` forbids all downloads.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capvid.backbones.catalog import BUNDLED as BUNDLED
from capvid.backbones.catalog import BackboneEntry, backbone_entry
from capvid.errors import UsageError, WeightsError
from capvid.utils.files import atomic_path, atomic_write_text, cache_folder, read_regular, sha256_file
from capvid.utils.validation import MIB, parse_json

if TYPE_CHECKING:
    from torch import Tensor, nn

WEB_SECONDS = 30.0  # for a download from a web server
_MAX_WEB_BYTES = 64 * MIB
# seconds before a download is tried again by default: after a failure that showed at once, or after any other
_PAUSES = (60.0, 24 * 3600.0)
_AT_ONCE = 2.0  # seconds
COUNTER = "num_batches_tracked"  # tensor of batch normalisation that old files lack and inference ignores


def local_weights(name: str, *, weights: Path | None = None, search: Sequence[Path] = ()) -> Path | None:
    """Return a backbone's weights file on this machine, not verified, outside the Hub's cache."""
    entry = backbone_entry(name)
    if weights is not None:
        paths = [weights / file for file in _file_names(entry)] if weights.is_dir() else [weights]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise WeightsError(f"{paths[0]}: no such weights file of {entry.name}")
        return path
    if entry.source.startswith("bundled:"):
        return BUNDLED / entry.file
    return next((path for path in _candidates(entry, search) if path.is_file()), None)


def is_available(entry: BackboneEntry) -> bool:
    """Return whether a backbone can be used without a download."""
    return (
        entry.source == "none"
        or local_weights(entry.name) is not None
        or _remote_weights(entry, download=False) is not None
    )


def own_file_name(entry: BackboneEntry) -> str:
    """Return a file name of its own for a backbone; many files on the Hub are called model.safetensors."""
    own = entry.urls or entry.source.startswith(("file:", "bundled:"))
    return entry.file if own else f"{entry.name}.safetensors"


def _file_names(entry: BackboneEntry) -> list[str]:
    published = [entry.file] if entry.source.startswith("torchvision:") else [*entry.urls]
    return [own_file_name(entry), *published]


def _candidates(entry: BackboneEntry, search: Sequence[Path]) -> list[Path]:
    listed = [Path(item) for item in os.environ.get("CAPVID_WEIGHTS", "").split(os.pathsep) if item]
    return [
        path if path.name == name and not path.is_dir() else path / name
        for path in (*search, *listed, cache_folder() / "weights")
        for name in _file_names(entry)
    ]


def _remote_weights(entry: BackboneEntry, *, download: bool) -> Path | None:
    """Return weights cached from the Hub or torchvision, or downloaded; ``None`` if there are none."""
    if entry.urls:
        return fetch_web(entry) if download else None
    if entry.source.startswith("hub:"):
        from capvid.hub import client as hub

        if not download:
            return hub.cached(entry.source, entry.file, alternatives=entry.alternatives)
        if not entry.is_free and _remote_weights(entry, download=False) is None:
            message = "note: the weights of %s have a licence of their own: %s; `capvid models %s` says more"
            logging.getLogger("capvid").warning(message, entry.name, entry.licence, entry.name)
        return hub.fetch(entry.source, entry.file, sha256=entry.sha256, alternatives=entry.alternatives)
    if entry.source.startswith("torchvision:"):
        return fetch_torchvision(entry.source) if download else _cached_torchvision(entry.source)
    return None


def fetch_web(entry: BackboneEntry, *, search: Sequence[Path] = (), insist: bool = True) -> Path:
    """Return a backbone's weights, downloaded to the cache from a web server unless they are there.

    A failure is remembered in the cache, for a day unless it showed at once. Of several processes one
    downloads, and the others wait for it.

    Args:
        entry: a backbone with ``urls``; the first of the files that has its fingerprint is taken.
        search: as for :func:`local_weights`.
        insist: whether to try again although it has failed lately.

    Raises:
        WeightsError: no file that is there, or can be downloaded, holds these weights.
    """
    from filelock import FileLock
    from huggingface_hub import constants

    from capvid.backbones.x3d_checkpoints import read_checked

    path = local_weights(entry.name, search=search)
    if path is not None:
        if not _is_pinned(entry, path):
            read_checked(entry, path)
        return path
    folder = cache_folder() / "weights"
    url = next(iter(entry.urls.values()))
    remedy = f"download {url} elsewhere and give it with --weights FILE, or put it into {folder}"
    if constants.HF_HUB_OFFLINE:
        problem = f"the weights of {entry.name} are not there, and HF_HUB_OFFLINE forbids downloads"
        raise WeightsError(problem, remedy=remedy)
    failure = folder / f"{entry.name}.failed.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{entry.name}.lock", timeout=WEB_SECONDS + 5):
            if (path := local_weights(entry.name)) is not None:  # another process was faster
                return path
            if not insist and (reason := _recent_failure(failure)):
                problem = f"the weights of {entry.name} could not be downloaded lately ({reason})"
                raise WeightsError(problem, remedy="--model with the captioner's name tries again at once")
            begun = time.monotonic()
            try:
                path = _download_web(entry, folder, begun + WEB_SECONDS)
            except (OSError, WeightsError) as error:
                quick = isinstance(error, OSError) and time.monotonic() - begun < _AT_ONCE
                until = time.time() + _PAUSES[0 if quick else 1]
                atomic_write_text(failure, json.dumps({"until": until, "reason": str(error)}) + "\n")
                raise
            failure.unlink(missing_ok=True)
            return path
    except OSError as error:  # of the lock, too
        problem = f"the weights of {entry.name} cannot be downloaded ({error})"
        raise WeightsError(problem, remedy=remedy) from error


def _recent_failure(path: Path) -> str:
    """Return why a download failed lately, or nothing if it may be tried again."""
    try:
        record = parse_json(read_regular(path, max_bytes=MIB))
        lately = 0 < float(record["until"]) - time.time() <= _PAUSES[1]
        return str(record["reason"]) if lately else ""
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def _download_web(entry: BackboneEntry, folder: Path, deadline: float) -> Path:
    """Download the first of a backbone's files that has its fingerprint.

    Raises:
        OSError: none can be downloaded or stored.
        WeightsError: none holds the weights, or one has changed.
    """
    from capvid.backbones.x3d_checkpoints import read_checked
    from capvid.hub.client import record
    from capvid.hub.web import download

    failures: list[OSError | WeightsError] = []
    for name, url in entry.urls.items():
        try:
            data = download(url, seconds=max(0.1, deadline - time.monotonic()), max_bytes=_MAX_WEB_BYTES)
            with atomic_path(folder / name) as temporary:
                # a name by which it is read as a checkpoint, and which an interrupt leaves no trace of
                temporary.write_bytes(data)
                read_checked(entry, temporary)
                if record(url, digest := sha256_file(temporary)) != digest:
                    problem = f"{url} has changed since its first download (sha256 now {digest[:12]}...)"
                    raise WeightsError(problem, remedy="do not trust the file")
        except (OSError, WeightsError) as error:
            failures.append(error)
            continue
        note = "note: downloaded the weights of %s (%.0f MB) from %s, once"
        logging.getLogger("capvid").warning(note, entry.name, len(data) / 1e6, url)
        return folder / name
    # that a file holds other weights says more than that the next address has none
    raise next((error for error in failures if isinstance(error, WeightsError)), failures[0])


def _is_pinned(entry: BackboneEntry, path: Path) -> bool:
    """Return whether a file is known to hold a web server's weights: its digest was seen before.

    Raises:
        WeightsError: it has changed since it was downloaded.
    """
    from capvid.hub.client import recorded

    digest = sha256_file(path)
    known = recorded(entry.urls.get(path.name, "")) if path.parent == cache_folder() / "weights" else None
    if known not in (None, digest):
        problem = f"{path}: has changed since its download (sha256 {digest[:12]}..., then {known[:12]}...)"
        raise WeightsError(problem, remedy="delete it, and it is downloaded again")
    return digest in (entry.sha256, known)


def fetch_torchvision(source: str) -> Path:
    """Return the file of torchvision weights, downloading it unless it is cached.

    Args:
        source: ``torchvision:ENUM.MEMBER``, such as ``torchvision:R3D_18_Weights.KINETICS400_V1``.

    Raises:
        UsageError: torchvision has no such weights.
        WeightsError: the file cannot be downloaded, or has another digest.
    """
    from capvid.hub.client import record

    url = _torchvision_url(source)
    path = _torch_folder() / url.rpartition("/")[2]
    match = re.search(r"-([0-9a-f]{8,})\.\w+$", url)  # such as s3d-d76dad2f.pth
    expected = match[1] if match else ""
    if not path.is_file():
        _download(url, path, expected)
    digest = sha256_file(path)
    if digest.startswith(expected):
        expected = record(url, digest)
    if not digest.startswith(expected):
        problem = f"{path}: not the file of {url} (sha256 {digest[:12]}..., expected {expected[:12]}...)"
        raise WeightsError(problem, remedy="delete it and try again; if it stays so, do not trust the file")
    return path


def _cached_torchvision(source: str) -> Path | None:
    """Return the file of torchvision weights if it is cached, without verification."""
    if not any(_torch_folder().glob("*")):  # checked before torchvision is imported, which takes seconds
        return None
    path = _torch_folder() / _torchvision_url(source).rpartition("/")[2]
    return path if path.is_file() else None


def _torchvision_url(source: str) -> str:
    from torchvision.models import get_weight

    try:
        return str(get_weight(source.removeprefix("torchvision:")).url)
    except (KeyError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{source}: the installed torchvision has no such weights",
            remedy="write it as torchvision:ENUM.MEMBER, or upgrade torchvision",
        ) from error


def _torch_folder() -> Path:
    """Return torch's download folder; torch itself is asked only if it is imported already."""
    if "torch" in sys.modules:
        return Path(sys.modules["torch"].hub.get_dir()) / "checkpoints"
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("TORCH_HOME", str(Path(cache) / "torch"))
    return Path(home).expanduser() / "hub" / "checkpoints"


def _download(url: str, path: Path, digest_prefix: str) -> None:
    import torch
    from huggingface_hub import constants

    remedy = f"download {url} elsewhere and put it at {path}, or give it with --weights FILE"
    if constants.HF_HUB_OFFLINE:
        raise WeightsError(f"{path.name}: not there, and HF_HUB_OFFLINE forbids downloads", remedy=remedy)
    terminal = bool(sys.stderr and sys.stderr.isatty())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest_prefix or None, progress=terminal)
    except (OSError, RuntimeError, EOFError, ValueError) as error:  # RuntimeError: another digest
        cause = " ".join(str(error).split()) or type(error).__name__
        raise WeightsError(f"{path.name}: cannot be downloaded ({cause})", remedy=remedy) from error


def find_weights(entry: BackboneEntry, weights: Path | None, search: Sequence[Path]) -> tuple[Path, str]:
    """Return the weights file, downloaded if necessary, and its digest, verified if the catalogue has one.

    Raises:
        WeightsError: there is no such file, or its digest is another.
        HubError: the download failed.
    """
    path = local_weights(entry.name, weights=weights, search=search) or _remote_weights(entry, download=True)
    if path is None:
        folders = ", ".join(dict.fromkeys(str(path.parent) for path in _candidates(entry, search)))
        remedy = "give the file with --weights FILE, or set CAPVID_WEIGHTS to it or its folder"
        if not entry.sha256:
            remedy += "; `capvid convert` makes it from a downloaded checkpoint"
        problem = f"no weights of {entry.name}: {own_file_name(entry)} is not in {folders}"
        raise WeightsError(problem, remedy=remedy)
    digest = sha256_file(path)
    if entry.fingerprint is not None:
        _is_pinned(entry, path)
        return path, digest
    retrained = weights is not None and entry.source.startswith("bundled:")
    if entry.sha256 is not None and digest != entry.sha256 and not retrained:
        raise WeightsError(
            f"{path}: not the weights of {entry.name} "
            f"(sha256 {digest[:12]}..., expected {entry.sha256[:12]}...)",
            remedy=f"give the right {own_file_name(entry)}; this one is damaged or another file of that name",
        )
    return path, digest


def load_weights(
    module: nn.Module, path: Path, network: str, tensors: dict[str, Tensor] | None = None
) -> None:
    """Load the weights of a network from a file, ignoring tensors that it lacks, such as a classifier.

    Args:
        module: the network.
        path: the weights file.
        network: name of the network, for errors.
        tensors: tensors of the file by name, if they have been read already.

    Raises:
        WeightsError: tensors are missing or have other shapes.
    """
    import torch

    from capvid.utils.tensor_files import read_tensors

    tensors = read_tensors(path) if tensors is None else tensors
    expected = module.state_dict()
    for name in expected.keys() - tensors.keys():
        if name.endswith(COUNTER):
            tensors[name] = torch.zeros((), dtype=torch.int64)
    missing = sorted(expected.keys() - tensors.keys())
    misshapen = [name for name, tensor in expected.items() if tensors.get(name, tensor).shape != tensor.shape]
    if missing or misshapen:
        raise WeightsError(
            f"{path}: not the weights of {network} ({len(missing)} tensors missing, {len(misshapen)} of "
            f"another shape, such as {(missing + sorted(misshapen))[0]})",
            remedy="give the requested backbone's file; `capvid convert` renames tensors",
        )
    module.load_state_dict({name: tensors[name] for name in expected})
