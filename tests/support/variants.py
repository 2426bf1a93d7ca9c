"""Every captioner in every variant, small enough for numerical tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from capvid.captioners.base import Captioner, build

COMMON = {"vocabulary_size": 11, "feature_width": 5, "dropout": 0.5}
LSTM = {**COMMON, "embedding": 4, "hidden": 6, "attention": 3}
DEEP = {**LSTM, "output": 7}
M3 = {**DEEP, "memory_rows": 4, "memory_width": 3}
DENSE = {**LSTM, "projection": 4, "encoder": 3}
KEY_VALUE = {**LSTM, "encoder_hidden": 3}
HAM = {**LSTM, "memory_width": 4, "bottleneck": 3}
HAM_MAPS = {**HAM, "locations": 4}
HAM_VECTORS = {**HAM, "temporal_model": False}
STACK = {**COMMON, "hidden": 6, "heads": 2, "layers": 2, "feed_forward": 5, "word_width": 3}
MART = {**STACK, "memory_length": 2}
AUTHORS_STACK = {**STACK, "feed_forward": 6, "text_start": 9, "text_length": 4}
AUTHORS = {**AUTHORS_STACK, "memory_length": 2}

# Variant -> the captioner's name and options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "soft-attention": ("soft-attention", DEEP),
    "m3": ("m3", M3),
    "vanilla-transformer": ("vanilla-transformer", STACK),
    "vanilla-transformer-authors": ("vanilla-transformer-authors", AUTHORS_STACK),
    "transformer-xl": ("transformer-xl", STACK),
    "transformer-xl-gradient": ("transformer-xl", {**STACK, "recurrent_gradient": True}),
    "transformer-xl-authors": ("transformer-xl-authors", AUTHORS_STACK),
    "mart": ("mart", MART),
    "mart-no-recurrence": ("mart", {**MART, "recurrence": False}),
    "mart-authors": ("mart-authors", AUTHORS),
    "mart-authors-no-recurrence": ("mart-authors", {**AUTHORS, "recurrence": False}),
    "ham": ("ham", HAM_MAPS),
    "ham-no-memory": ("ham", {**HAM_MAPS, "memory": False}),
    "ham-no-attention": ("ham", {**HAM_MAPS, "memory": False, "attend": False}),
    "ham-no-temporal": ("ham", HAM_VECTORS),
    "ham-no-temporal-no-memory": ("ham", {**HAM_VECTORS, "memory": False}),
    "dense-lstm": ("dense-lstm", DENSE),
    **{f"dense-lstm-{f}": ("dense-lstm", {**DENSE, "fusion": f}) for f in ("none", "add", "mean")},
    **{
        f"dense-lstm-self-attention-{v}": ("dense-lstm", {**DENSE, "fusion": "self-attention", "version": v})
        for v in (1, 2, 3, 4)
    },
    **{
        f"kv-memory-{a}-{e}": ("kv-memory", {**KEY_VALUE, "addressing": a, "encoder": e})
        for a in ("none", "last-read", "memory-lstm")
        for e in ("none", "lstm")
    },
    "kv-memory-values": ("kv-memory", {**KEY_VALUE, "projection": 4, "value_width": 2}),
    "kv-memory-values-alone": ("kv-memory", {**KEY_VALUE, "encoder": "none", "value_width": 2}),
}


def make(variant: str, *, seed: int = 3, spread: float = 0.7, **options: Any) -> Captioner:
    """Return a variant's captioner in float64, with large random weights that saturate nonlinearities."""
    name, sizes = VARIANTS[variant]
    torch.manual_seed(seed)
    captioner = build(name, {**sizes, **options})
    with torch.no_grad():
        for parameter in captioner.parameters():
            parameter.normal_(0, spread)
    return captioner.double().eval()


def clip(captioner: Captioner, *shape: int, fill: float | None = None) -> Tensor:
    """Return random features, or all ``fill``, with batch (and segment) and frame sizes ``shape``."""
    config = captioner.config
    locations = (config.locations,) if config.locations else ()
    size = (*shape, *locations, config.feature_width)
    values = torch.randn(size) if fill is None else torch.full(size, fill)
    return values.to(next(captioner.parameters()).dtype)


def all_real(*shape: int) -> Tensor:
    """Return a mask without padding."""
    return torch.ones(*shape, dtype=torch.bool)


def padded_pair(captioner: Captioner) -> tuple[Tensor, Tensor, list[int]]:
    """Return features (2, 4, D) of videos of 2 and 4 frames, padded with large numbers; mask, lengths."""
    features, lengths = clip(captioner, 2, 4), [2, 4]
    mask = torch.arange(4) < torch.tensor(lengths).unsqueeze(-1)
    features[~mask] = 1e3
    return features, mask, lengths


def weights(captioner: Captioner) -> dict[str, list]:
    """Return all tensors by name, as nested lists."""
    return {name: tensor.tolist() for name, tensor in captioner.state_dict().items()}


def tokens(*rows: Sequence[int]) -> Tensor:
    """Return token ids (B, L)."""
    return torch.tensor(rows)
