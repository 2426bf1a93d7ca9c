"""Backbones: frames in, features out, with the weights found and verified.

Notation for tensor shapes: T frames, C frames of the window around each that a network of clips sees,
L locations of a feature map, D width of the layer, h and w height and width of the input.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from capvid.bundled import FOLDER
from capvid.errors import CapvidError, UsageError, WeightsError
from capvid.features.file import StreamHeader
from capvid.features.preprocess import normalise, prepare
from capvid.features.registry import BackboneEntry, Preprocess, backbone_entry
from capvid.files import sha256_file
from capvid.video.source import Windows

if TYPE_CHECKING:
    from collections.abc import Callable

WEIGHTS_VARIABLE = "CAPVID_WEIGHTS"
CACHE_VARIABLE = "CAPVID_CACHE"


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A network, the layer taken from it, and the header of the features that it makes.

    Attributes:
        entry: the backbone's entry in the registry.
        layer: name of the layer.
        module: network whose output for (T, 3, h, w), or (T, 3, C, h, w) if it sees clips, is (T, D) or
            (T, L, D).
        header: what the features are.
        device: where the network computes.
    """

    entry: BackboneEntry
    layer: str
    module: nn.Module
    header: StreamHeader
    device: torch.device

    def __call__(self, frames: np.ndarray | Tensor, *, batch_size: int = 32) -> np.ndarray:
        """Compute the features of RGB frames.

        Args:
            frames: (T, H, W, 3) uint8, T >= 1; a network of clips sees each as a still, C times the same, or
                takes windows (T, C, H, W, 3).
            batch_size: frames computed together; it bounds the memory and changes no result.

        Returns:
            (T, D) or (T, L, D), float32.

        Raises:
            UsageError: windows of other than C frames.
            CapvidError: the device has not the memory for such a batch.
        """
        return self.compute(self.prepare(frames), batch_size=batch_size)

    def prepare(self, frames: np.ndarray | Tensor) -> Tensor:
        """Cut and resize the RGB frames of one video on the CPU.

        Args:
            frames: (T, H, W, 3) uint8, or (T, C, H, W, 3) for a network of clips.

        Returns:
            (T, 3, h, w) uint8, or (T, C, 3, h, w) for a network of clips.

        Raises:
            UsageError: windows of other than C frames.
        """
        images, clip = torch.as_tensor(frames), self.entry.clip
        if images.ndim == 4:
            crops = prepare(images, self.entry.preprocess)
            return crops if clip is None else crops[:, None].expand(-1, clip.frames, -1, -1, -1)
        if images.ndim != 5 or clip is None or images.shape[1] != clip.frames:
            expected = "(T, H, W, 3)" + (f" or (T, {clip.frames}, H, W, 3)" if clip else "")
            raise UsageError(f"{self.entry.name} takes frames {expected}, got {tuple(images.shape)}")
        return prepare(images.flatten(0, 1), self.entry.preprocess).unflatten(0, images.shape[:2])

    def windows(self) -> Windows | None:
        """Give what a network of clips has to be read around each frame; ``None`` if it sees single frames.

        What is kept of the windows is what ``compute`` takes, (T, C, 3, h, w).
        """
        if self.entry.clip is None:
            return None
        return Windows(offsets=self.entry.clip.offsets, reduce=partial(_crops, how=self.entry.preprocess))

    @torch.inference_mode()
    def compute(self, crops: Tensor, *, batch_size: int = 32) -> np.ndarray:
        """Compute the features of what ``prepare`` gives: (T, D) or (T, L, D) float32.

        Raises:
            CapvidError: the device has not the memory for such a batch.
        """
        clip = self.entry.clip
        together = max(1, batch_size // clip.frames) if clip else batch_size
        try:
            parts = [self.module(self._input(batch)).float().cpu() for batch in crops.split(together)]
        except torch.cuda.OutOfMemoryError as error:
            raise CapvidError(
                f"{self.device} has not the memory for {batch_size} frames of {self.entry.name} at once",
                remedy="use a smaller --batch-size",
            ) from error
        return torch.cat(parts).numpy()

    def _input(self, crops: Tensor) -> Tensor:
        """Turn crops uint8 into the network's input: (T, 3, h, w), or (T, C, 3, h, w) to (T, 3, C, h, w)."""
        if self.entry.clip is None:
            return normalise(crops.to(self.device), self.entry.preprocess)
        frames = normalise(crops.flatten(0, 1).to(self.device), self.entry.preprocess)  # (TC, 3, h, w)
        return frames.unflatten(0, crops.shape[:2]).transpose(1, 2)


def _crops(frames: np.ndarray, how: Preprocess) -> np.ndarray:
    """Cut and resize frames (n, H, W, 3) uint8, each by itself, as they are decoded: (n, 3, h, w) uint8."""
    return prepare(frames, how).numpy()


def load_backbone(
    name: str,
    *,
    layer: str | None = None,
    weights: Path | None = None,
    device: str | torch.device = "cpu",
    search: Sequence[Path] = (),
) -> Backbone:
    """Build a backbone and give it its weights.

    Args:
        name: name or alias in the registry.
        layer: the layer to take; ``None`` is the entry's default.
        weights: the weights file, or a folder that holds it; for a bundled backbone it may be one that was
            trained anew, for the others it must be the one that the registry knows.
        device: where to compute.
        search: further files and folders in which to look, before ``CAPVID_WEIGHTS`` and the cache.

    Raises:
        UsageError: no such backbone or layer.
        WeightsError: no weights, or not those expected.
        HubError: they should come from the Hugging Face Hub and do not.
    """
    entry = backbone_entry(name)
    layer = entry.layer(layer)
    module = _BUILDERS[entry.kind](entry, layer)
    digest = None
    if entry.source != "none":
        path, digest = _find_weights(entry, weights, search)
        _fill(module, path, entry)
    size = entry.layers[layer]
    header = StreamHeader(
        backbone=entry.name,
        layer=layer,
        width=size.width,
        locations=size.locations,
        weights_sha256=digest,
        preprocess=entry.describe_input(),
    )
    layout = torch.channels_last if entry.clip is None else torch.channels_last_3d
    module.to(device, memory_format=layout).eval().requires_grad_(False)  # type: ignore[call-overload]
    return Backbone(entry=entry, layer=layer, module=module, header=header, device=torch.device(device))


def untrained(entry: BackboneEntry) -> nn.Module:
    """Build a backbone's network with random weights, to be trained.

    Raises:
        UsageError: it is not one that capvid trains.
    """
    if entry.kind != "student":
        raise UsageError(f"{entry.name} is not a backbone that capvid trains")
    return _BUILDERS[entry.kind](entry, entry.default_layer)


def local_weights(name: str, *, weights: Path | None = None, search: Sequence[Path] = ()) -> Path | None:
    """Say where a backbone's weights file is on this machine, outside the Hub's cache; it is not verified.

    Raises:
        UsageError: no such backbone.
        WeightsError: ``weights`` is given and is not there.
    """
    entry = backbone_entry(name)
    if weights is not None:
        path = weights / _file_name(entry) if weights.is_dir() else weights
        if not path.is_file():
            raise WeightsError(f"{path}: no such file, asked for as the weights of {entry.name}")
        return path
    if entry.source.startswith("bundled:"):
        return FOLDER / entry.file
    return next((path for path in _candidates(entry, search) if path.is_file()), None)


def cache_folder() -> Path:
    """Give capvid's cache: ``CAPVID_CACHE``, otherwise ``~/.cache/capvid``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "capvid")


def _file_name(entry: BackboneEntry) -> str:
    """Name under which weights are looked for; many files on the Hub are called model.safetensors."""
    return f"{entry.name}.safetensors" if entry.source.startswith("hub:") else entry.file


def _candidates(entry: BackboneEntry, search: Sequence[Path]) -> list[Path]:
    given = [Path(item) for item in os.environ.get(WEIGHTS_VARIABLE, "").split(os.pathsep) if item]
    places = [*search, *given, cache_folder() / "weights"]
    name = _file_name(entry)
    return [place if place.name == name and not place.is_dir() else place / name for place in places]


def _find_weights(entry: BackboneEntry, weights: Path | None, search: Sequence[Path]) -> tuple[Path, str]:
    """Find the weights file and give its path and digest, checked where the digest is known."""
    path = local_weights(entry.name, weights=weights, search=search)
    if path is None and entry.source.startswith("hub:"):
        from capvid.hub import fetch

        path = fetch(entry.source, entry.file, sha256=entry.sha256)
    if path is None:
        looked = ", ".join(str(candidate.parent) for candidate in _candidates(entry, search))
        raise WeightsError(
            f"no weights of {entry.name}: {_file_name(entry)} is not in {looked}",
            remedy=f"give the file with --weights FILE, or set {WEIGHTS_VARIABLE} to it or its folder",
        )
    status = path.stat()
    digest = _digest(str(path), status.st_size, status.st_mtime_ns)
    own = weights is not None and entry.source.startswith("bundled:")  # trained anew by the user
    if entry.sha256 is not None and digest != entry.sha256 and not own:
        raise WeightsError(
            f"{path}: not the weights of {entry.name} "
            f"(sha256 {digest[:12]}..., expected {entry.sha256[:12]}...)",
            remedy=f"give the right {_file_name(entry)}; it may be damaged or another file of that name",
        )
    return path, digest


@lru_cache(maxsize=32)
def _digest(path: str, size: int, changed: int) -> str:
    """Digest of a file, computed again when its size or time of change differ."""
    return sha256_file(path)


def _fill(module: nn.Module, path: Path, entry: BackboneEntry) -> None:
    """Load the weights; tensors of a classifier that the module leaves out are passed over."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        wanted = module.state_dict()
        missing = sorted(set(wanted) - set(tensors))
        other = sorted(k for k in set(wanted) & set(tensors) if wanted[k].shape != tensors[k].shape)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: not a readable safetensors file ({error})", remedy="download the weights again"
        ) from error
    if missing or other:
        raise WeightsError(
            f"{path}: not the weights of {entry.name} ({len(missing)} tensors missing, {len(other)} of "
            f"another shape, such as {(missing + other)[0]})",
            remedy="give the file of the backbone that was asked for",
        )
    module.load_state_dict({name: tensors[name] for name in wanted})


