"""Soft attention over frames: Yao et al., "Describing Videos by Exploiting Temporal Structure" (2015).

The baseline that the M3 paper calls SA: temporal attention guided by the LSTM's previous hidden state.
Notation for tensor shapes as in :mod:`capvid.captioners.layers`.
"""

from __future__ import annotations

from torch import Tensor

from capvid.captioners.base import CAPTIONERS, State, Trace
from capvid.captioners.layers import (
    AdditiveAttention,
    AttentiveCaptioner,
    AttentiveConfig,
    first_state,
)


@CAPTIONERS.register("soft-attention")
class SoftAttention(AttentiveCaptioner):
    """An LSTM whose further input is the attended frame."""

    name = "soft-attention"
    config_class = AttentiveConfig

    def __init__(self, config: AttentiveConfig) -> None:
        width = self.frame_width(config)
        super().__init__(config, extra_width=width)
        self.attention = AdditiveAttention(query=config.hidden, value=width, width=config.attention)

    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Return the first state of features (B, T, D), real by ``mask`` (B, T)."""
        frames = self.frames(features, mask)
        h, c = first_state(self.initial, frames, mask)
        video = {"frames": frames, "keys": self.attention.key(frames), "mask": mask}
        return State(video, {"h": h, "c": c})

    def advance(self, word_gates: Tensor, state: State) -> tuple[tuple[Tensor, ...], State, Trace]:
        """Attend by h_{t-1}, then the LSTM: context (B, D') and h_t (B, H), state, trace."""
        video, h, c = state.video, state.memory["h"], state.memory["c"]
        context, weights = self.attention(h, video["keys"], video["frames"], video["mask"])
        h, c = self.cell(word_gates, context, h, c)
        return (context, h), state.after({"h": h, "c": c}), {"attention": weights}
