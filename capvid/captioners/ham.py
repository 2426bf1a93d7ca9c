"""HAM: Fakoor et al., "Memory-augmented Attention Modelling for Videos" (2016).

A temporal model (TEM) runs over the frames and attends to the locations of each feature map (Eq. 2-5). For
every word, attention over its states is guided by the decoder's state and by a memory of what was attended
before (Eq. 6-8); the memory takes the attended state up (Eq. 9) and is what the decoder sees of the video
(Eq. 10-11).

The rows of Table 1 leave something out. Without ``temporal_model``, H_v are the vectors of the frames (No
TEM). Without ``memory``, the decoder sees the attended state of the current step itself (Att): there is no
f_m (Eq. 9) and no h_m in Eq. 6. Without ``attend`` too, Eq. 6-9 are removed and the rest is kept (No HAM):
f_g of Eq. 10 reads the word and its own state, which starts from the temporal model's last one.

Where the print leaves room or is departed from:

- f_v and f_g are stacks of two LSTMs, of which Eq. 2-11 speak as of one. h_v and h_g are the states of the
  top layer: they attend (Eq. 2, 6), are attended to (Eq. 8) and give the word (Eq. 11).
- The first states are not printed. h_0 and c_0 of the temporal model's first layer come from the mean of the
  maps over locations and frames, through a network of two tanh layers without biases; those of the layers
  above are zero. The decoder starts from the temporal model's states at the last frame, layer by layer;
  without temporal model, from the mean frame in the same way.
- The memory starts at zero, and the start token is read before anything is attended to: h_m, or the attended
  state that stands in for it, is zero there, and Eq. 6-9 begin with the first word.
- The LSTM of Eq. 5 is printed without biases and has none; those of f_m and f_g are not printed and have
  them. Eq. 6, 7 and 11 have no biases.
- Eq. 12 lists the parameters of its L2 term without those of the decoder and the words; here it covers all.
- Eq. 6 prints K x K for W_v and W_g; ``attention`` may be other than K here, and so may be the width of H_v
  without temporal model. With ``projection``, frames go through a linear layer first (not printed).
- Since the weights of Eq. 2 sum to 1, standardising and projecting the attended location F^t of Eq. 3 equals
  attending to standardised and projected locations; it spares the work on the whole map.
- Dropout is not printed. It falls on words, on F^t (or the frames), projected or not, between the layers of a
  stack and on h_g before Eq. 11, never on what goes from step to step.

Notation for tensor shapes: B batch, T frames, L locations of a map, D feature width, D' the same after the
projection, K width of H_v (``hidden``, or D' without temporal model), M memory, N layers; the rest as in
:mod:`capvid.captioners.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capvid.captioners.base import CAPTIONERS, MAX_LAYERS, State, Trace
from capvid.captioners.layers import (
    AdditiveAttention,
    LSTMCell,
    RecurrentCaptioner,
    RecurrentConfig,
    at_least_float32,
    at_least_one_frame,
    init_gates,
    masked_softmax,
    mean_frame,
)
from capvid.errors import UsageError
from capvid.utils.validation import bounded


@dataclass(frozen=True, kw_only=True)
class HAMConfig(RecurrentConfig):
    """Sizes of :class:`HAM`, and which of its parts there are.

    Attributes:
        memory_width: M, width of the memory's state h_m.
        layers: LSTMs in the temporal model and in the decoder.
        bottleneck: width between the two layers of the network that makes the first states.
        temporal_model: run over feature maps; if not, H_v are vectors, one per frame.
        memory: remember what was attended; if not, the decoder sees the current step's alone.
        attend: attend to H_v for every word; if not, the decoder sees the video in its first state only.
    """

    memory_width: int = 512
    layers: int = bounded(2, maximum=MAX_LAYERS)
    bottleneck: int = 200
    temporal_model: bool = True
    memory: bool = True
    attend: bool = True

    def __post_init__(self) -> None:
        if self.memory and not self.attend:
            raise UsageError(
                "attend = off: without attention there is nothing to remember",
                remedy="set memory = off, too (No HAM + TEM)",
            )


class _WeightedSum(torch.autograd.Function):
    """Sum (B, D) of a map (B, L, D), which may be in half precision, by weights (B, L).

    Computed and differentiated in the weights' precision without a copy of the map in it.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(weights, vectors)
        with torch.autocast(weights.device.type, enabled=False):
            return torch.bmm(weights.unsqueeze(1), vectors.to(weights.dtype)).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,), (weights, vectors) = grads, ctx.saved_tensors
        to_weights = to_vectors = None
        if ctx.needs_input_grad[0]:
            to_weights = torch.bmm(vectors.to(grad.dtype), grad.unsqueeze(-1)).squeeze(-1)
        if ctx.needs_input_grad[1]:
            to_vectors = (weights.unsqueeze(-1) * grad.unsqueeze(1)).to(vectors.dtype)
        return to_weights, to_vectors


