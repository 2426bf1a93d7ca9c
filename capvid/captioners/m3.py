"""M3: Wang et al., "Multimodal Memory Modelling for Video Captioning" (2016).

An external memory, written by language and vision in turn, guides temporal attention and feeds the LSTM.
One word: write text (Eq. 8), read for attention (Eq. 10), attend to the frames and a blank one (Eq. 11-14),
write what was seen (Eq. 15), read for the decoder (Eq. 17), LSTM (Eq. 18), deep output (Eq. 25-26).

Where the print leaves room: the heads of the text write and of both reads are emitted from h_{t-1}, since
h_t does not exist yet when they act (Eq. 19-20 print h_t); those of the visual write from V_t. Keys go
through tanh, sharpening through softplus, erase vectors through a sigmoid, add vectors through tanh. The
memory starts from learned rows that differ: with equal rows, content addressing could never tell them apart.
h_0 and c_0 come from the mean frame through a tanh layer, as in Yao et al. (2015). The epsilon of Eq. 21 is
1e-8. Not in the paper: frames may be standardised and projected first. Where dropout falls (Section 4.4) is
said in :class:`~capvid.captioners.layers.AttentiveCaptioner`.

Notation for tensor shapes: B batch, T frames, N memory rows, M row width; the rest as in
:mod:`capvid.captioners.layers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners.base import CAPTIONERS, State, Trace
from capvid.captioners.layers import (
    AdditiveAttention,
    AttentiveCaptioner,
    AttentiveConfig,
    address,
    first_state,
    normal,
    read_rows,
    write_rows,
)


@dataclass(frozen=True, kw_only=True)
class M3Config(AttentiveConfig):
    """Sizes of :class:`M3`.

    Attributes:
        memory_rows: N, locations of the memory.
        memory_width: M, width of one location.
    """

    memory_rows: int = 128
    memory_width: int = 512


@CAPTIONERS.register("m3")
class M3(AttentiveCaptioner):
    """The multimodal memory model."""

    name = "m3"
    config_class = M3Config

    def __init__(self, config: M3Config) -> None:
        width, m = self.frame_width(config), config.memory_width
        super().__init__(config, extra_width=m)
        self.attention = AdditiveAttention(query=m, value=width, width=config.attention)
        # Each head has parameters of its own: rows of one matrix per source, so that they cost one product.
        # Text: keys of write, read, read; add, erase of the write; betas. Vision: key, add, erase, beta.
        self.text_heads = nn.Linear(config.hidden, 5 * m + 3)
        self.visual_head = nn.Linear(width, 3 * m + 1)
        self.memory = nn.Parameter(normal(config.memory_rows, m, std=m**-0.5))

    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Return the first state of features (B, T, D), real by ``mask`` (B, T)."""
        frames = self.frames(features, mask)
        h, c = first_state(self.initial, frames, mask)
        frames = F.pad(frames, (0, 0, 0, 1))  # the blank feature (B, T + 1, D'), Eq. 14
        mask = F.pad(mask, (0, 1), value=True)
        video = {"frames": frames, "keys": self.attention.key(frames), "mask": mask}
        memory = self.memory.expand(features.shape[0], -1, -1)  # (B, N, M)
        return State(video, {"h": h, "c": c, "memory": memory})

    def advance(
        self, word_gates: Tensor, state: State
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Trace]:
        """Compute one word: V_t (B, D'), h_t (B, H); memory; weights of attention and of the four heads."""
        video, h, c = state.video, state.memory["h"], state.memory["c"]
        m = self.config.memory_width
        # the dtype of c, which is never in half precision: addressing would lose too much
        heads = self.text_heads(h).to(c.dtype)  # (B, 5 M + 3)
        write_key, read_key, decoder_key, add, erase, betas = heads.split([m, m, m, m, m, 3], -1)
        beta_write, beta_read, beta_decoder = F.softplus(betas).split(1, -1)  # Eq. 20

        # Write the text so far, read what attention needs.
        memory = state.memory["memory"]
        w_text = address(memory, torch.tanh(write_key), beta_write)  # Eq. 19-23
        memory = write_rows(memory, w_text, torch.sigmoid(erase), torch.tanh(add))  # Eq. 8
        w_attend = address(memory, torch.tanh(read_key), beta_read)
        guide = read_rows(memory, w_attend)  # Eq. 10

        context, attention = self.attention(guide, video["keys"], video["frames"], video["mask"])  # Eq. 11-14

        # Write what was seen, read what the LSTM needs.
        visual_key, add, erase, beta = self.visual_head(context).to(c.dtype).split([m, m, m, 1], -1)
        w_visual = address(memory, torch.tanh(visual_key), F.softplus(beta))
        memory = write_rows(memory, w_visual, torch.sigmoid(erase), torch.tanh(add))  # Eq. 15
        w_decode = address(memory, torch.tanh(decoder_key), beta_decoder)
        h, c = self.cell(word_gates, read_rows(memory, w_decode), h, c)  # Eq. 17, 18

        trace = {
            "attention": attention[:, :-1],  # over real frames: sums to at most 1, Eq. 14
            "blank": attention[:, -1],
            "write_text": w_text,
            "read_attention": w_attend,
            "write_visual": w_visual,
            "read_decoder": w_decode,
        }
        return (context, h), {"h": h, "c": c, "memory": memory}, trace


@CAPTIONERS.register("soft-attention")
class SoftAttention(AttentiveCaptioner):
    """The baseline SA of the M3 paper: Yao et al., "Describing Videos by Exploiting ..." (2015).

    An LSTM whose further input is the attended frame; attention is guided by the previous hidden state.
    """

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

    def advance(
        self, word_gates: Tensor, state: State
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Trace]:
        """Attend by h_{t-1}, then the LSTM: context (B, D') and h_t (B, H), memory, trace."""
        video, h, c = state.video, state.memory["h"], state.memory["c"]
        context, weights = self.attention(h, video["keys"], video["frames"], video["mask"])
        h, c = self.cell(word_gates, context, h, c)
        return (context, h), {"h": h, "c": c}, {"attention": weights}
