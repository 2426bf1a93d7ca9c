"""Weights files of backbones: found, verified and loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capvid.backbones.catalog import BUNDLED as BUNDLED
from capvid.backbones.catalog import BackboneEntry, backbone_entry
from capvid.errors import WeightsError
from capvid.utils.files import file_digest

if TYPE_CHECKING:
    from torch import Tensor, nn

COUNTER = "num_batches_tracked"  # a tensor of batch normalisation that old files lack


def local_weights(name: str, *, weights: Path | None = None, search: Sequence[Path] = ()) -> Path | None:
    """Return the unverified weights file of a backbone on this machine, outside the Hub's cache."""
    entry = backbone_entry(name)
    if weights is not None:
        paths = [weights / file for file in _file_names(entry)] if weights.is_dir() else [weights]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise WeightsError(f"{paths[0]}: no such file, asked for as the weights of {entry.name}")
        return path
    if entry.source.startswith("bundled:"):
        return BUNDLED / entry.file
    return next((path for path in _candidates(entry, search) if path.is_file()), None)


def is_here(entry: BackboneEntry) -> bool:
    """Whether no download is needed to use a backbone."""
    return (
        entry.source == "none"
        or local_weights(entry.name) is not None
        or _remote_weights(entry, download=False) is not None
    )


def own_file_name(entry: BackboneEntry) -> str:
    """Return the file name to look for; many files on the Hub are called model.safetensors."""
    return entry.file if entry.source.startswith(("file:", "bundled:")) else f"{entry.name}.safetensors"


def _file_names(entry: BackboneEntry) -> list[str]:
    return [own_file_name(entry), *([entry.file] if entry.source.startswith("torchvision:") else [])]


def _candidates(entry: BackboneEntry, search: Sequence[Path]) -> list[Path]:
    listed = [Path(item) for item in os.environ.get("CAPVID_WEIGHTS", "").split(os.pathsep) if item]
    cache = Path(os.environ.get("CAPVID_CACHE") or Path.home() / ".cache" / "capvid")
    return [
        path if path.name == name and not path.is_dir() else path / name
        for path in (*search, *listed, cache / "weights")
        for name in _file_names(entry)
    ]


def _remote_weights(entry: BackboneEntry, *, download: bool) -> Path | None:
    """Return the downloaded weights; ``None`` if they are not there or cannot be downloaded."""
    if entry.source.startswith("hub:"):
        from capvid.hub import client as hub

        if not download:
            return hub.cached(entry.source, entry.file, alternatives=entry.alternatives)
        return hub.fetch(entry.source, entry.file, sha256=entry.sha256, alternatives=entry.alternatives)
    if entry.source.startswith("torchvision:"):
        from capvid.hub import torchvision_weights

        return (torchvision_weights.fetch if download else torchvision_weights.cached)(entry.source)
    return None


def find_weights(entry: BackboneEntry, weights: Path | None, search: Sequence[Path]) -> tuple[Path, str]:
    """Return the path of the weights file, downloaded if need be, and its digest, verified where known.

    Raises:
        WeightsError: no such file, or one with another digest.
        HubError: the download failed.
    """
    path = local_weights(entry.name, weights=weights, search=search) or _remote_weights(entry, download=True)
    if path is None:
        folders = ", ".join(dict.fromkeys(str(path.parent) for path in _candidates(entry, search)))
        convert = "" if entry.sha256 else "; `capvid convert` makes it of a downloaded checkpoint"
        raise WeightsError(
            f"no weights of {entry.name}: {own_file_name(entry)} is not in {folders}",
            remedy="give the file with --weights FILE, or set CAPVID_WEIGHTS to it or its folder" + convert,
        )
    digest = file_digest(path)
    retrained = weights is not None and entry.source.startswith("bundled:")
    if entry.sha256 is not None and digest != entry.sha256 and not retrained:
        raise WeightsError(
            f"{path}: not the weights of {entry.name} "
            f"(sha256 {digest[:12]}..., expected {entry.sha256[:12]}...)",
            remedy=f"give the right {own_file_name(entry)}; it may be damaged or another file of that name",
        )
    return path, digest


def fill(module: nn.Module, path: Path, network: str, tensors: dict[str, Tensor] | None = None) -> None:
    """Load the weights of a network from a file, of which the ``tensors`` may have been read already.

    Tensors that the module lacks, such as a classifier, are ignored. Old files lack the counters of batch
    normalisation, which nothing depends on.

    Raises:
        WeightsError: tensors are missing or of another shape; ``path`` and ``network`` are named.
    """
    import torch

    from capvid.utils.tensor_files import read_tensors

    tensors = read_tensors(path) if tensors is None else tensors
    wanted = module.state_dict()
    for name in wanted.keys() - tensors.keys():
        if name.endswith(COUNTER):
            tensors[name] = torch.zeros((), dtype=torch.int64)
    missing = sorted(wanted.keys() - tensors.keys())
    other = [name for name, tensor in wanted.items() if tensors.get(name, tensor).shape != tensor.shape]
    if missing or other:
        raise WeightsError(
            f"{path}: not the weights of {network} ({len(missing)} tensors missing, {len(other)} of "
            f"another shape, such as {(missing + sorted(other))[0]})",
            remedy="give the file of the backbone that was asked for; `capvid convert` renames tensors",
        )
    module.load_state_dict({name: tensors[name] for name in wanted})
