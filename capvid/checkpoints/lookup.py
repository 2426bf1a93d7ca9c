"""Trained captioners by name, folder or Hub id, with the backbones they need."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from capvid.backbones.catalog import (
    BUNDLED,
    BackboneEntry,
    CaptionerEntry,
    backbone_entry,
    backbones,
    captioners,
    default_captioners,
)
from capvid.backbones.weights import fetch_web
from capvid.captioners.checkpoint import (
    CONFIG,
    WEIGHTS,
    Checkpoint,
    holds_checkpoint,
    load_checkpoint,
    read_config,
)
from capvid.errors import CapvidError, CheckpointError, FeatureMismatchError, UsageError
from capvid.utils.files import sha256_file
from capvid.utils.registry import did_you_mean

if TYPE_CHECKING:
    from capvid.backbones.backbone import Backbone
    from capvid.checkpoints.hub_checkpoints import HubModel


def default_model(begun: str | None = None, *, weights: str | Path | None = None) -> str:
    """Return the name of the captioner to use where none is named.

    This is the first of the defaults whose backbones are on this machine or can be downloaded within 30
    seconds; a failed download is not tried again for a while. The last one needs no download.

    Args:
        begun: captioner (``name@revision``) of the run that is continued, which stays if it is a default.
        weights: file or folder of backbones' weights.
    """
    *preferred, last = default_captioners()
    name = (begun or "").partition("@")[0]
    if name in default_captioners():
        return name
    for name in preferred:
        try:
            for backbone in backbones_of(name):
                if backbone.urls:
                    fetch_web(backbone, search=[] if weights is None else [Path(weights)], insist=False)
        except CapvidError as error:
            note = "note: captioning with %s instead of %s: %s"
            logging.getLogger("capvid").warning(note, last, name, error)
        else:
            return name
    return last


def backbones_of(name: str) -> list[BackboneEntry]:
    """Return the backbones that a bundled captioner needs."""
    streams = read_config(model_folder(name))["features"]["streams"]
    return [backbone_entry(backbone) for backbone in dict.fromkeys(stream["backbone"] for stream in streams)]


def model_folder(model: str | Path | None) -> Path:
    """Return the folder of a captioner by its path or, where there is no such folder, by its name.

    Raises:
        CheckpointError: there is neither, or the files that come with capvid are not as they should be.
        HubError: the name is one on the Hub, and the captioner cannot be had.
    """
    return find_captioner(model)[0]


def load_captioner(
    folder: Path, published: HubModel | None, *, weights: str | Path | None, device: torch.device
) -> tuple[Checkpoint, Callable[[], Sequence[Backbone]], str]:
    """Load the captioner in a folder; return it, a loader of its backbones, and its name for results."""
    if not holds_checkpoint(folder):
        from capvid.vlm.git import GIT_CONFIG, GIT_TYPE, USABLE, load_git, model_type, weights_file

        kind = model_type(folder)
        if weights is not None and kind is not None:
            raise UsageError("this model has its own weights", remedy="leave out --weights")
        if kind == GIT_TYPE:
            name = published.repository if published else GIT_TYPE
            checkpoint, backbone = load_git(folder, name=name, device=device)
            digest = revision(folder, folder / GIT_CONFIG, weights_file(folder)) if published is None else ""
            return checkpoint, lambda: [backbone], published.label if published else f"{GIT_TYPE}@{digest}"
        if kind is not None:
            raise CheckpointError(
                f"{folder}: a model of the type {kind}, which capvid cannot use", remedy=USABLE
            )
    checkpoint = load_checkpoint(folder)
    home = checkpoint.folder or folder  # of a training run, its folder "best"
    # of one kind several captioners are bundled
    named = {_folder(entry): entry.name for entry in captioners().values() if entry.bundled}
    name = named.get(folder, checkpoint.name)
    return (
        checkpoint,
        lambda: _load_backbones(checkpoint, [home, folder], published, weights=weights, device=device),
        published.label if published else f"{name}@{revision(home)}",
    )


def holds_chat_model(folder: Path) -> bool:
    """Return whether a folder contains a chat model of transformers, and no other captioner."""
    if holds_checkpoint(folder):
        return False
    from capvid.vlm.git import GIT_TYPE, model_type

    kind = model_type(folder)
    if kind in (None, GIT_TYPE):
        return False
    from capvid.vlm.chat import is_chat_type

    return is_chat_type(kind)


def chat_label(folder: Path, published: HubModel | None) -> str:
    """Return the name of a chat model for results."""
    from capvid.vlm.chat import chat_weights
    from capvid.vlm.chat_folder import CONFIG as CHAT_CONFIG
    from capvid.vlm.git import model_type

    if published is not None:
        return published.label
    return f"{model_type(folder)}@{revision(folder, folder / CHAT_CONFIG, *chat_weights(folder))}"


def _folder(entry: CaptionerEntry) -> Path:
    """Return the folder of a bundled captioner."""
    return BUNDLED / str(entry.source).partition(":")[2]


def find_captioner(
    model: str | Path | None, *, weights: str | Path | None = None
) -> tuple[Path, HubModel | None]:
    """Return the folder of a captioner, and its Hub model if it comes from there; None is the default."""
    if model is not None and Path(model).is_dir():
        return Path(model), None
    trained = {name: entry for name, entry in captioners().items() if entry.source}
    name = default_model(weights=weights) if model is None else str(model)
    if name not in trained:
        from capvid.checkpoints.hub_checkpoints import fetch_model, is_name

        if isinstance(model, str) and name not in captioners() and is_name(name):
            hub_model = fetch_model(name)
            return hub_model.folder, hub_model
        untrained = name in captioners()
        what = "comes untrained" if untrained else "no such folder, nor a captioner that comes trained"
        raise CheckpointError(
            f"{name}: {what}",
            remedy=f"{did_you_mean(name, trained)} "
            f"give the folder of a captioner that you trained, one of {', '.join(trained)}, or a name "
            "on the Hugging Face Hub (OWNER/NAME)",
        )
    entry = trained[name]
    if not entry.bundled:
        from capvid.checkpoints.hub_checkpoints import fetch_model

        hub_model = fetch_model(str(entry.source).removeprefix("hub:"))
        return hub_model.folder, hub_model
    folder = _folder(entry)
    try:
        digest = sha256_file(folder / WEIGHTS)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the captioner {name} cannot be read ({error.strerror})", remedy="install capvid again"
        ) from error
    if digest != entry.sha256:
        raise CheckpointError(f"{folder}: damaged, not the captioner {name}", remedy="install capvid again")
    return folder, None


def revision(folder: Path, *files: Path) -> str:
    """Return twelve hexadecimal digits of a digest of ``files``, by default those of a checkpoint."""
    digests = map(sha256_file, files or (folder / CONFIG, folder / WEIGHTS))
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


def _load_backbones(
    checkpoint: Checkpoint,
    folders: Sequence[Path],
    published: HubModel | None,
    *,
    weights: str | Path | None,
    device: torch.device,
) -> list[Backbone]:
    """Load the backbones that make the features the captioner was trained on.

    Raises:
        FeatureMismatchError: capvid has no such backbone, or makes other features with it.
        HubError: the captioner was published with their weights, which cannot be downloaded.
    """
    from capvid.backbones.backbone import load_backbone

    if published is not None and weights is None:
        published.fetch_weights(checkpoint.header)
    streams = checkpoint.header.streams
    search = [folder / "weights" for folder in folders]
    file = None if weights is None else Path(weights)
    if file is not None and len(streams) > 1 and not file.is_dir():
        search.insert(0, file)  # the file's name tells which of the backbones it belongs to
        file = None
    loaded = []
    for stream in streams:
        try:
            name = backbone_entry(stream.backbone or "").name
        except UsageError as error:
            reason = f"was trained on features of {stream.backbone}, which capvid cannot make"
            if stream.backbone is None:
                reason = f"does not say which backbone made its {stream.width}-wide features"
            known = ", ".join(backbones())
            raise FeatureMismatchError(
                f"the captioner {reason}",
                remedy=f"give files of its features, or a captioner trained on one of {known}",
            ) from error
        backbone = load_backbone(name, layer=stream.layer, weights=file, device=device, search=search)
        differing = stream.mismatches(backbone.header)
        if differing:
            raise FeatureMismatchError(
                f"{name} here is not the one the captioner was trained on: {', '.join(differing)}",
                remedy="give the weights it was trained on with --weights",
            )
        loaded.append(backbone)
    return loaded
