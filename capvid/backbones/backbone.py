"""Backbones: networks that turn frames into features.

Notation for tensor shapes: T frames, C frames of a clip, L locations of a feature map, D width of the layer,
h and w height and width of the input.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from capvid.backbones.catalog import BackboneEntry, StreamHeader, backbone_entry, build_network
from capvid.backbones.preprocessing import normalise, prepare
from capvid.backbones.weights import find_weights, load_weights
from capvid.errors import RunError, UsageError
from capvid.utils.device import check_precision, has_fast_path

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CPU_BATCH = {4: 8, 2: 16}  # frames in a batch on a CPU, by the number of bytes of the dtype
_MAX_CONCURRENCY = 8  # batches computed concurrently on a CPU; with more cores, each uses several
_FREED_BLOCK = 31 << 20  # bytes, slightly below the largest block that glibc keeps on its heap


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A network cut at one layer, and the header of its features."""

    entry: BackboneEntry
    layer: str
    module: nn.Module  # (T, 3, h, w), or clips (T, 3, C, h, w) -> (T, D) or (T, L, D)
    header: StreamHeader
    device: torch.device
    dtype: torch.dtype = torch.float32
    precision: str = "auto"  # as requested in load_backbone
    threads: int = field(default_factory=torch.get_num_threads)  # number of CPU cores to use

    def on(self, device: str | torch.device) -> Backbone:
        """Move the backbone to a device; ``auto`` precision and the number of cores are chosen again."""
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
            frames: (T, H, W, 3) uint8, T >= 1, or clips (T, C, H, W, 3); a clip network repeats single frames
                C times.
            batch_size: frames per batch on a GPU, which bounds the memory.

        Returns:
            (T, D) or (T, L, D), float32.

        Raises:
            UsageError: the clips do not have C frames.
            RunError: the device has not enough memory for a batch.
        """
        return self.compute(self.prepare(frames), batch_size=batch_size)

    def prepare(self, frames: np.ndarray) -> np.ndarray:
        """Crop and resize the RGB frames of one video.

        Args:
            frames: (T, H, W, 3) uint8, or (T, C, H, W, 3) for a clip network.

        Returns:
            (T, h, w, 3) uint8, or (T, C, h, w, 3) for a clip network.
        """
        clip, preprocess = self.entry.clip, self.entry.preprocess
        if frames.ndim == 4:
            crops = prepare(frames, preprocess)
            if clip is None:
                return crops
            return np.broadcast_to(crops[:, None], (len(crops), clip.frames, *crops.shape[1:]))
        if frames.ndim != 5 or clip is None or frames.shape[1] != clip.frames:
            expected = "(T, H, W, 3)" + (f" or (T, {clip.frames}, H, W, 3)" if clip else "")
            raise UsageError(f"{self.entry.name} takes frames {expected}, got {frames.shape}")
        crops = prepare(frames.reshape(-1, *frames.shape[2:]), preprocess)
        return crops.reshape(*frames.shape[:2], *crops.shape[1:])

    @property
    def concurrency(self) -> int:
        """Number of batches computed concurrently."""
        return {"cpu": min(self.threads, _MAX_CONCURRENCY), "cuda": 2}.get(self.device.type, 1)

    def batch_length(self, batch_size: int) -> int:
        """Return the number of frames, or clips, per batch; on a CPU, as many as fit its caches."""
        frames = _CPU_BATCH[self.dtype.itemsize] if self.device.type == "cpu" else batch_size
        return max(1, frames // self.entry.clip.frames) if self.entry.clip else frames

    def compute(self, crops: np.ndarray, *, batch_size: int = 32) -> np.ndarray:
        """Compute the features of the crops that :meth:`prepare` returns: (T, D) or (T, L, D) float32."""
        length = self.batch_length(batch_size)
        batches = [crops[start : start + length] for start in range(0, len(crops), length)]
        futures = [self.submit(batch, batch_size=batch_size) for batch in batches]
        return np.concatenate([future.result() for future in futures])

    def submit(self, crops: np.ndarray, *, batch_size: int = 32) -> Future[np.ndarray]:
        """Compute the features of at most :meth:`batch_length` crops in another thread.

        Smaller batches are padded, because the last digit of the numbers may depend on the size of the batch.
        So a frame's features do not depend on other frames.

        Returns:
            Future of (n, D) or (n, L, D) float32, which raises RunError if there is not enough memory.
        """
        threads = start_threads(self.device, self.threads, self.concurrency)
        return threads.submit(self._run, crops, self.batch_length(batch_size))

    @torch.inference_mode()
    def _run(self, crops: np.ndarray, batch_length: int) -> np.ndarray:
        images = torch.zeros((batch_length, *crops.shape[1:]), dtype=torch.uint8)
        images.numpy()[: len(crops)] = crops
        try:
            if self.device.type == "cuda":
                images = images.pin_memory().to(self.device, non_blocking=True)
            else:
                images = images.to(self.device)
            flat = images if self.entry.clip is None else images.flatten(0, 1)  # clips (T, C, h, w, 3)
            inputs = normalise(flat.permute(0, 3, 1, 2), self.entry.preprocess).to(self.dtype)  # (T, 3, h, w)
            if self.entry.clip is not None:
                inputs = inputs.unflatten(0, images.shape[:2]).transpose(1, 2)  # (T, 3, C, h, w)
            return self.module(inputs)[: len(crops)].float().cpu().numpy()
        except torch.cuda.OutOfMemoryError as error:
            problem = f"{self.device} has not enough memory for {batch_length} frames of {self.entry.name}"
            raise RunError(problem, remedy="use a smaller --batch-size") from error


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
        layer: name of the layer; ``None`` takes the default layer.
        weights: weights file, or a folder that contains it; only a bundled backbone may have other weights
            than those in the catalogue.
        device: device on which to run.
        search: files and folders to search before ``CAPVID_WEIGHTS`` and the cache.
        precision: ``fp32``, ``fp16``, ``bf16``, or ``auto`` for a half precision that is fast and safe, else
            fp32.

    Raises:
        UsageError: there is no such backbone, layer or precision.
        WeightsError: the weights are missing, or not those in the catalogue.
        HubError: the download of the weights failed.
    """
    entry, device = backbone_entry(name), torch.device(device)
    layer = entry.default_layer if layer is None else layer
    if layer not in entry.layers:
        remedy = f"use one of {', '.join(entry.layers)}"
        raise UsageError(f"the backbone {entry.name} has no layer {layer!r}", remedy=remedy)
    module = build_network(entry, layer)
    dtype = _choose_dtype(precision, entry, device, module)
    digest = None
    if entry.source != "none":
        path, digest = find_weights(entry, weights, search)
        tensors = None
        if entry.fingerprint is not None and digest != entry.sha256:
            from capvid.backbones.x3d_checkpoints import read_checked

            # the same weights, up to rounding: features of both may be mixed
            tensors, digest = dict(read_checked(entry, path)), entry.sha256
        load_weights(module, path, entry.name, tensors)
    header = StreamHeader(
        backbone=entry.name,
        layer=layer,
        width=entry.layers[layer].width,
        locations=entry.layers[layer].locations,
        weights_sha256=digest,
        preprocess=entry.describe_input(),
        precision=str(dtype).removeprefix("torch."),
    )
    has_conv3d = 5 in [parameter.ndim for parameter in module.parameters()]
    layout = torch.channels_last_3d if has_conv3d else torch.channels_last
    module.to(device, dtype, memory_format=layout).eval().requires_grad_(False)  # type: ignore[call-overload]
    return Backbone(
        entry=entry,
        layer=layer,
        module=module,
        header=header,
        device=device,
        dtype=dtype,
        precision=precision,
    )


