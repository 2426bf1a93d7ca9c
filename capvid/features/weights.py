"""The weights of backbones: where they are, whether they are the right ones, and how they come in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capvid.bundled import FOLDER
from capvid.errors import WeightsError
from capvid.features.registry import BackboneEntry, backbone_entry
from capvid.files import file_digest

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS_VARIABLE = "CAPVID_WEIGHTS"
CACHE_VARIABLE = "CAPVID_CACHE"


def local_weights(name: str, *, weights: Path | None = None, search: Sequence[Path] = ()) -> Path | None:
    """Say where a backbone's weights file is on this machine, outside the Hub's cache; it is not verified.

    Raises:
        UsageError: no such backbone.
        WeightsError: ``weights`` is given and is not there.
    """
    entry = backbone_entry(name)
    if weights is not None:
        paths = [weights / file for file in _file_names(entry)] if weights.is_dir() else [weights]
        found = next((path for path in paths if path.is_file()), None)
        if found is None:
            raise WeightsError(f"{paths[0]}: no such file, asked for as the weights of {entry.name}")
        return found
    if entry.source.startswith("bundled:"):
        return FOLDER / entry.file
    return next((path for path in _candidates(entry, search) if path.is_file()), None)


def is_here(entry: BackboneEntry) -> bool:
    """Whether the weights are on this machine: given to capvid, or downloaded."""
    if entry.source == "none" or local_weights(entry.name) is not None:
        return True
    if entry.source.startswith("hub:"):
        from capvid import hub

        return hub.cached(entry.source, entry.file, alternatives=entry.alternatives) is not None
    if entry.source.startswith("torchvision:"):
        from capvid import torchvision_weights

        return torchvision_weights.cached(entry.source) is not None
    return False


def cache_folder() -> Path:
    """Give capvid's cache: ``CAPVID_CACHE``, otherwise ``~/.cache/capvid``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "capvid")


def own_file_name(entry: BackboneEntry) -> str:
    """Name under which weights are looked for; many files on the Hub are called model.safetensors."""
    return entry.file if entry.source.startswith(("file:", "bundled:")) else f"{entry.name}.safetensors"


def _file_names(entry: BackboneEntry) -> list[str]:
    names = [own_file_name(entry)]
    return [*names, entry.file] if entry.source.startswith("torchvision:") else names


def _candidates(entry: BackboneEntry, search: Sequence[Path]) -> list[Path]:
    given = [Path(item) for item in os.environ.get(WEIGHTS_VARIABLE, "").split(os.pathsep) if item]
    places = [*search, *given, cache_folder() / "weights"]
    return [
        place if place.name == name and not place.is_dir() else place / name
        for place in places
        for name in _file_names(entry)
    ]


def find_weights(entry: BackboneEntry, weights: Path | None, search: Sequence[Path]) -> tuple[Path, str]:
    """Find the weights file and give its path and digest, checked where the digest is known.

    Raises:
        WeightsError: it is nowhere, or another than the one expected.
        HubError: it should come from the Hugging Face Hub and does not.
    """
    path = local_weights(entry.name, weights=weights, search=search) or _fetch(entry)
    if path is None:
        looked = ", ".join(dict.fromkeys(str(place.parent) for place in _candidates(entry, search)))
        given = f"give the file with --weights FILE, or set {WEIGHTS_VARIABLE} to it or its folder"
        convert = "" if entry.sha256 else "; `capvid convert` makes it of a downloaded checkpoint"
        raise WeightsError(
            f"no weights of {entry.name}: {own_file_name(entry)} is not in {looked}",
            remedy=given + convert,
        )
    digest = file_digest(path)
    own = weights is not None and entry.source.startswith("bundled:")  # trained anew by the user
    if entry.sha256 is not None and digest != entry.sha256 and not own:
        raise WeightsError(
            f"{path}: not the weights of {entry.name} "
            f"(sha256 {digest[:12]}..., expected {entry.sha256[:12]}...)",
            remedy=f"give the right {own_file_name(entry)}; it may be damaged or another file of that name",
        )
    return path, digest


def _fetch(entry: BackboneEntry) -> Path | None:
    """Download the weights, or find what was downloaded before; ``None`` where they cannot be downloaded."""
    if entry.source.startswith("hub:"):
        from capvid import hub

        return hub.fetch(entry.source, entry.file, sha256=entry.sha256, alternatives=entry.alternatives)
    if entry.source.startswith("torchvision:"):
        from capvid import torchvision_weights

        return torchvision_weights.fetch(entry.source)
    return None


def fill(module: nn.Module, path: Path, entry: BackboneEntry) -> None:
    """Load the weights of a backbone from a file.

    Raises:
        WeightsError: the file cannot be read, or holds no or other tensors of some name.
    """
    from capvid.features.tensors import read_tensors

    fill_from(module, read_tensors(path), path, entry.name)


def fill_from(module: nn.Module, tensors: dict[str, Tensor], path: Path, network: str) -> None:
    """Load the ``tensors`` of a file; those of a classifier that the module leaves out are passed over.

    How many batches a batch normalisation has seen is of no use here, and old files do not say it.

    Raises:
        WeightsError: there are no or other tensors of some name; ``path`` and ``network`` are named.
    """
    import torch

    wanted = module.state_dict()
    for name in wanted.keys() - tensors.keys():
        if name.endswith("num_batches_tracked"):
            tensors[name] = torch.zeros((), dtype=torch.int64)
    missing = sorted(wanted.keys() - tensors.keys())
    other = sorted(k for k in wanted.keys() & tensors.keys() if wanted[k].shape != tensors[k].shape)
    if missing or other:
        raise WeightsError(
            f"{path}: not the weights of {network} ({len(missing)} tensors missing, {len(other)} of "
            f"another shape, such as {(missing + other)[0]})",
            remedy="give the file of the backbone that was asked for; `capvid convert` renames tensors",
        )
    module.load_state_dict({name: tensors[name] for name in wanted})