def weighted_sum(weights: Tensor, vectors: Tensor) -> Tensor:
    """Compute Eq. 3, ``sum_j rho_j X_j``, of weights (B, L) and one frame's map (B, L, D) -> (B, D)."""
    total: Tensor = _WeightedSum.apply(weights.to(torch.promote_types(weights.dtype, vectors.dtype)), vectors)
    return total


def mean_location(maps: Tensor, mask: Tensor) -> Tensor:
    """Average the locations of all real frames, one frame at a time: (B, T, L, D) and (B, T) -> (B, D)."""
    share = mask / (mask.sum(1, keepdim=True).clamp_min(1) * maps.shape[2])  # (B, T)
    shares = share.unsqueeze(-1).expand(maps.shape[:3])  # (B, T, L)
    parts = [weighted_sum(w, vectors) for w, vectors in zip(shares.unbind(1), maps.unbind(1), strict=True)]
    return torch.stack(parts).sum(0)


class LSTMLayer(nn.Module):
    """An LSTM with one input: the flow printed after Eq. 5, and biases where they are wanted."""

    def __init__(self, *, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * hidden, bias=bias)  # W_xi, W_xf, W_xo, W_xg
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)  # W_hi, W_hf, W_ho, W_hg
        init_gates(self.input, self.recurrent)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step: (B, X), (B, H), (B, H) -> h_t, c_t, each (B, H)."""
        i, f, o, g = (self.input(x) + self.recurrent(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class LSTMStack(nn.ModuleList):
    """LSTMs of which each reads the one below; dropout falls between them."""

    def __init__(self, *, width: int, hidden: int, layers: int, bias: bool, dropout: float) -> None:
        widths = [width] + [hidden] * (layers - 1)
        super().__init__(LSTMLayer(width=w, hidden=hidden, bias=bias) for w in widths[:layers])
        self.rate = dropout

    def forward(
        self, x: Tensor, h: Sequence[Tensor], c: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute one step: the lowest input (B, X), each layer's h and c (B, H) -> each layer's new ones."""
        hidden: list[Tensor] = []
        cells: list[Tensor] = []
        for number, layer in enumerate(self):
            below = nn.functional.dropout(hidden[-1], self.rate, self.training) if number else x
            new_h, new_c = layer(below, h[number], c[number])
            hidden.append(new_h)
            cells.append(new_c)
        return hidden, cells


