"""Backbones: frames in, features out.

Notation for tensor shapes: T frames, C frames of a clip, L locations of a feature map, D width of the layer,
h and w height and width of the input.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from capvid.backbones.catalog import BackboneEntry, StreamHeader, backbone_entry, build_network
from capvid.backbones.preprocessing import normalise, prepare
from capvid.backbones.weights import fill, find_weights
from capvid.errors import RunError, UsageError
from capvid.utils.device import check_precision, has_fast_path

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_TOGETHER = {4: 8, 2: 16}  # frames in a batch on a processor, by the bytes of a number
_MOST_LANES = 8  # of a processor; with more cores each lane has several
_FREED = 31 << 20  # bytes, a little less than the largest block on glibc's heap
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A network, the layer taken from it, and the header of its features.

    Attributes:
        entry: catalogue entry.
        layer: name of the layer.
        module: network from (T, 3, h, w), or (T, 3, C, h, w) for clips, to (T, D) or (T, L, D).
        header: description of the features.
        device: where the network computes.
        dtype: type in which it computes.
        precision: requested precision (:func:`load_backbone`).
        threads: number of cores of the processor to use.
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
        """Move the backbone to a device; ``auto`` precision and the number of cores are decided anew."""
        device = torch.device(device)
        if device == self.device:
            return replace(self, threads=torch.get_num_threads())
        dtype = _choose_dtype(self.precision, self.entry, device, self.module)
        header = replace(self.header, precision=str(dtype).removeprefix("torch."))
        module = self.module.to(device, dtype)
        return replace(self, module=module, device=device, dtype=dtype, header=header)

    def __call__(self, frames: np.ndarray, *, batch_size: int = 32) -> np.ndarray:
        """Compute the features of RGB frames.

        Args:
            frames: (T, H, W, 3) uint8, T >= 1, or clips (T, C, H, W, 3); a network of clips repeats single
                frames C times.
            batch_size: frames computed together on a GPU; it bounds the memory.

        Returns:
            (T, D) or (T, L, D), float32.

        Raises:
            UsageError: clips of other than C frames.
            RunError: not enough device memory for a batch.
        """
        return self.compute(self.prepare(frames), batch_size=batch_size)

    def prepare(self, frames: np.ndarray) -> np.ndarray:
        """Crop and resize the RGB frames of one video.

        Args:
            frames: (T, H, W, 3) uint8, or (T, C, H, W, 3) for a network of clips.

        Returns:
            (T, h, w, 3) uint8, or (T, C, h, w, 3) for a network of clips.
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
        """Threads that compute."""
        return lanes(self.device, self.threads)

    def together(self, batch_size: int) -> int:
        """Return the number of frames, or clips, in a batch; on a processor it fits the caches."""
        frames = _TOGETHER[self.dtype.itemsize] if self.device.type == "cpu" else batch_size
        return max(1, frames // self.entry.clip.frames) if self.entry.clip else frames

    def compute(self, crops: np.ndarray, *, batch_size: int = 32) -> np.ndarray:
        """Compute the features of the crops that :meth:`prepare` returns: (T, D) or (T, L, D) float32."""
        together = self.together(batch_size)
        starts = range(0, len(crops), together)
        parts = [self.submit(crops[at : at + together], batch_size=batch_size) for at in starts]
        return np.concatenate([part.result() for part in parts])

    def submit(self, crops: np.ndarray, *, batch_size: int = 32) -> Future[np.ndarray]:
        """Compute the features of at most :meth:`together` crops in another thread.

        Smaller batches are padded, because the last digit of the numbers may depend on the size of the batch.
        So a frame's features do not depend on other frames.

        Returns:
            Future of (n, D) or (n, L, D) float32, which raises RunError if there is not enough memory.
        """
        return self.lanes.submit(self._run, crops, self.together(batch_size))

    @torch.inference_mode()
    def _run(self, crops: np.ndarray, together: int) -> np.ndarray:
        images = torch.zeros((together, *crops.shape[1:]), dtype=torch.uint8)
        images.numpy()[: len(crops)] = crops
        try:
            if self.device.type == "cuda":
                images = images.pin_memory().to(self.device, non_blocking=True)
            else:
                images = images.to(self.device)
            return self.module(self._input(images))[: len(crops)].float().cpu().numpy()
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(
                f"{self.device} has not the memory for {together} frames of {self.entry.name} at once",
                remedy="use a smaller --batch-size",
            ) from error

    def _input(self, images: Tensor) -> Tensor:
        """Turn crops uint8 (T, h, w, 3) into the network's input (T, 3, h, w), or clips (T, 3, C, h, w)."""
        if self.entry.clip is None:
            return normalise(images.permute(0, 3, 1, 2), self.entry.preprocess).to(self.dtype)
        frames = normalise(images.flatten(0, 1).permute(0, 3, 1, 2), self.entry.preprocess)  # (T C, 3, h, w)
        return frames.to(self.dtype).unflatten(0, images.shape[:2]).transpose(1, 2)


def load_backbone(
    name: str,
    *,
    layer: str | None = None,
    weights: Path | None = None,
    device: str | torch.device = "cpu",
    search: Sequence[Path] = (),
    precision: str = "auto",
) -> Backbone:
    """Build a backbone and load its weights.

    Args:
        name: name or alias in the catalogue.
        layer: name of the layer; ``None`` takes the default one.
        weights: weights file, or a folder that holds it; only those of a bundled backbone may be retrained.
        device: where to compute.
        search: files and folders to search before ``CAPVID_WEIGHTS`` and the cache.
        precision: ``fp32``, ``fp16``, ``bf16``, or ``auto`` for fp16 where that is fast and safe, else fp32.

    Raises:
        UsageError: no such backbone, layer or precision.
        WeightsError: no weights, or not those expected.
        HubError: the download of the weights failed.
    """
    entry, device = backbone_entry(name), torch.device(device)
    layer = entry.layer(layer)
    module = build_network(entry, layer)
    dtype = _choose_dtype(precision, entry, device, module)
    digest = None
    if entry.source != "none":
        path, digest = find_weights(entry, weights, search)
        fill(module, path, entry.name)
    header = StreamHeader(
        backbone=entry.name,
        layer=layer,
        width=entry.layers[layer].width,
        locations=entry.layers[layer].locations,
        weights_sha256=digest,
        preprocess=entry.describe_input(),
        precision=str(dtype).removeprefix("torch."),
    )
    in_time = 5 in [parameter.ndim for parameter in module.parameters()]
    layout = torch.channels_last_3d if in_time else torch.channels_last
    module.to(device, dtype, memory_format=layout).eval().requires_grad_(False)  # type: ignore[call-overload]
    loaded = Backbone(entry=entry, layer=layer, module=module, header=header, device=device)
    return replace(loaded, dtype=dtype, precision=precision)


def _choose_dtype(
    precision: str, entry: BackboneEntry, device: torch.device, module: nn.Module
) -> torch.dtype:
    """Return the type to compute in; ``auto`` takes float16 where it is fast and known to be safe."""
    if precision == "auto":
        fast = device.type in ("cuda", "cpu") and has_fast_path(torch.float16, device)
        dtype = torch.float16 if fast and entry.half else torch.float32
    elif precision not in PRECISIONS:
        raise UsageError(f"{precision}: no such precision", remedy=f"use auto, {', '.join(PRECISIONS)}")
    elif precision != "fp32" and entry.half is False:
        raise UsageError(f"{entry.name} computes in fp32 only", remedy="leave out --precision")
    else:
        dtype = PRECISIONS[precision]
    try:
        check_precision(dtype, device, module, remedy="use --precision fp32")
    except UsageError as error:
        raise UsageError(f"{entry.name}: {error.message}", remedy=error.remedy) from error
    return dtype


class Lanes:
    """A fixed number (``count``) of threads that compute on one device and share ``threads`` cores."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.count = {"cpu": min(threads, _MOST_LANES), "cuda": 2}.get(device.type, 1)
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="capvid-lane")
        started = threading.Barrier(self.count + 1)

        def start() -> None:
            torch.set_num_threads(max(1, threads // self.count))
            torch.get_num_threads()  # the first call in a thread adopts the number that was set last
            if device.type == "cuda":
                torch.cuda.set_stream(torch.cuda.Stream(device))  # of this thread
            started.wait()

        for _ in range(self.count):
            self._pool.submit(start)
        started.wait()
        if device.type == "cpu":
            # glibc keeps twice the largest block freed so far (M_MMAP_THRESHOLD in mallopt(3)); otherwise
            # each batch returns its memory to the system and asks for it again, page by page
            torch.empty(_FREED, dtype=torch.uint8)
        torch.set_num_threads(torch.get_num_threads())  # the lanes' number is not that of other threads

    def submit(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Call the function in the next free lane."""
        return self._pool.submit(function, *args, **kwargs)


@functools.cache
def lanes(device: torch.device, threads: int) -> Lanes:
    """Return the lanes of a device, the same for all backbones on it."""
    return Lanes(device, threads)