def _choose_dtype(
    precision: str, entry: BackboneEntry, device: torch.device, module: nn.Module
) -> torch.dtype:
    """Return the dtype to compute in; ``auto`` takes a half precision that is fast and known to be safe."""
    if precision == "auto":
        safe = {torch.float16: entry.half, torch.bfloat16: entry.bf16}
        known = device.type in ("cuda", "cpu")
        fast = [dtype for dtype in safe if known and safe[dtype] and has_fast_path(dtype, device)]
        return (*fast, torch.float32)[0]
    if precision not in PRECISIONS:
        raise UsageError(f"{precision}: no such precision", remedy=f"use auto, {', '.join(PRECISIONS)}")
    if precision != "fp32" and entry.half is False:
        raise UsageError(f"{entry.name} runs in fp32 only", remedy="leave out --precision")
    dtype = PRECISIONS[precision]
    try:
        check_precision(dtype, device, module, remedy="use --precision fp32")
    except UsageError as error:
        raise UsageError(f"{entry.name}: {error.message}", remedy=error.remedy) from error
    return dtype


@functools.cache
def start_threads(device: torch.device, cores: int, count: int) -> ThreadPoolExecutor:
    """Start ``count`` threads that share ``cores`` CPU cores; all backbones on a device use the same ones."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="capvid-backbone")
    started = threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(max(1, cores // count))
        torch.get_num_threads()  # the first call in a thread adopts the number that was set last
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))  # the stream of this thread
        started.wait()

    for _ in range(count):
        pool.submit(start)
    started.wait()
    if device.type == "cpu":
        # glibc keeps twice the largest block freed so far (M_MMAP_THRESHOLD in mallopt(3)); otherwise
        # each batch returns its memory to the system and asks for it again, page by page
        torch.empty(_FREED_BLOCK, dtype=torch.uint8)
    torch.set_num_threads(torch.get_num_threads())  # all other threads keep their number of cores
    return pool
