"""Backbones: frames in, features out, with the weights found and verified.

Notation for tensor shapes: T frames, C frames of the window around each that a network of clips sees,
L locations of a feature map, D width of the layer, h and w height and width of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from capvid.device import check_precision, has_fast_path
from capvid.errors import RunError, UsageError
from capvid.features.file import StreamHeader
from capvid.features.lanes import Lanes, lanes
from capvid.features.networks import build
from capvid.features.normalise import normalise
from capvid.features.preprocess import prepare
from capvid.features.registry import BackboneEntry, backbone_entry
from capvid.features.weights import fill, find_weights

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# frames that a lane of a processor computes at once, by the bytes of a number
_TOGETHER = {4: 8, 2: 16}


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
        dtype: in which it computes.
        precision: what was asked for (:func:`load_backbone`).
        threads: how many cores of the processor it may use.
    """

    entry: BackboneEntry
    layer: str
    module: nn.Module
    header: StreamHeader
    device: torch.device
    dtype: torch.dtype = torch.float32
    precision: str = "auto"
    threads: int = field(default_factory=torch.get_num_threads)

    def on(self, device: str | torch.device) -> Backbone:
        """The same backbone on another device, in the precision that was asked for; ``auto`` is decided anew.

        It takes the network with it, and may use as many cores as this process does.
        """
        place = torch.device(device)
        if place == self.device:
            return replace(self, threads=torch.get_num_threads())
        dtype = _dtype_for(self.precision, self.entry, place)
        _check_precision(self.entry, dtype, place, self.module)
        header = replace(self.header, precision=str(dtype).removeprefix("torch."))
        module = self.module.to(place, dtype)
        return replace(self, module=module, device=place, dtype=dtype, header=header)

    def __call__(self, frames: np.ndarray, *, batch_size: int = 32) -> np.ndarray:
        """Compute the features of RGB frames.

        Args:
            frames: (T, H, W, 3) uint8, T >= 1; a network of clips sees each as a still, C times the same, or
                takes windows (T, C, H, W, 3).
            batch_size: frames computed together on a GPU; it bounds the memory.

        Returns:
            (T, D) or (T, L, D), float32.

        Raises:
            UsageError: windows of other than C frames.
            RunError: the device has not the memory for such a batch.
        """
        return self.compute(self.prepare(frames), batch_size=batch_size)

    def prepare(self, frames: np.ndarray) -> np.ndarray:
        """Cut and resize the RGB frames of one video.

        Args:
            frames: (T, H, W, 3) uint8, or (T, C, H, W, 3) for a network of clips.

        Returns:
            (T, h, w, 3) uint8, or (T, C, h, w, 3) for a network of clips.

        Raises:
            UsageError: windows of other than C frames.
        """
        clip, how = self.entry.clip, self.entry.preprocess
        if frames.ndim == 4:
            crops = prepare(frames, how)
            if clip is None:
                return crops
            return np.broadcast_to(crops[:, None], (len(crops), clip.frames, *crops.shape[1:]))
        if frames.ndim != 5 or clip is None or frames.shape[1] != clip.frames:
            expected = "(T, H, W, 3)" + (f" or (T, {clip.frames}, H, W, 3)" if clip else "")
            raise UsageError(f"{self.entry.name} takes frames {expected}, got {frames.shape}")
        crops = prepare(frames.reshape(-1, *frames.shape[2:]), how)
        return crops.reshape(*frames.shape[:2], *crops.shape[1:])

    @property
    def lanes(self) -> Lanes:
        """The threads that compute."""
        return lanes(self.device, self.threads)

    def together(self, batch_size: int) -> int:
        """How many frames, or clips of C frames, the network sees at once.

        A processor always takes as many: what it works on stays in its caches.
        """
        clip = self.entry.clip
        frames = _TOGETHER[self.dtype.itemsize] if self.device.type == "cpu" else batch_size
        return max(1, frames // clip.frames) if clip else frames

    def compute(self, crops: np.ndarray, *, batch_size: int = 32) -> np.ndarray:
        """Compute the features of what :meth:`prepare` gives: (T, D) or (T, L, D) float32.

        Raises:
            RunError: the device has not the memory for such a batch.
        """
        together = self.together(batch_size)
        starts = range(0, len(crops), together)
        parts = [self.submit(crops[at : at + together], batch_size=batch_size) for at in starts]
        return np.concatenate([part.result() for part in parts])

    def submit(self, crops: np.ndarray, *, batch_size: int = 32) -> Future[np.ndarray]:
        """Have the features of at most :meth:`together` crops computed in another thread.

        The network always sees as many, the last ones made up, because the last digit of what it computes may
        depend on their number. So a frame's features do not depend on the others.

        Returns:
            The promise of (n, D) or (n, L, D) float32; it raises RunError where the memory is not enough.
        """
        return self.lanes.submit(self._run, crops, self.together(batch_size))

    @torch.inference_mode()
    def _run(self, crops: np.ndarray, together: int) -> np.ndarray:
        batch = torch.zeros((together, *crops.shape[1:]), dtype=torch.uint8)
        batch.numpy()[: len(crops)] = crops
        try:
            if self.device.type == "cuda":
                batch = batch.pin_memory().to(self.device, non_blocking=True)
            else:
                batch = batch.to(self.device)
            return self.module(self._input(batch))[: len(crops)].float().cpu().numpy()
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(
                f"{self.device} has not the memory for {len(batch)} frames of {self.entry.name} at once",
                remedy="use a smaller --batch-size",
            ) from error

    def _input(self, images: Tensor) -> Tensor:
        """Crops uint8 (T, h, w, 3) as the network's input (T, 3, h, w), clips as (T, 3, C, h, w)."""
        if self.entry.clip is None:
            return normalise(images.permute(0, 3, 1, 2), self.entry.preprocess).to(self.dtype)
        frames = normalise(images.flatten(0, 1).permute(0, 3, 1, 2), self.entry.preprocess)  # (TC, 3, h, w)
        return frames.to(self.dtype).unflatten(0, images.shape[:2]).transpose(1, 2)


def _dtype_for(precision: str, entry: BackboneEntry, device: torch.device) -> torch.dtype:
    """In what a network computes; ``auto`` takes float16 where that is fast and the network is known for it.

    Raises:
        UsageError: there is no such precision, or the network cannot compute in it.
    """
    if precision == "auto":
        fast = device.type in ("cuda", "cpu") and has_fast_path(torch.float16, device)
        return torch.float16 if fast and entry.half else torch.float32
    if precision not in PRECISIONS:
        raise UsageError(f"{precision}: no such precision", remedy=f"use auto, {', '.join(PRECISIONS)}")
    if PRECISIONS[precision] != torch.float32 and entry.half is False:
        raise UsageError(f"{entry.name} computes in fp32 only", remedy="leave out --precision")
    return PRECISIONS[precision]


def _check_precision(
    entry: BackboneEntry, dtype: torch.dtype, device: torch.device, module: nn.Module
) -> None:
    """Raise UsageError where the network would be far slower in ``dtype`` than in float32."""
    try:
        check_precision(dtype, device, module, remedy="use --precision fp32")
    except UsageError as error:
        raise UsageError(f"{entry.name}: {error.message}", remedy=error.remedy) from error


def load_backbone(
    name: str,
    *,
    layer: str | None = None,
    weights: Path | None = None,
    device: str | torch.device = "cpu",
    search: Sequence[Path] = (),
    precision: str = "auto",
) -> Backbone:
    """Build a backbone and give it its weights.

    Args:
        name: name or alias in the registry.
        layer: the layer to take; ``None`` is the entry's default.
        weights: the weights file, or a folder that holds it; for a bundled backbone it may be one that was
            trained anew, for the others it must be the one that the registry knows.
        device: where to compute.
        search: further files and folders in which to look, before ``CAPVID_WEIGHTS`` and the cache.
        precision: ``fp32``, ``fp16``, ``bf16``, or ``auto`` for fp16 where that is fast and safe, else fp32.

    Raises:
        UsageError: no such backbone, layer or precision.
        WeightsError: no weights, or not those expected.
        HubError: they should come from the Hugging Face Hub and do not.
    """
    entry, place = backbone_entry(name), torch.device(device)
    layer, dtype = entry.layer(layer), _dtype_for(precision, entry, place)
    module = build(entry, layer)
    _check_precision(entry, dtype, place, module)
    digest = None
    if entry.source != "none":
        path, digest = find_weights(entry, weights, search)
        fill(module, path, entry)
    size = entry.layers[layer]
    header = StreamHeader(
        backbone=entry.name,
        layer=layer,
        width=size.width,
        locations=size.locations,
        weights_sha256=digest,
        preprocess=entry.describe_input(),
        precision=str(dtype).removeprefix("torch."),
    )
    in_time = any(parameter.ndim == 5 for parameter in module.parameters())
    layout = torch.channels_last_3d if in_time else torch.channels_last
    module.to(place, dtype, memory_format=layout).eval().requires_grad_(False)  # type: ignore[call-overload]
    return Backbone(
        entry=entry,
        layer=layer,
        module=module,
        header=header,
        device=place,
        dtype=dtype,
        precision=precision,
    )


def untrained(entry: BackboneEntry) -> nn.Module:
    """Build a backbone's network with random weights, to be trained.

    Raises:
        UsageError: it is not one that capvid trains.
    """
    if entry.kind != "student":
        raise UsageError(f"{entry.name} is not a backbone that capvid trains")
    return build(entry, entry.default_layer)
