"""M3: Wang et al., "Multimodal Memory Modelling for Video Captioning" (2016).

An external memory, written by language and vision in turn, guides temporal attention and feeds the LSTM.
One word: write text (Eq. 8), read for attention (Eq. 10), attend to the frames and a blank one (Eq. 11-14),
write what was seen (Eq. 15), read for the decoder (Eq. 17), LSTM (Eq. 18), deep output (Eq. 25-26).

Where the print leaves room: the heads of the text write and of both reads are emitted from h_{t-1}, since
h_t does not exist yet when they act (Eq. 19-20 print h_t); those of the visual write from V_t. Keys go
through tanh, sharpening through softplus, erase vectors through a sigmoid, add vectors through tanh. The
memory starts from learned rows that differ: with equal rows, content addressing could never tell them apart.

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
    first_state,
)

EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class M3Config(AttentiveConfig):
    """Sizes of :class:`M3`.

    Attributes:
        memory_rows: N, locations of the memory.
        memory_width: M, width of one location.
    """

    memory_rows: int = 128
    memory_width: int = 512


def address(memory: Tensor, key: Tensor, sharpening: Tensor) -> Tensor:
    """Address by content, Eq. 21-23: memory (B, N, M), key (B, M), sharpening (B, 1) -> weights (B, N)."""
    norms = memory.norm(dim=-1) * key.norm(dim=-1, keepdim=True)  # (B, N)
    similarity = torch.bmm(memory, key.unsqueeze(-1)).squeeze(-1) / (norms + EPSILON)  # Eq. 21
    return (sharpening * similarity).softmax(-1)  # Eq. 22, 23


def read(memory: Tensor, weights: Tensor) -> Tensor:
    """Read by Eq. 10 and 17: memory (B, N, M) weighted by (B, N) -> (B, M)."""
    return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


def write(memory: Tensor, weights: Tensor, erase: Tensor, add: Tensor) -> Tensor:
    """Write by Eq. 8, 15: M(i) [1 - w(i) e] + w(i) a; memory (B, N, M), weights (B, N), e and a (B, M)."""
    w = weights.unsqueeze(-1)  # (B, N, 1)
    change = torch.addcmul(add.unsqueeze(1), memory, erase.unsqueeze(1), value=-1)  # a - M(i) e
    return torch.addcmul(memory, w, change)


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
        self.memory = nn.Parameter(torch.randn(config.memory_rows, m) * m**-0.5)

    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Return the first state of features (B, T, D), real by ``mask`` (B, T)."""
        frames = self.frames(features, mask)
        h, c = first_state(self.initial, frames, mask)
        frames = F.pad(frames, (0, 0, 0, 1))  # the blank feature (B, T + 1, D'), Eq. 14
        mask = F.pad(mask, (0, 1), value=True)
        video = {"frames": frames, "keys": self.attention.key(frames), "mask": mask}
        memory = self.memory.expand(features.shape[0], -1, -1)  # (B, N, M)
        return State(video, {"h": h, "c": c, "memory": memory})

    def advance(self, word_gates: Tensor, state: State) -> tuple[tuple[Tensor, ...], State, Trace]:
        """Compute one word: V_t (B, D'), h_t (B, H); state; weights of attention and of the four heads."""
        video, h, c = state.video, state.memory["h"], state.memory["c"]
        m = self.config.memory_width
        # the dtype of c, which is never in half precision: addressing would lose too much
        heads = self.text_heads(h).to(c.dtype)  # (B, 5 M + 3)
        write_key, read_key, decoder_key, add, erase, betas = heads.split([m, m, m, m, m, 3], -1)
        beta_write, beta_read, beta_decoder = F.softplus(betas).split(1, -1)  # Eq. 20

        # Write the text so far, read what attention needs.
        memory = state.memory["memory"]
        w_text = address(memory, torch.tanh(write_key), beta_write)  # Eq. 19-23
        memory = write(memory, w_text, torch.sigmoid(erase), torch.tanh(add))  # Eq. 8
        w_attend = address(memory, torch.tanh(read_key), beta_read)
        guide = read(memory, w_attend)  # Eq. 10

        context, attention = self.attention(guide, video["keys"], video["frames"], video["mask"])  # Eq. 11-14

        # Write what was seen, read what the LSTM needs.
        visual_key, add, erase, beta = self.visual_head(context).to(c.dtype).split([m, m, m, 1], -1)
        w_visual = address(memory, torch.tanh(visual_key), F.softplus(beta))
        memory = write(memory, w_visual, torch.sigmoid(erase), torch.tanh(add))  # Eq. 15
        w_decode = address(memory, torch.tanh(decoder_key), beta_decoder)
        h, c = self.cell(word_gates, read(memory, w_decode), h, c)  # Eq. 17, 18

        trace = {
            "attention": attention[:, :-1],  # over real frames: sums to at most 1, Eq. 14
            "blank": attention[:, -1],
            "write_text": w_text,
            "read_attention": w_attend,
            "write_visual": w_visual,
            "read_decoder": w_decode,
        }
        return (context, h), state.after({"h": h, "c": c, "memory": memory}), trace


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

    def advance(self, word_gates: Tensor, state: State) -> tuple[tuple[Tensor, ...], State, Trace]:
        """Attend by h_{t-1}, then the LSTM: context (B, D') and h_t (B, H), state, trace."""
        video, h, c = state.video, state.memory["h"], state.memory["c"]
        context, weights = self.attention(h, video["keys"], video["frames"], video["mask"])
        h, c = self.cell(word_gates, context, h, c)
        return (context, h), state.after({"h": h, "c": c}), {"attention": weights}
