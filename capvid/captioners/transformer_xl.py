"""Transformer-XL (Dai et al., 2019) as Lei et al. adapt it to paragraphs (the MART paper, Section 3.3).

One stack reads [CLS] video [SEP] text as in MART. In place of a memory, layer l also has as keys and values
what entered it in the previous segment, K, V = [SG(H_{t-1}^{l-1}); H_t^{l-1}]: the whole of that segment,
video and text. ``recurrent_gradient`` leaves out the stop-gradient SG.

Positions are relative: Eq. (c) and (d) below are the terms of Dai et al., Section 3.3, beside the content
terms (a) and (b). A distance counts real tokens only, padding of frames or words moves nothing; as the video
sees itself whole, a key may also lie behind its query, at a negative distance. The text's distance
to the video and to the previous segment goes on where the video's ends. What is common to the transformers
is described in :mod:`capvid.captioners.transformer`, the notation too; P are the previous segment's tokens.

``layout = "authors"`` follows the MART authors' code where it departs from the print. A segment has always
``text_start`` tokens of video and ``text_length`` of text, [PAD] included, and distances count them all. A
token sees all tokens of the previous segment, [PAD] included, if the token at its own position there is real,
and otherwise none. For a key behind the query, their shift of the position terms runs into the next row: one
position behind, the term is 0; d behind, it is the next query's term for a distance of R + 1 - d, with R
tokens in both segments. The feed-forward layer has a ReLU; dropout falls on tokens twice, on the encodings,
inside the feed-forward layer, and on the output. What remains different: encodings of video and text have
dropout of their own, and u and v begin at 0, while theirs hold whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners.base import CAPTIONERS, Carried, State, Trace
from capvid.captioners.layers import with_end
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
    without_gaps,
)
from capvid.errors import UsageError
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
        encodings, index = distances.encodings, distances.index
        biased = query + distances.position_bias.unsqueeze(1)
        table = self.relative.weight.unflatten(0, (self.heads, -1))  # (heads, h, H)
        # (q + v) W_kR R for all distances R; the cheaper product first.
        if x.shape[0] * x.shape[1] < len(encodings):
            turned = torch.einsum("bhqc,hce->bhqe", biased, table)
            scores = torch.einsum("bhqe,re->bhqr", turned, encodings)
        else:
            keys = torch.einsum("re,hce->hrc", encodings, table)
            scores = torch.einsum("bhqc,hrc->bhqr", biased, keys)
        if distances.wraps:  # those of the next query follow, then 0
            scores = torch.cat([scores, F.pad(scores[:, :, 1:], (0, 1, 0, 1))], -1)
        index = index.unsqueeze(1).expand(-1, self.heads, x.shape[1], -1)
        positional = scores.gather(-1, index) * self.scale  # terms (b), (d)
        if distances.unseen is not None:
            positional = positional.masked_fill(distances.unseen.unsqueeze(1), float("-inf"))
        return (query + distances.content_bias.unsqueeze(1)).to(query.dtype), positional.to(query.dtype)


@CAPTIONERS.register("transformer-xl")
class TransformerXL(TransformerCaptioner):
    """The transformer that sees the previous segment's hidden states."""

    name = "transformer-xl"
    config_class = TransformerXLConfig
    absolute = False

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        printed = replace(config, layout="paper")  # attention and norms are the same in both layouts
        self.layers = nn.ModuleList(Layer(printed, str(n), RelativeAttention) for n in range(config.layers))
        self.again = nn.Dropout(config.dropout if config.authors else 0.0)
        if config.authors:
            for layer in self.layers:
                first, _, second = layer.feed_forward
                layer.feed_forward = nn.Sequential(first, nn.ReLU(), nn.Dropout(config.dropout), second)
        self.content_bias = nn.Parameter(torch.zeros(config.heads, config.hidden // config.heads))  # u
        self.position_bias = nn.Parameter(torch.zeros(config.heads, config.hidden // config.heads))  # v
        self.init_as_authors()

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment; ``carried`` holds each layer's input in the one before.

        Raises:
            UsageError: more frames than the authors' layout has places for.
        """
        carried = carried or {}
        x, own, kept = self.video_tokens(features, mask)  # (B, T + 2, H)
        before = carried.get("mask", own[:, :0])  # (B, P)
        if self.config.authors:
            seen = F.pad(own, (before.shape[1], 0), value=True)  # (B, P + text_start)
            at = torch.arange(seen.shape[1], device=seen.device).expand(len(seen), -1)
        else:
            seen = torch.cat([before, own], 1)  # (B, P + T + 2)
            at = (seen.cumsum(1) - 1).clamp_min(0)
        entered = {"frames": mask, **kept, "own": own, "at": at, "before": before}
        sees = VideoPass(seen, self._distances(entered, at[:, before.shape[1] :], at, 0))
        *_, last = self.layers
        for layer in self.layers:
            name = f"hidden.{layer.cache_name}"
            entered[name] = x
            previous = carried.get(name)
            x = layer.store(x, sees, previous) if layer is last else layer(x, sees, previous)
        return State(sees.kept | entered, {})

    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Return the input of the vocabulary layer (B, L, H), and each layer's input for the next segment."""
        video, length, room = state.video, tokens.shape[1], self.config.text_length
        if self.config.authors:
            tokens = with_end(tokens, room)
            tokens = F.pad(tokens, (0, max(0, room - tokens.shape[1])))
        x = self.again(self.text_tokens(tokens, state))
        at = self._start(video) + torch.arange(tokens.shape[1], device=tokens.device)  # (B, L)
        first = video["own"].shape[1]
        distances = self._distances(video, at, torch.cat([video["at"], at], 1), first)
        if distances.unseen is not None:
            distances.unseen[:, :, video["at"].shape[1] :] |= (tokens == PAD).unsqueeze(1)
        sees = SentencePass(state, tokens, distances)
        carried = {"mask": torch.cat([video["own"], tokens != PAD], 1)}
        for layer in self.layers:
            name = f"hidden.{layer.cache_name}"
            entered = torch.cat([video[name], x], 1)
            carried[name] = entered if self.config.recurrent_gradient else entered.detach()  # SG
            x = layer(x, sees)
        if self.config.authors:
            carried = {name: tensor[:, : first + room] for name, tensor in carried.items()}
        return self.transform(self.again(x[:, :length])), carried

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption; the trace has the last layer's weights of the segment's own frames.

        Beside keys and values, the caches hold the number of each word, from which its distance follows.
        """
        x, video = self.next_tokens(tokens, state), state.video  # (V, K, H)
        new = torch.full(x.shape[:2], state.words, device=x.device)
        number = torch.cat([state.written["number"], new], 1) if state.words else new  # (V, columns)
        start = self._start(video)
        keys, reach = torch.cat([video["at"], start + number], 1), video["at"].shape[1] + state.words + 1
        first = video["own"].shape[1] + state.words
        sees = WordPass(state, x.shape[1], self._distances(video, start + state.words, keys, first, reach))
        sees.written["number"] = number
        for layer in self.layers:
            x = layer(x, sees)
        frames = video["frames"].repeat_interleave(x.shape[1], 0)
        weights = sees.looked(str(self.config.layers - 1), video["before"].shape[1] + 1, frames.shape[1])
        return self.next_logits(x), sees.after(), {"attention": weights * frames}

    def video_tokens(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the video's tokens, their mask, and what goes into the state.

        In the authors' layout there are ``text_start`` tokens, [CLS] video [SEP] [PAD]...
        """
        if not self.config.authors:
            return super().video_tokens(features, mask)
        places, count = self.config.text_start, features.shape[1]
        if count > places - 2:
            raise UsageError(
                f"{count} frames: the authors' layout has places for {places - 2}",
                remedy="use fewer (data.max_frames) or more places (model.text_start)",
            )
        frames, real = without_gaps(self.standardise(features), mask)
        frames = self.frame(F.pad(frames, (0, 0, 1, places - count - 1)))  # (B, text_start, H)
        number, last = torch.arange(places, device=mask.device), mask.sum(1, keepdim=True) + 1
        inside = (number > 0) & (number < last)  # (B, text_start)
        first, second, middle = self.mark_embedding
        marks = torch.stack([first, second, middle, self.embedding.weight[PAD].detach()])
        which = torch.where(inside, 2, 3).masked_fill(number == 0, 0).masked_fill(number == last, 1)
        tokens = self.token_norm(frames + self.word(marks[which]) + self.type_embedding[0])
        kept = {"blank": frames[:, :1], "frames": real}
        return self.again(self.dropout(tokens)), number <= last, kept

    def _start(self, video: Mapping[str, Tensor]) -> Tensor:
        """Return the place (B, 1) of the first word, behind the real tokens, or behind all (authors)."""
        mask = video["mask"]
        return (torch.ones_like(mask) if self.config.authors else mask).sum(1, keepdim=True)

    def _distances(
        self, video: Mapping[str, Tensor], queries: Tensor, keys: Tensor, first: int, reach: int = 0
    ) -> Distances:
        """Return the distances of queries at places (B, Q) from keys at (B, N).

        Args:
            video: the state's, or what will be.
            queries: the last of the keys.
            keys: all.
            first: number of the first query in its segment (authors' layout).
            reach: all distances are below; by default N.
        """
        distance, reach = queries.unsqueeze(2) - keys.unsqueeze(1), max(reach, keys.shape[1])  # (B, Q, N)
        before, unseen = video["before"], None
        if self.config.authors:
            lowest, previous = 0, before.shape[1]
            # all tokens of both segments; the next query's encodings follow in reverse
            reach = max(reach, previous + self.config.text_start + self.config.text_length)
            distance = distance % (2 * reach + 1) if not first else distance.clamp_min(0)
            end = first + queries.shape[1]
            real = F.pad(before, (0, max(0, end - previous)))[:, first:end]  # (B, Q), in the previous segment
            unseen = F.pad(~real.unsqueeze(2).expand(-1, -1, previous), (0, keys.shape[1] - previous))
        else:
            lowest = 1 - queries.shape[1]  # the furthest that a key may lie behind a query
        possible = torch.arange(lowest, reach, device=keys.device)
        encodings = self.again(sinusoids(possible, self.config.hidden, self.type_embedding))
        biases = self.content_bias, self.position_bias
        return Distances(encodings, distance - lowest, *biases, self.config.authors and not first, unseen)
