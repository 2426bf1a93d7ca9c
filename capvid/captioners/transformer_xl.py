"""Transformer-XL (Dai et al., 2019) as Lei et al. adapt it to paragraphs (the MART paper, Section 3.3).

One stack reads [CLS] video [SEP] text as in MART. In place of a memory, layer l also has as keys and values
what entered it in the previous segment, K, V = [SG(H_{t-1}^{l-1}); H_t^{l-1}]: the whole of that segment,
video and text. ``recurrent_gradient`` leaves out the stop-gradient SG.

Positions are relative: Eq. (c) and (d) below are the terms of Dai et al., Section 3.3, beside the content
terms (a) and (b). A distance counts real tokens only, padding of frames or words moves nothing; as the video
sees itself whole, a key may also lie behind its query, at a negative distance. The text's distance
to the video and to the previous segment goes on where the video's ends. What is common to the transformers
is described in :mod:`capvid.captioners.transformer`, the notation too; P are the previous segment's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from capvid.text.vocabulary import PAD


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
        self.relative = nn.Linear(config.hidden, config.hidden, bias=False)  # W_kR

    def queries(self, x: Tensor, distances: Distances | None) -> tuple[Tensor, Tensor | None]:
        """Return q + u (B, heads, Q, h), for (a) and (c), and the scaled terms (b), (d) (B, heads, Q, N)."""
        query = self.split(self.query(x))
        if distances is None:
            raise ValueError("relative attention needs distances")
        scores = self.position_scores(query, distances)
        index = distances.index.unsqueeze(1).expand(-1, self.heads, x.shape[1], -1)
        positional = scores.gather(-1, index) * self.scale  # terms (b), (d)
        return (query + distances.content_bias.unsqueeze(1)).to(query.dtype), positional.to(query.dtype)

    def position_scores(self, query: Tensor, distances: Distances) -> Tensor:
        """Return (q + v) W_kR R of queries (B, heads, Q, h) for all distances R, (B, heads, Q, R)."""
        encodings = distances.encodings
        biased = query + distances.position_bias.unsqueeze(1)
        table = self.relative.weight.unflatten(0, (self.heads, -1))  # (heads, h, H)
        # the cheaper product first
        if query.shape[0] * query.shape[2] < len(encodings):
            turned = torch.einsum("bhqc,hce->bhqe", biased, table)
            return torch.einsum("bhqe,re->bhqr", turned, encodings)
        keys = torch.einsum("re,hce->hrc", encodings, table)
        return torch.einsum("bhqc,hrc->bhqr", biased, keys)


@CAPTIONERS.register("transformer-xl")
class TransformerXL(TransformerCaptioner):
    """The transformer that sees the previous segment's hidden states."""

    name = "transformer-xl"
    config_class = TransformerXLConfig
    absolute = False

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.build_layer(str(n)) for n in range(config.layers))
        self.content_bias = nn.Parameter(torch.zeros(config.heads, config.hidden // config.heads))  # u
        self.position_bias = nn.Parameter(torch.zeros(config.heads, config.hidden // config.heads))  # v

    def build_layer(self, cache_name: str) -> Layer:
        """Return a new layer."""
        return Layer(self.config, cache_name, RelativeAttention)

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment; ``carried`` holds each layer's input in the one before."""
        carried = carried or {}
        x, own = self.video_tokens(features, mask)  # (B, T + 2, H)
        before = carried.get("mask", own[:, :0])  # (B, P)
        seen, at = self.positions(before, own)  # (B, P + T + 2)
        entered = {"frames": mask, "own": own, "at": at, "before": before}
        sees = VideoPass(seen, self.distances(entered, at[:, before.shape[1] :], at, 0))
        *_, last = self.layers
        for layer in self.layers:
            name = f"hidden.{layer.cache_name}"
            entered[name] = x
            previous = carried.get(name)
            x = layer.store(x, sees, previous) if layer is last else layer(x, sees, previous)
        return State(sees.kept | entered, {})

    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Return the input of the vocabulary layer (B, L, H), and each layer's input for the next segment."""
        video, x = state.video, self.text_tokens(tokens, state)
        at = self.text_start(video) + torch.arange(tokens.shape[1], device=tokens.device)  # (B, L)
        distances = self.distances(video, at, torch.cat([video["at"], at], 1), video["own"].shape[1])
        sees = SentencePass(state, tokens, distances)
        carried = {"mask": torch.cat([video["own"], tokens != PAD], 1)}
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
        start = self.text_start(video)
        keys, reach = torch.cat([video["at"], start + number], 1), video["at"].shape[1] + state.words + 1
        first = video["own"].shape[1] + state.words
        sees = WordPass(state, x.shape[1], self.distances(video, start + state.words, keys, first, reach))
        sees.written["number"] = number
        for layer in self.layers:
            x = layer(x, sees)
        frames = video["frames"].repeat_interleave(x.shape[1], 0)
        weights = sees.looked(str(self.config.layers - 1), video["before"].shape[1] + 1, frames.shape[1])
        return self.next_logits(x), sees.after(), {"attention": weights * frames}

    def positions(self, before: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens are seen, and their positions, both (B, P + N).

        Args:
            before: mask of the previous segment's tokens (B, P).
            own: mask of the video's tokens (B, N).
        """
        seen = torch.cat([before, own], 1)
        return seen, (seen.cumsum(1) - 1).clamp_min(0)

    def text_start(self, video: Mapping[str, Tensor]) -> Tensor:
        """Return the position (B, 1) of the first word, behind the real tokens."""
        return video["mask"].sum(1, keepdim=True)

    def distances(
        self, video: Mapping[str, Tensor], queries: Tensor, keys: Tensor, first: int, reach: int = 0
    ) -> Distances:
        """Return the distances of queries at positions (B, Q) from keys at (B, N).

        Args:
            video: tensors of the state's video.
            queries: positions of the queries (B, Q), the last keys.
            keys: positions of all keys (B, N).
            first: index of the first query among the tokens of its segment.
            reach: upper bound of the distances, by default N.
        """
        lowest = 1 - queries.shape[1]  # largest negative distance
        distance = queries.unsqueeze(2) - keys.unsqueeze(1)  # (B, Q, N)
        possible = torch.arange(lowest, max(reach, keys.shape[1]), device=keys.device)
        encodings = sinusoids(possible, self.config.hidden, self.type_embedding)
        return Distances(encodings, distance - lowest, self.content_bias, self.position_bias)
