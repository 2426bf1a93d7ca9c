"""DenseLSTM: Zhu and Jiang, "Attention-based Densely Connected LSTM for Video Captioning" (2019).

A decoder whose every cell sees all earlier hidden states. One word: fuse s_0 .. s_{t-1} into A_t
(Eq. 17-22, or plainly), attend to the encoded frames by A_t (Eq. 14-16), LSTM with A_t for its hidden
state (Eq. 13), then one linear layer (Eq. 25). With ``fusion = none``, A_t is s_{t-1}: the baseline of
Eq. 9-12.

Where the print leaves room or is departed from:

- Eq. 17 prints no scale, while the text calls it scaled dot-product attention three times: products are
  divided by the square root of the width of queries and keys. That width is not printed; it is
  ``attention`` here. W^q and W^k have no bias, as printed.
- Eq. 20-21 count from s_1, which leaves nothing at t = 1; s_0 takes part, as in Eq. 17, whatever the fusion.
- Eq. 14 and 22 use the same letters for their weights; the vectors they apply to differ in width, so each
  has its own.
- Eq. 25 prints no bias, and there is none.
- Only the hidden state is densely connected; the cell state is the ordinary one. Of s_0 and c_0 nothing is
  said: a tanh layer makes them of the mean encoded frame.
- Section 4.2 pads videos below 40 frames with zeros, which take part; here padded frames are masked.
- Dropout falls, as in Zaremba et al. (2014), on what goes into and comes out of the LSTMs, never on
  what goes from step to step: on words, embedded frames, encoded frames, and s_t before Eq. 25.

Notation for tensor shapes: B batch, T frames, H_e encoder state, t earlier states including s_0; the rest
as in :mod:`capvid.captioners.layers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners.base import CAPTIONERS, State, Trace
from capvid.captioners.layers import (
    AdditiveAttention,
    LSTMCell,
    RecurrentCaptioner,
    RecurrentConfig,
    at_least_float32,
    at_least_one_frame,
    first_state,
    masked_softmax,
)
from capvid.errors import UsageError
from capvid.utils.validation import bounded, choice

FIRST_CAPACITY = 8


@dataclass(frozen=True, kw_only=True)
class DenseLSTMConfig(RecurrentConfig):
    """Sizes of :class:`DenseLSTM`, the paper's where it prints them.

    Attributes:
        encoder: H_e, width of the encoder's hidden state in each direction.
        fusion: what becomes of the earlier states.
        version: of self-attention, Table 4: 1 without feed-forward layer, 2 the paper's choice, 3 with two
            such layers, 4 with the mean over positions in place of their maximum.
    """

    embedding: int = 512
    hidden: int = 1024
    projection: int = bounded(512, minimum=0)
    encoder: int = 1024
    fusion: str = choice("latest-guiding", "none", "add", "mean", "self-attention")
    version: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.version <= 4:
            raise UsageError(f"version = {self.version}: not known", remedy="choose 1, 2, 3, 4")
        if self.version != 2 and self.fusion != "self-attention":
            raise UsageError(f"version = {self.version}: only fusion = self-attention has versions")


class TwoWayEncoder(nn.LSTM):
    """An LSTM over the frames in both directions with the same parameters, Eq. 7-8."""

    def __init__(self, *, width: int, hidden: int) -> None:
        super().__init__(width, hidden, batch_first=True)

    def of(self, frames: Tensor, mask: Tensor) -> Tensor:
        """Encode frames (B, T, D'), the real ones first by ``mask`` (B, T) -> (B, T, 2 H_e), else zero."""
        positions = torch.arange(frames.shape[1], device=frames.device)  # (T,)
        mirrored = mask.sum(1, keepdim=True) - 1 - positions  # (B, T): each video within its own length
        order = torch.where(mask, mirrored, positions).unsqueeze(-1)  # its own inverse
        backwards = frames.gather(1, order.expand_as(frames))
        states, _ = self(torch.cat([frames, backwards]))  # (2 B, T, H_e), Eq. 7, 8
        forward, reverse = states.chunk(2)
        reverse = reverse.gather(1, order.expand_as(reverse))
        return torch.cat([forward, reverse], -1) * mask.unsqueeze(-1)


class PlainFusion(nn.Module):
    """The baseline's last state, and the sum or mean of all states (Table 3); ``past`` is (B, H)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def first(self, s: Tensor) -> Tensor:
        """Return ``past`` of s_0 (B, H) alone."""
        return at_least_float32(s)

    def add(self, past: Tensor, s: Tensor, count: int) -> Tensor:
        """Return ``past`` of s_t (B, H) and the ``count`` states before it."""
        return s if self.how == "none" else past + s

    def forward(self, past: Tensor, count: int) -> tuple[Tensor, None]:
        """Return A_t (B, H) of ``count`` states, which are not weighed."""
        return past / count if self.how == "mean" else past, None


class AttentiveFusion(nn.Module, ABC):
    """Keeps a row of every state in ``past`` (B, capacity, W), of which the first ``count`` are used."""

    @abstractmethod
    def row(self, s: Tensor) -> Tensor:
        """Return all that later words need of a state (B, H), computed once: (B, W)."""

    @abstractmethod
    def fuse(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A_t (B, H) and the weight of each state (B, t) from rows (B, t, W)."""

    def first(self, s: Tensor) -> Tensor:
        """Return ``past`` of s_0 (B, H) alone."""
        return at_least_float32(self.row(s)).unsqueeze(1)

    def add(self, past: Tensor, s: Tensor, count: int) -> Tensor:
        """Append a row for s_t (B, H): in place, doubling a full ``past``, unless gradients are enabled."""
        row = self.row(s)
        if torch.is_grad_enabled():  # earlier steps need their rows for the way back
            return torch.cat([past[:, :count], row.unsqueeze(1)], 1)
        if past.shape[1] == count:
            past = F.pad(past, (0, 0, 0, max(2 * count, FIRST_CAPACITY) - count))
        past[:, count] = row
        return past

    def forward(self, past: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return A_t (B, H) of ``count`` states and the weight of each (B, count)."""
        return self.fuse(past[:, :count])


class LatestGuiding(AttentiveFusion):
    """The last state asks, all states answer, Eq. 20-22; a row is s_u and W_h s_u + b_s."""

    def __init__(self, *, hidden: int, width: int) -> None:
        super().__init__()
        self.sizes = [hidden, width]
        self.attention = AdditiveAttention(query=hidden, value=hidden, width=width)

    def row(self, s: Tensor) -> Tensor:
        """Return (B, H + A)."""
        return torch.cat([s, self.attention.key(s)], -1)

    def fuse(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A_t (B, H) and weights (B, t) from rows (B, t, H + A)."""
        states, keys = rows.split(self.sizes, -1)
        everywhere = torch.ones(1, dtype=torch.bool, device=rows.device)
        return self.attention(states[:, -1], keys, states, everywhere)  # Eq. 20-22


class SelfAttention(AttentiveFusion):
    """All states ask and answer, Eq. 17-19; a row is query, key and value of a state.

    The first feed-forward layer, linear in M_t, is applied to each state once instead of to each row
    of M_t at every word: ``M_t W_1 = softmax(...) (V W_1)``. So a value is s_u W_1; in version 1, s_u.
    """

    def __init__(self, *, hidden: int, width: int, version: int) -> None:
        super().__init__()
        self.sizes = [width, width, hidden]
        self.mean = version == 4
        self.heads = nn.Linear(hidden, 2 * width, bias=False)  # W^q, W^k
        self.feed_forward = nn.Linear(hidden, hidden) if version > 1 else None  # W_1, b_1
        self.second = nn.Linear(hidden, hidden) if version == 3 else None

    def row(self, s: Tensor) -> Tensor:
        """Return (B, 2 A + H)."""
        value = s if self.feed_forward is None else F.linear(s, self.feed_forward.weight)
        return torch.cat([self.heads(s), value], -1)

    def fuse(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A_t (B, H), and each state's weight (B, t), averaged over queries, from (B, t, 2 A + H)."""
        queries, keys, values = rows.split(self.sizes, -1)
        scores = torch.bmm(queries, keys.transpose(1, 2)) * self.sizes[0] ** -0.5  # (B, t, t)
        weights = masked_softmax(scores, None)
        fused = torch.bmm(weights.to(values.dtype), values)  # (B, t, H), Eq. 17
        if self.feed_forward is not None:
            fused = torch.relu(fused + self.feed_forward.bias)  # Eq. 18
        if self.second is not None:
            fused = torch.relu(self.second(fused))
        return fused.mean(1) if self.mean else fused.amax(1), weights.mean(1)  # Eq. 19


@CAPTIONERS.register("dense-lstm")
class DenseLSTM(RecurrentCaptioner):
    """An LSTM whose hidden input is a fusion of all its earlier states."""

    name = "dense-lstm"
    config_class = DenseLSTMConfig

    def __init__(self, config: DenseLSTMConfig) -> None:
        super().__init__(config)
        width, hidden = 2 * config.encoder, config.hidden
        self.encoder = TwoWayEncoder(width=self.frame_width(config), hidden=config.encoder)
        self.initial = nn.Linear(width, 2 * hidden)
        self.attention = AdditiveAttention(query=hidden, value=width, width=config.attention)
        sizes = {"hidden": hidden, "width": config.attention}
        self.fusion: PlainFusion | AttentiveFusion
        if config.fusion == "latest-guiding":
            self.fusion = LatestGuiding(**sizes)
        elif config.fusion == "self-attention":
            self.fusion = SelfAttention(**sizes, version=config.version)
        else:
            self.fusion = PlainFusion(config.fusion)
        self.cell = LSTMCell(word=config.embedding, extra=width, hidden=hidden)
        self.vocabulary = nn.Linear(hidden, config.vocabulary_size, bias=False)  # W_y, Eq. 25

    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Return the first state of features (B, T, D), the real frames first by ``mask`` (B, T)."""
        features, mask = at_least_one_frame(features, mask)
        frames = self.dropout(self.encoder.of(self.frames(features, mask), mask))  # (B, T, 2 H_e)
        s, c = first_state(self.initial, frames, mask)
        video = {"frames": frames, "keys": self.attention.key(frames), "mask": mask}
        return State(video, {"past": self.fusion.first(s), "c": c})

    def advance(
        self, word_gates: Tensor, state: State
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Trace]:
        """Compute one word: s_t (B, H); memory; weights of frames (B, T) and of earlier states (B, t).

        The latter, ``states``, are over s_0 .. s_{t-1}, so one more with every word, and absent where the
        fusion does not weigh.
        """
        video, past, count = state.video, state.memory["past"], state.words + 1
        fused, weights = self.fusion(past, count)  # A_t
        context, attention = self.attention(fused, video["keys"], video["frames"], video["mask"])  # Eq. 14-16
        s, c = self.cell(word_gates, context, fused, state.memory["c"])  # Eq. 13
        trace = {"attention": attention}
        if weights is not None:
            trace["states"] = weights
        return (s,), {"past": self.fusion.add(past, s, count), "c": c}, trace
