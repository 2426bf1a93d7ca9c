"""Key-value memory: Jain et al., "Recurrent Memory Addressing for describing videos" (2016).

Every frame is a memory slot of a key k_i, where to look, and a value v_i, what it means. Which slots are read
depends on what was said so far and on what was read before. One word: address the keys (Eq. 11-14), read keys
and values (Eq. 3), LSTM (Eq. 4-9), output (Eq. 10).

Where the print leaves room: what was read before the first word, phi_0(K), is the mean of the keys, as h_0^k
is; the cell state of the addressing LSTM starts at zero; the decoder's h_0 and c_0 come from the mean key
through one tanh layer. The encoder (Eq. 2) is an LSTM with dropout on its inputs and outputs but not on its
recurrence, as in Zaremba et al. (2014), whom the paper names for it. Not in the paper: frame features and
values may be projected first, and the frame features may serve as values where there are no others.

The paper's values are region codes of DenseCap (Section 5.1), which is published for Torch 7 only. Any
stream of features of the same frames can be the values; an image embedding of CLIP was learned from
sentences, as theirs.

Notation for tensor shapes: B batch, T frames, K key width, U value width; the rest as in
:mod:`capvid.captioners.layers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capvid.captioners.base import CAPTIONERS, State, Trace
from capvid.captioners.layers import (
    AdditiveAttention,
    LSTMCell,
    RecurrentCaptioner,
    RecurrentConfig,
    at_least_float32,
    at_least_one_frame,
    first_state,
    mean_frame,
)
from capvid.errors import UsageError
from capvid.utils.validation import choice


@dataclass(frozen=True, kw_only=True)
class KeyValueConfig(RecurrentConfig):
    """Sizes and variants of :class:`KeyValueMemory`; ``projection`` is that of the values, too.

    Attributes:
        addressing: what guides attention beside the decoder's state: an LSTM over the keys read so far
            (memory-lstm), the last keys read (last-read), or nothing (none).
        encoder: what makes keys of frame features: an LSTM in the order of time (lstm), or nothing: they are
            the keys (none).
        encoder_hidden: K, width of the LSTM encoder's state, hence of its keys and of the addressing LSTM.
        value_width: so many columns, the last ones of the features, are the values, and the columns before
            them the frame features; 0: all columns are frame features, and these are the values, too.
    """

    addressing: str = choice("memory-lstm", "last-read", "none")
    encoder: str = choice("lstm", "none")
    encoder_hidden: int = 512
    value_width: int = 0


class TwoStreams(nn.Module):
    """Projects frame features and values, which lie side by side, by a layer each."""

    def __init__(self, *, frame: int, value: int, width: int) -> None:
        super().__init__()
        self.widths = [frame, value]
        self.frame = nn.Linear(frame, width)
        self.value = nn.Linear(value, width)

    def forward(self, features: Tensor) -> Tensor:
        """Project (..., D) -> (..., 2 * width)."""
        frames, values = features.split(self.widths, -1)
        return torch.cat([self.frame(frames), self.value(values)], -1)


@CAPTIONERS.register("kv-memory")
class KeyValueMemory(RecurrentCaptioner):
    """A decoder that reads values from slots found by their keys.

    Dropout, which the paper does not print, falls on words, on frame features and values (projected or not:
    they enter LSTMs), on the encoder's keys, and on h_t in the output layer.
    """

    name = "kv-memory"
    config_class = KeyValueConfig

    def __init__(self, config: KeyValueConfig) -> None:
        if config.value_width >= config.feature_width:
            raise UsageError(
                f"value_width = {config.value_width}: the features are {config.feature_width} wide in all",
                remedy="expected frame features first and the values, so many columns, after them",
            )
        super().__init__(config)
        width = self.frame_width(config)
        self.key_width = width if config.encoder == "none" else config.encoder_hidden
        self.value_width = (config.projection or config.value_width) if config.value_width else width
        self.encoder = None if config.encoder == "none" else nn.LSTM(width, self.key_width, batch_first=True)
        self.addressing = (
            nn.LSTMCell(self.key_width, self.key_width) if config.addressing == "memory-lstm" else None
        )
        guide = 0 if config.addressing == "none" else self.key_width
        self.attention = AdditiveAttention(
            query=guide + config.hidden,  # W_k and W_d, side by side
            value=self.key_width,
            width=config.attention,
        )
        self.attention.key = nn.Linear(self.key_width, config.attention, bias=False)  # U_a
        self.initial = nn.Linear(self.key_width, 2 * config.hidden)
        self.cell = LSTMCell(
            word=config.embedding, extra=self.value_width, hidden=config.hidden, squash=False
        )
        self.output = nn.Linear(config.hidden + config.embedding + self.value_width, config.vocabulary_size)

    @staticmethod
    def make_projection(config: Any) -> nn.Module:
        """Return the layer that frame features and values go through first."""
        if not (config.projection and config.value_width):
            return RecurrentCaptioner.make_projection(config)
        frame = config.feature_width - config.value_width
        return TwoStreams(frame=frame, value=config.value_width, width=config.projection)

    @staticmethod
    def frame_width(config: Any) -> int:
        """Return the width of projected frame features."""
        return config.projection or config.feature_width - config.value_width

    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Return the first state of features (B, T, D), real by ``mask`` (B, T)."""
        features, mask = at_least_one_frame(features, mask)
        width = self.frame_width(self.config)
        streams = self.frames(features, mask)  # (B, T, frame width), and values after it if there are any
        frames, values = streams[..., :width], streams[..., -self.value_width :]
        keys = frames  # (B, T, K)
        if self.encoder is not None:
            keys = self.dropout(self.encoder(frames)[0]) * mask.unsqueeze(-1)  # Eq. 2
        h, c = first_state(self.initial, keys, mask)
        memory = {"h": h, "c": c}
        slots = values  # (B, T, U)
        if self.config.addressing != "none":
            if self.encoder is not None or self.config.value_width:  # else the values are the keys
                slots = torch.cat([keys, values], -1)  # (B, T, K + U)
            memory["read"] = at_least_float32(mean_frame(keys, mask))  # phi_0(K)
        if self.addressing is not None:
            memory["h_k"], memory["c_k"] = memory["read"], torch.zeros_like(memory["read"])
        return State({"slots": slots, "keys": self.attention.key(keys), "mask": mask}, memory)

    def advance(
        self, word_gates: Tensor, state: State
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Trace]:
        """Address, read, then the LSTM: phi_t(V) (B, U) and h_t (B, H), memory, trace."""
        video, memory = state.video, dict(state.memory)
        query = memory["h"]  # of Eq. 12, (B, K + H)
        if self.addressing is not None:
            h_k, c_k = self.addressing(memory["read"], (memory["h_k"], memory["c_k"]))  # Eq. 11
            memory["h_k"], memory["c_k"], query = h_k, c_k, torch.cat([h_k, query], -1)
        elif self.config.addressing == "last-read":
            query = torch.cat([memory["read"], query], -1)  # Eq. 11: h_t^k is phi_{t-1}(K)
        read, weights = self.attention(query, video["keys"], video["slots"], video["mask"])  # Eq. 3, 12-14
        value = read[:, -self.value_width :]  # phi_t(V)
        if self.config.addressing != "none":
            memory["read"] = at_least_float32(read[:, : self.key_width])  # phi_t(K)
        memory["h"], memory["c"] = self.cell(word_gates, value, memory["h"], memory["c"])  # Eq. 4-9
        return (value, memory["h"]), memory, {"attention": weights}

    def readout(self, *results: Tensor, words: Tensor) -> Tensor:
        """Return [h_t, x_t, phi_t(V)] of Eq. 10, (..., H + E + U)."""
        value, hidden = results
        return torch.cat([self.dropout(hidden), words, value], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the vocabulary layer of Eq. 10: (..., H + E + U) -> logits (..., V)."""
        return self.output(hidden)