class _OneLayer(nn.Module):
    """A network of several named layers, reduced to one of them; its tensors keep their names."""

    def __init__(self, network: Any, layer: str) -> None:
        super().__init__()
        self.network = network
        self.layer = layer

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images, (self.layer,))[self.layer]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.network.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.network.load_state_dict(*args, **kwargs)


def _build_googlenet(entry: BackboneEntry, layer: str) -> nn.Module:
    from capvid.features.googlenet import GoogLeNet

    with torch.device("meta"):
        network = GoogLeNet()
    return _OneLayer(network.to_empty(device="cpu"), layer)


def _build_x3d(entry: BackboneEntry, layer: str) -> nn.Module:
    from capvid.features.x3d import X3DXS

    with torch.device("meta"):
        network = X3DXS()
    return _OneLayer(network.to_empty(device="cpu"), layer)


def _build_timm(entry: BackboneEntry, layer: str) -> nn.Module:
    """Let timm build the architecture, without weights, up to its global average pool."""
    import timm

    return timm.create_model(entry.architecture or entry.name, pretrained=False, num_classes=0)


def _build_grid(entry: BackboneEntry, layer: str) -> nn.Module:
    """Mean colours on a square grid, (T, 3, h, w) -> (T, D): fields row by row, for each colour in turn."""
    side = round((entry.layers[layer].width / 3) ** 0.5)
    return nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten())


def _build_student(entry: BackboneEntry, layer: str) -> nn.Module:
    from capvid.features.student import Student

    return Student()


_BUILDERS: dict[str, Callable[[BackboneEntry, str], nn.Module]] = {
    "grid": _build_grid,
    "googlenet": _build_googlenet,
    "student": _build_student,
    "timm": _build_timm,
    "x3d": _build_x3d,
}
