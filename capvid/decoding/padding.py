"""Videos of different lengths side by side in one tensor.

Notation for tensor shapes: B videos, S segments, T frames, D feature width (L, D for feature maps).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_frames(clips: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Clips of (T_i, D) frames -> features (B, T, D) padded with zeros, and mask (B, T) of real frames."""
    features = torch.nn.utils.rnn.pad_sequence(list(clips), batch_first=True)
    lengths = torch.tensor([len(clip) for clip in clips], device=features.device)
    mask = torch.arange(features.shape[1], device=features.device) < lengths.unsqueeze(-1)
    return features, mask


def pad_segments(videos: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Segments of (T_ij, D) frames of each video, side by side.

    Returns:
        features (B, S, T, D) padded with zeros, mask (B, S, T) of real frames, numbers of segments (B,).
    """
    flat, flat_mask = pad_frames([clip for segments in videos for clip in segments])  # (N, T, D), (N, T)
    counts = torch.tensor([len(segments) for segments in videos], device=flat.device)
    real = torch.arange(int(counts.max()), device=flat.device) < counts.unsqueeze(-1)  # (B, S)
    features = flat.new_zeros(*real.shape, *flat.shape[1:])
    mask = flat_mask.new_zeros(*real.shape, flat.shape[1])
    features[real], mask[real] = flat, flat_mask
    return features, mask, counts
