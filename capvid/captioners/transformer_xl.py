"""Transformer-XL (Dai et al., 2019) as Lei et al. adapt it to paragraphs (the MART paper, Section 3.3).

One stack reads [CLS] video [SEP] text as in MART. In place of a memory, layer l also has as keys and values
what entered it in the previous segment, K, V = [SG(H_{t-1}^{l-1}); H_t^{l-1}]: the whole of that segment,
video and text. ``recurrent_gradient`` leaves out the stop-gradient SG.

Positions are relative: Eq. (c) and (d) below are the terms of Dai et al., Section 3.3, beside the content
terms (a) and (b). A distance counts real tokens only, padding of frames or words moves nothing; as the video
sees itself whole, a key may also lie behind its query, at a negative distance. The text's distance
to the video and to the previous segment goes on where the video's ends. Each layer has a u and a v of its
own, while those of Dai et al. carry no index of a layer. What is common to the transformers
is described in :mod:`capvid.captioners.transformer`, the notation too; P are the previous segment's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from capvid.captioners.base import CAPTIONERS, Carried, State, Trace
from capvid.captioners.transformer import (
    Attention,
    Distances,
    Layer,
    SentencePass,
    TransformerCaptioner,
    TransformerConfig,
    VideoPass,
    WordPass,
    sinusoids,
)


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(TransformerConfig):
    """Sizes of :class:`TransformerXL`.

    Attributes:
        recurrent_gradient: whether the gradient flows into the previous segment.
    """

    recurrent_gradient: bool = False


class RelativeAttention(Attention):
    """Multi-head attention whose scores know the distance of query and key."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        hidden, heads = config.hidden, config.heads
        self.relative = nn.Linear(hidden, hidden, bias=False)  # W_kR
        self.content_bias = nn.Parameter(torch.zeros(heads, hidden // heads))  # u
        self.position_bias = nn.Parameter(torch.zeros(heads, hidden // heads))  # v

    def queries(self, x: Tensor, distances: Distances | None) -> tuple[Tensor, Tensor | None]:
        """Return q + u (B, heads, Q, h), for (a) and (c), and the scaled terms (b), (d) (B, heads, Q, N)."""
        query = self.split(self.query(x))
        if distances is None:
            raise ValueError("relative attention needs distances")
        encodings, index = distances
        biased = query + self.position_bias.unsqueeze(1)
        table = self.relative.weight.unflatten(0, (self.heads, -1))  # (heads, h, H)
        # (q + v) W_kR R for all distances R; the cheaper product first.
        if x.shape[0] * x.shape[1] < len(encodings):
            turned = torch.einsum("bhqc,hce->bhqe", biased, table)
            scores = torch.einsum("bhqe,re->bhqr", turned, encodings)
        else:
            keys = torch.einsum("re,hce->hrc", encodings, table)
            scores = torch.einsum("bhqc,hrc->bhqr", biased, keys)
        index = index.unsqueeze(1).expand(-1, self.heads, x.shape[1], -1)
        positional = scores.gather(-1, index) * query.shape[-1] ** -0.5  # terms (b), (d)
        return (query + self.content_bias.unsqueeze(1)).to(query.dtype), positional.to(query.dtype)


@CAPTIONERS.register("transformer-xl")
class TransformerXL(TransformerCaptioner):
    """The transformer that sees the previous segment's hidden states."""

    name = "transformer-xl"
    config_class = TransformerXLConfig
    absolute = False

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Layer(config, str(n), RelativeAttention) for n in range(config.layers))

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment; ``carried`` holds each layer's input in the one before."""
        carried = carried or {}
        x, own, kept = self.video_tokens(features, mask)  # (B, T + 2, H)
        mask = torch.cat([carried["mask"], own], 1) if carried else own  # (B, P + T + 2)
        at = (mask.cumsum(1) - 1).clamp_min(0)
        sees = VideoPass(mask, self._distances(at[:, -own.shape[1] :], at))
        entered = {**kept, "own": own, "at": at}
        *_, last = self.layers
        for layer in self.layers:
            name = f"hidden.{layer.cache_name}"
            entered[name] = x
            before = carried.get(name)
            x = layer.store(x, sees, before) if layer is last else layer(x, sees, before)
        return State(sees.kept | entered, {})

    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Return the input of the vocabulary layer (B, L, H), and each layer's input for the next segment."""
        x, video = self.text_tokens(tokens, state), state.video
        at = video["mask"].sum(1, keepdim=True) + torch.arange(tokens.shape[1], device=tokens.device)
        sees = SentencePass(state, tokens, self._distances(at, torch.cat([video["at"], at], 1)))
        carried = {"mask": torch.cat([video["own"], tokens != 0], 1)}
        for layer in self.layers:
            name = f"hidden.{layer.cache_name}"
            entered = torch.cat([video[name], x], 1)
            carried[name] = entered if self.config.recurrent_gradient else entered.detach()  # SG
            x = layer(x, sees)
        return self.transform(x), carried

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption; the trace has the last layer's weights of the segment's own frames.

        Beside keys and values, the caches hold the number of each word, from which its distance follows.
        """
        x, video = self.next_tokens(tokens, state), state.video  # (V, K, H)
        new = torch.full(x.shape[:2], state.words, device=x.device)
        number = torch.cat([state.written["number"], new], 1) if state.words else new  # (V, columns)
        start = video["mask"].sum(1, keepdim=True)
        keys, reach = torch.cat([video["at"], start + number], 1), video["at"].shape[1] + state.words + 1
        sees = WordPass(state, x.shape[1], self._distances(start + state.words, keys, reach))
        sees.written["number"] = number
        for layer in self.layers:
            x = layer(x, sees)
        frames = video["own"].shape[1] - 2
        first = video["mask"].shape[1] - frames - 1
        trace = {"attention": sees.looked(str(self.config.layers - 1), first, frames)}
        return self.next_logits(x), sees.after(), trace

    def _distances(self, queries: Tensor, keys: Tensor, reach: int | None = None) -> Distances:
        """Return the distances of queries at positions (B, Q), the last keys, from keys at (B, N).

        All distances are below ``reach``; by default N.
        """
        behind = queries.shape[1] - 1  # the furthest that a key may lie behind a query
        possible = torch.arange(-behind, keys.shape[1] if reach is None else reach, device=keys.device)
        encodings = sinusoids(possible, self.config.hidden, self.type_embedding)
        return encodings, queries.unsqueeze(2) - keys.unsqueeze(1) + behind