class FirstLayerState(nn.Sequential):
    """h_0 and c_0 of a stack's first layer from the mean frame; zero for the layers above."""

    def __init__(self, *, width: int, bottleneck: int, hidden: int, layers: int) -> None:
        super().__init__(
            nn.Linear(width, bottleneck, bias=False),
            nn.Tanh(),
            nn.Linear(bottleneck, 2 * hidden, bias=False),
            nn.Tanh(),
        )
        self.layers = layers

    def of(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return h_0 and c_0, each (B, N, H), from the mean frame (B, D')."""
        first = at_least_float32(self(mean)).unsqueeze(1)  # (B, 1, 2 H)
        h, c = nn.functional.pad(first, (0, 0, 0, self.layers - 1)).chunk(2, -1)
        return h, c


class TemporalModel(nn.Module):
    """TEM: LSTMs over the frames with attention to the locations of each one, Eq. 2-5."""

    def __init__(self, *, width: int, locations: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.location = nn.Linear(hidden, locations, bias=False)  # W_p
        self.stack = LSTMStack(width=width, hidden=hidden, layers=layers, bias=False, dropout=dropout)

    def forward(
        self, maps: Tensor, mask: Tensor, h: Tensor, c: Tensor, frames: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return H_v (B, T, H), and h and c (B, N, H) after each video's last real frame.

        ``maps`` (B, T, L, D) may be in any precision; real frames come first by ``mask`` (B, T); ``h`` and
        ``c`` (B, N, H) are the first states; ``frames`` standardises and projects vectors (B, D).
        """
        hidden, cells = list(h.unbind(1)), list(c.unbind(1))
        all_hidden, all_cells = [], []
        for vectors, real in zip(maps.unbind(1), mask.unbind(1), strict=True):
            rho = masked_softmax(self.location(hidden[-1]), None)  # (B, L), Eq. 2
            attended = frames(weighted_sum(rho, vectors), real)  # F^t (B, D'), Eq. 3, 4
            hidden, cells = self.stack(attended, hidden, cells)  # Eq. 5
            all_hidden.append(torch.stack(hidden, 1))
            all_cells.append(torch.stack(cells, 1))
        states, ends = torch.stack(all_hidden, 1), torch.stack(all_cells, 1)  # (B, T, N, H)
        last = (mask.sum(1) - 1).clamp_min(0)
        rows = torch.arange(len(last), device=last.device)
        return states[:, :, -1], states[rows, last], ends[rows, last]


@CAPTIONERS.register("ham")
class HAM(RecurrentCaptioner):
    """Hierarchical attention and memory over a temporal model."""

    name = "ham"
    config_class = HAMConfig
    maps_option = "temporal_model"

    def __init__(self, config: HAMConfig) -> None:
        super().__init__(config)
        frame, hidden, layers = self.frame_width(config), config.hidden, config.layers
        state = hidden if config.temporal_model else frame  # K
        sizes = {"hidden": hidden, "layers": layers}
        self.initial = FirstLayerState(width=frame, bottleneck=config.bottleneck, **sizes)
        self.temporal = None
        if config.temporal_model:
            self.temporal = TemporalModel(
                width=frame, locations=config.locations, dropout=config.dropout, **sizes
            )
        self.memory, guide, self.input_width = None, hidden, state if config.attend else 0
        if config.memory:
            guide, self.input_width = hidden + config.memory_width, config.memory_width
            self.memory = LSTMLayer(width=state, hidden=config.memory_width, bias=True)  # f_m
        self.attention = None
        if config.attend:
            self.attention = AdditiveAttention(
                query=guide, value=state, width=config.attention
            )  # W_g, W_m, U
            self.attention.key = nn.Linear(state, config.attention, bias=False)  # W_v: no bias in Eq. 6
        self.cell = LSTMCell(word=config.embedding, extra=self.input_width, hidden=hidden)  # f_g
        self.upper = LSTMStack(
            width=hidden, hidden=hidden, layers=layers - 1, bias=True, dropout=config.dropout
        )
        self.vocabulary = nn.Linear(hidden, config.vocabulary_size, bias=False)  # W_e

    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Return the first state of maps (B, T, L, D), or vectors (B, T, D), real by ``mask`` (B, T)."""
        features, mask = at_least_one_frame(features, mask)
        if self.temporal is not None:
            h, c = self.initial.of(self.frames(mean_location(features, mask), mask.any(1)))
            states, h, c = self.temporal(features, mask, h, c, self.frames)
        else:
            states = self.frames(features, mask)
            h, c = self.initial.of(mean_frame(states, mask))
        video = {"states": states, "mask": mask}
        if self.attention is not None:
            video["keys"] = self.attention.key(states)
        memory = {"h": h, "c": c}
        if self.memory is not None:
            memory["m"] = memory["m_cell"] = h.new_zeros(len(h), self.config.memory_width)
        return State(video, memory)

    def advance(
        self, word_gates: Tensor, state: State
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Trace]:
        """Attend, remember, then the decoder: h_g (B, H), memory, and the weights of the frames, if any."""
        video, memory = state.video, dict(state.memory)
        h, c = memory["h"].unbind(1), memory["c"].unbind(1)
        if self.attention is None or not state.words:  # the start token: nothing was attended to yet
            weights = h[-1].new_zeros(len(h[-1]), video["mask"].shape[1])
            context = h[-1].new_zeros(len(h[-1]), self.input_width)
        else:
            guide = torch.cat([h[-1], memory["m"]], -1) if self.memory is not None else h[-1]
            context, weights = self.attention(guide, video["keys"], video["states"], video["mask"])  # Eq. 6-8
            if self.memory is not None:
                memory["m"], memory["m_cell"] = self.memory(context, memory["m"], memory["m_cell"])  # Eq. 9
                context = memory["m"]
        first_h, first_c = self.cell(word_gates, context, h[0], c[0])  # Eq. 10
        hidden, cells = [first_h], [first_c]
        if self.upper:
            above_h, above_c = self.upper(self.dropout(first_h), h[1:], c[1:])
            hidden, cells = hidden + above_h, cells + above_c
        memory |= {"h": torch.stack(hidden, 1), "c": torch.stack(cells, 1)}
        return (hidden[-1],), memory, {"attention": weights} if self.attention is not None else {}
