"""MART: Lei et al., "MART: Memory-Augmented Recurrent Transformer" (2020), Section 3.2.

One stack of layers reads [CLS] video [SEP] text: the video sees itself, a word sees the video and the words
up to itself. Each layer keeps a memory of ``memory_length`` slots, which its tokens attend to and which is
updated, when a segment's sentence is whole, for the segments after it. With ``recurrence`` off there is no
memory and no attention to it; what is left is a transformer whose encoder and decoder are one.

Where the paper is silent, the authors' settings are followed: the memory M_0 of a layer is made from the
first segment, the mean of the video's intermediate states plus a bias for each slot through a linear layer,
layer norm and dropout; the updater sees the whole segment, all words included (its result serves only the
next one). The end token is no input and so is not remembered.

The common parts are described in :mod:`capvid.captioners.transformer`, the notation too; M is
``memory_length``. The paper's equations have no numbers: they are named after their left sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from capvid.captioners.base import CAPTIONERS, Carried, State, Trace
from capvid.captioners.layers import at_least_float32, normal
from capvid.captioners.transformer import (
    Attention,
    Layer,
    Pass,
    SentencePass,
    TransformerCaptioner,
    TransformerConfig,
    VideoPass,
    WordPass,
)
from capvid.text.vocabulary import PAD


@dataclass(frozen=True, kw_only=True)
class MARTConfig(TransformerConfig):
    """Sizes of :class:`MART`.

    Attributes:
        memory_length: M, slots of each layer's memory.
        recurrence: whether there is a memory.
    """

    memory_length: int = 1
    recurrence: bool = True


class MemoryUpdater(nn.Module):
    """M_t of a layer from M_{t-1} and the intermediate states of its segment."""

    def __init__(self, config: MARTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.attention = Attention(config)
        self.memory = nn.Linear(hidden, 2 * hidden, bias=False)  # W_mc, W_mz
        self.summary = nn.Linear(hidden, 2 * hidden)  # W_sc, b_c, W_sz, b_z

    def forward(self, memory: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return M_t (B, M, H) from M_{t-1} (B, M, H) and states (B, N, H), real by ``mask`` (B, N)."""
        s = self.attention.summaries(memory, hidden, mask)  # S_t
        cell, gate = at_least_float32(self.memory(memory) + self.summary(s)).chunk(2, -1)
        c = torch.tanh(cell)  # C_t
        z = torch.sigmoid(gate)  # Z_t
        return (1 - z) * c + z * memory  # M_t


class MemoryLayer(Layer):
    """A layer with its memory."""

    def __init__(self, config: MARTConfig, cache_name: str, attention: type[Attention] = Attention) -> None:
        super().__init__(config, cache_name, attention)
        hidden = config.hidden
        self.memory_attention = attention(config)
        self.updater = MemoryUpdater(config)
        self.slots = nn.Parameter(normal(config.memory_length, hidden))
        self.first = nn.Sequential(nn.Linear(hidden, hidden), config.norm(), nn.Dropout(config.dropout))

    def first_memory(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return M_0 (B, M, H) from the states (B, T + 2, H) of the first segment's video."""
        real = mask.unsqueeze(-1)
        mean = (states * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)  # (B, 1, H)
        return at_least_float32(self.first(mean + self.slots))

    def memory_input(self, hidden: Tensor) -> Tensor:
        """Return what the memory and the attention to it read, (B, Q, H): H-bar^l itself."""
        return hidden

    def augmented(self, hidden: Tensor, states: Tensor, sees: Pass, memory: Tensor | None = None) -> Tensor:
        """Return H^l (B, Q, H) from H-bar^l and ``states`` S that the memory reads.

        Attention with K, V = [M_{t-1}; S], then feed-forward.
        """
        attended = sees(self.memory_attention, states, f"{self.cache_name}.memory", memory)
        return self.fed_forward(attended, hidden)

    def forward(self, x: Tensor, sees: Pass, before: Tensor | None = None) -> Tensor:
        """Return H^l (B, Q, H) from H^{l-1}, where the memory is cached."""
        hidden = self.intermediate(x, sees, before)
        return self.augmented(hidden, self.memory_input(hidden), sees)


@CAPTIONERS.register("mart")
class MART(TransformerCaptioner):
    """The memory-augmented recurrent transformer."""

    name = "mart"
    config_class = MARTConfig

    def __init__(self, config: MARTConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.build_layer(str(n)) for n in range(config.layers))

    def build_layer(self, cache_name: str) -> Layer:
        """Return a new layer, with a memory if there is recurrence."""
        return MemoryLayer(self.config, cache_name) if self.recurrent else Layer(self.config, cache_name)

    @property
    def recurrent(self) -> bool:
        """Whether a segment depends on those before it."""
        return self.config.recurrence

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment; ``carried`` holds the layers' memories."""
        x, mask = self.video_tokens(features, mask)
        sees = VideoPass(mask)
        *_, last = self.layers
        for layer in self.layers:
            if not isinstance(layer, MemoryLayer):
                x = layer.store(x, sees) if layer is last else layer(x, sees)
                continue
            hidden = layer.intermediate(x, sees)
            states = layer.memory_input(hidden)
            name = f"memory.{layer.cache_name}"
            memory = carried[name] if carried else layer.first_memory(states, mask)
            sees.kept |= {name: memory, f"states.{layer.cache_name}": states}
            if layer is last:
                sees.store(layer.memory_attention, states, f"{layer.cache_name}.memory", memory)
            else:
                x = layer.augmented(hidden, states, sees, memory)
        return State(sees.kept, {})

    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Return the input of the vocabulary layer (B, L, H), and the layers' memories M_t."""
        x, sees, carried = self.text_tokens(tokens, state), SentencePass(state, tokens), {}
        real = torch.cat([state.video["mask"], tokens != PAD], 1)
        for layer in self.layers:
            if not isinstance(layer, MemoryLayer):
                x = layer(x, sees)
                continue
            hidden = layer.intermediate(x, sees)
            states = layer.memory_input(hidden)
            segment = torch.cat([state.video[f"states.{layer.cache_name}"], states], 1)
            name = f"memory.{layer.cache_name}"
            carried[name] = layer.updater(state.video[name], segment, real)
            x = layer.augmented(hidden, states, sees)
        return self.transform(x), carried

    def memory_change(self, state: State, carried: Carried) -> Tensor:
        """Return |M_t - M_{t-1}| / |M_{t-1}| of each layer, (B, layers)."""
        if not carried:
            return super().memory_change(state, carried)
        names = sorted(carried, key=lambda name: int(name.rpartition(".")[2]))
        before, after = (
            torch.stack([part[n].flatten(1) for n in names], 1) for part in (state.video, carried)
        )
        return (after - before).norm(dim=-1) / before.norm(dim=-1)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption; the trace has the last layer's weights of frames and memory slots."""
        x = self.next_tokens(tokens, state)
        sees = WordPass(state, x.shape[1])
        for layer in self.layers:
            x = layer(x, sees)
        last = str(self.config.layers - 1)
        trace = {"attention": sees.looked(last, 1, state.video["mask"].shape[1] - 2)}
        if self.recurrent:
            trace["memory"] = sees.looked(f"{last}.memory", 0, self.config.memory_length)
        return self.next_logits(x), sees.after(), trace
