"""Base classes of the transformer captioners: input tokens, multi-head attention, a layer, cached words.

A segment is read in three ways, by the same layers: its video at once (:class:`VideoPass`), a whole sentence
at once (:class:`SentencePass`), or one word after another, of several captions of a video side by side, with
the keys and values of earlier words kept (:class:`WordPass`). The passes know what a token may see; the
layers hold the equations.

Where the MART paper is silent: positions of the video count real frames, those of the text begin at 0 again
(types tell the two apart), so that padding moves nothing. [CLS] and [SEP] are learned vectors. Feed-forward
layers have a GELU; projections of attention have no biases, as Vaswani et al. print them. Dropout falls on
the input tokens and on what each block adds to its residual. The output is a linear layer, GELU and layer
norm, then a linear vocabulary layer whose weights are not those of the word embeddings.

Notation for tensor shapes: B batch, T frames, L words, H hidden, h = H / heads, N keys, Q queries; the video
part [CLS] video [SEP] has T + 2 tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners.base import MAX_LAYERS, CaptionerConfig, ParagraphCaptioner, State
from capvid.captioners.layers import embed, masked_softmax, normal
from capvid.errors import UsageError
from capvid.utils.validation import bounded

FIRST_COLUMNS = 8
KeysValues = tuple[Tensor, Tensor]  # each (B, heads, N, h)


@dataclass(frozen=True)
class Distances:
    """Relative positions of queries and keys.

    Attributes:
        encodings: encodings of all distances, ascending, (R, H).
        index: row of each query and key in ``encodings``, (B, Q or 1, N).
        content_bias: u (heads, h).
        position_bias: v (heads, h).
    """

    encodings: Tensor
    index: Tensor
    content_bias: Tensor
    position_bias: Tensor


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(CaptionerConfig):
    """Sizes common to the transformer captioners.

    Attributes:
        hidden: H, width of all hidden states.
        heads: attention heads; they share ``hidden`` among them.
        layers: of the stack (vanilla transformer: of the encoder, and of the decoder).
        feed_forward: width inside the feed-forward layers.
        word_width: width of a word vector, projected to ``hidden``.
        word_vectors: text file of initial word vectors, such as GloVe; read when training begins.
    """

    hidden: int = 768
    heads: int = 12
    layers: int = bounded(2, maximum=MAX_LAYERS)
    feed_forward: int = 768
    word_width: int = 300
    dropout: float = bounded(0.1, minimum=0, maximum=0.99)
    word_vectors: str = ""

    def norm(self) -> nn.LayerNorm:
        """Return a layer norm over ``hidden``."""
        return nn.LayerNorm(self.hidden)


def sinusoids(positions: Tensor, width: int, like: Tensor) -> Tensor:
    """Return the encodings of Vaswani et al. (2017), (N, width), of ``positions`` (N,), typed as ``like``."""
    halves = torch.arange(0, width, 2, device=like.device, dtype=like.dtype)
    angles = positions.to(like.dtype).unsqueeze(-1) * 10000 ** (-halves / width)  # (N, width / 2)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, :width]


class Attention(nn.Module):
    """MultiHeadAtt(Q, K, V) of Section 3.1; without ``output``, the heads are concatenated only."""

    def __init__(self, config: TransformerConfig, *, output: bool = True, bias: bool = False) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads = config.heads
        self.rate = 0.0  # dropout of the weights
        self.scale = (hidden // config.heads) ** -0.5  # of the scores
        self.query = nn.Linear(hidden, hidden, bias=bias)
        self.key = nn.Linear(hidden, hidden, bias=bias)
        self.value = nn.Linear(hidden, hidden, bias=bias)
        self.output = nn.Linear(hidden, hidden, bias=bias) if output else nn.Identity()

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, H) -> (B, heads, N, h)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor) -> KeysValues:
        """Return keys and values of ``x`` (B, N, H), each (B, heads, N, h)."""
        keys, values = self.split(self.key(x)), self.split(self.value(x))
        # Contiguous for decoding: the products of every word would copy them.
        return (keys, values) if self.training else (keys.contiguous(), values.contiguous())

    def queries(self, x: Tensor, distances: Distances | None) -> tuple[Tensor, Tensor | None]:
        """Return queries (B, heads, Q, h) of ``x`` (B, Q, H), and a bias of the scores (B, heads, Q, N)."""
        return self.split(self.query(x)), None

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, distances: Distances | None = None
    ) -> Tensor:
        """Attend from ``x`` (B, Q, H) to keys and values where ``mask`` (B or 1, 1, Q or 1, N) is True."""
        query, bias = self.queries(x, distances)
        if bias is not None:
            mask = bias.masked_fill(~mask, float("-inf"))
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, dropout_p=rate, scale=self.scale
        )
        return self.output(mixed.transpose(1, 2).flatten(2))

    def summaries(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Attend from few ``x`` (B, M, H) to ``states`` (B, N, H), real by ``mask`` (B, N): like ``forward``.

        q (W_k s + b_k) = (q W_k) s + q b_k, and sum_n a_n (W_v s_n + b_v) = W_v (sum_n a_n s_n) + b_v sum_n
        a_n, so that no layer sees all states.
        """
        query = self.split(self.query(x)).transpose(0, 1)  # (heads, B, M, h)
        key, value = (layer.weight.unflatten(0, (self.heads, -1)) for layer in (self.key, self.value))
        turned = (query.flatten(1, 2) @ key).unflatten(1, query.shape[1:3])  # (heads, B, M, H)
        scores = turned.transpose(0, 1).flatten(1, 2) @ states.mT  # (B, heads M, N)
        if self.key.bias is not None:
            bias = self.key.bias.view(self.heads, 1, 1, -1)
            scores = scores + (query * bias).sum(-1).transpose(0, 1).flatten(1).unsqueeze(-1)
        weights = masked_softmax(scores * self.scale, mask.unsqueeze(1)).to(states.dtype)
        weights = F.dropout(weights, self.rate, self.training)
        mixed = (weights @ states).unflatten(1, (self.heads, -1)).transpose(0, 1)  # (heads, B, M, H)
        mixed = (mixed.flatten(1, 2) @ value.mT).unflatten(1, query.shape[1:3])  # (heads, B, M, h)
        mixed = mixed.permute(1, 2, 0, 3).flatten(2)
        if self.value.bias is not None:
            sums = weights.sum(-1).unflatten(1, (self.heads, -1)).mT.repeat_interleave(query.shape[-1], -1)
            mixed = mixed + self.value.bias * sums
        return self.output(mixed)

    def of_words(
        self,
        x: Tensor,
        parts: Sequence[tuple[Tensor, Tensor]],
        mask: Tensor,
        distances: Distances | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend to keys and values in parts that are not concatenated: like ``forward``, with weights.

        The weights are (B, heads, Q, N), and ``mask`` is (B or 1, Q or 1, N).
        """
        query, bias = self.queries(x, distances)
        scores = torch.cat([query @ keys.mT for keys, _ in parts], -1) * self.scale
        if bias is not None:
            scores = scores + bias
        weights = masked_softmax(scores, mask.unsqueeze(1))  # (B, heads, Q, N)
        shares = weights.to(query.dtype).split([keys.shape[2] for keys, _ in parts], -1)
        mixed = torch.stack([w @ values for w, (_, values) in zip(shares, parts, strict=True)]).sum(0)
        return self.output(mixed.transpose(1, 2).flatten(2)), weights


class Pass(ABC):
    """One way of reading: supplies the keys and values that each query sees."""

    @abstractmethod
    def __call__(
        self, attention: Attention, x: Tensor, cache_name: str, before: Tensor | None = None
    ) -> Tensor:
        """Attend from ``x`` (B, Q, H) to ``before``, the video and ``x`` itself.

        Keys and values are cached under ``cache_name``; ``before`` (B, M, H), memory or previous segment, is
        passed with the video and cached with it.
        """


class VideoPass(Pass):
    """All video tokens at once: they see each other, and what stands before them.

    Attributes:
        kept: the mask and, by cache name, keys and values that the words need of the video.
    """

    def __init__(self, mask: Tensor, distances: Distances | None = None) -> None:
        self.distances = distances
        self.kept = {"mask": mask}

    def __call__(
        self, attention: Attention, x: Tensor, cache_name: str, before: Tensor | None = None
    ) -> Tensor:
        """Attend to all real tokens."""
        keys, values = self.store(attention, x, cache_name, before)
        mask = _widen(self.kept["mask"], keys)
        return attention(x, keys, values, mask[:, None, None], self.distances)

    def store(
        self, attention: Attention, x: Tensor, cache_name: str, before: Tensor | None = None
    ) -> KeysValues:
        """Cache keys and values, and return them: all that is needed of the video in the last layer."""
        keys, values = attention.keys_values(x if before is None else torch.cat([before, x], 1))
        self.kept[f"keys.{cache_name}"], self.kept[f"values.{cache_name}"] = keys, values
        return keys, values


class SentencePass(Pass):
    """A whole sentence at once: a word sees the video and all words up to itself."""

    def __init__(self, state: State, tokens: Tensor, distances: Distances | None = None) -> None:
        rows, length = tokens.shape
        self.video, self.distances = state.video, distances
        self.causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        self.causal = self.causal.expand(rows, 1, -1, -1)  # (B, 1, L, L)

    def __call__(
        self, attention: Attention, x: Tensor, cache_name: str, before: Tensor | None = None
    ) -> Tensor:
        """Attend from words (B, L, H) to the video's keys ``cache_name``, if any, and to words up to it."""
        keys, values = attention.keys_values(x)
        mask = self.causal
        if f"keys.{cache_name}" in self.video:
            fixed = self.video[f"keys.{cache_name}"]
            visible = _widen(self.video["mask"], fixed)[:, None, None].expand(-1, -1, x.shape[1], -1)
            mask = torch.cat([visible, mask], -1)  # (B, 1, L, N)
            keys = torch.cat([fixed, keys], 2)
            values = torch.cat([self.video[f"values.{cache_name}"], values], 2)
        return attention(x, keys, values, mask, self.distances)

    def across(self, attention: Attention, x: Tensor, cache_name: str) -> Tensor:
        """Attend from the words to the video alone."""
        mask = self.video["mask"][:, None, None]
        return attention(x, self.video[f"keys.{cache_name}"], self.video[f"values.{cache_name}"], mask)


class WordPass(Pass):
    """The next word of all K captions of each of V videos: it sees the video and the caption so far.

    A video's captions are its queries, side by side. The keys and values of a word stay where they were
    written, also when beams change places; ``memory`` names the columns that are a caption's own.

    Attributes:
        weights: by cache name, attention weights (V, heads, K, N).
    """

    def __init__(self, state: State, captions: int, distances: Distances | None = None) -> None:
        self.state, self.distances = state, distances
        self.written = dict(state.written)
        self.columns = state.columns + captions
        device = state.video["mask"].device
        new = torch.arange(state.columns, self.columns, device=device)
        new = new.repeat(len(state.video["mask"])).unsqueeze(1)  # (V K, 1)
        self.own = torch.cat([state.memory["own"], new], 1) if state.memory else new  # (V K, words)
        sees = torch.zeros(len(new), self.columns, dtype=torch.bool, device=device)
        self.mask = sees.scatter_(1, self.own, True).unflatten(0, (-1, captions))  # (V, K, columns)
        self.weights: dict[str, Tensor] = {}

    def __call__(
        self, attention: Attention, x: Tensor, cache_name: str, before: Tensor | None = None
    ) -> Tensor:
        """Attend from words (V, K, H) to the video's keys at ``cache_name``, if any, and to earlier words."""
        keys, values = attention.keys_values(x)
        words = self._append(f"keys.{cache_name}", keys), self._append(f"values.{cache_name}", values)
        parts, mask, video = [words], self.mask, self.state.video
        if f"keys.{cache_name}" in video:
            fixed = video[f"keys.{cache_name}"], video[f"values.{cache_name}"]
            parts = [fixed, words]
            visible = _widen(video["mask"], fixed[0]).unsqueeze(1).expand(-1, x.shape[1], -1)
            mask = torch.cat([visible, mask], -1)
        result, self.weights[cache_name] = attention.of_words(x, parts, mask, self.distances)
        return result

    def across(self, attention: Attention, x: Tensor, cache_name: str) -> Tensor:
        """Attend from the words to the video alone."""
        video = self.state.video
        part = video[f"keys.{cache_name}"], video[f"values.{cache_name}"]
        result, self.weights[cache_name] = attention.of_words(x, [part], video["mask"].unsqueeze(1))
        return result

    def _append(self, name: str, new: Tensor) -> Tensor:
        """Write ``new`` (V, heads, K, h) to a cache, doubling a full one; return all columns so far."""
        cache, first = self.written.get(name), self.state.columns
        if cache is None or self.columns > cache.shape[2]:
            larger = new.new_zeros(*new.shape[:2], max(FIRST_COLUMNS, 2 * self.columns), new.shape[3])
            if cache is not None:
                larger[:, :, :first] = cache[:, :, :first]
            cache = larger
        cache[:, :, first : self.columns] = new
        self.written[name] = cache
        return cache[:, :, : self.columns]

    def after(self) -> State:
        """Return the state after the word."""
        memory, words = {"own": self.own}, self.state.words + 1
        return replace(self.state, memory=memory, words=words, written=self.written, columns=self.columns)

    def looked(self, cache_name: str, first: int, count: int) -> Tensor:
        """Return weights (V K, ``count``) of ``cache_name`` from key ``first`` on, averaged over heads."""
        return self.weights[cache_name][..., first : first + count].mean(1).flatten(0, 1)


def _widen(mask: Tensor, keys: Tensor) -> Tensor:
    """Widen a mask (B, M) to ``keys`` (B, heads, N, h): the tokens before it are real."""
    return F.pad(mask, (keys.shape[2] - mask.shape[1], 0), value=True)


class Layer(nn.Module):
    """Self-attention and a feed-forward layer, each added to its input and normalised."""

    def __init__(
        self, config: TransformerConfig, cache_name: str, attention: type[Attention] = Attention
    ) -> None:
        super().__init__()
        hidden = config.hidden
        self.cache_name = cache_name
        self.attention = attention(config)
        self.attention_norm = config.norm()
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, config.feed_forward), nn.GELU(), nn.Linear(config.feed_forward, hidden)
        )
        self.feed_forward_norm = config.norm()
        self.dropout = nn.Dropout(config.dropout)

    def intermediate(self, x: Tensor, sees: Pass, before: Tensor | None = None) -> Tensor:
        """Return the intermediate states H-bar^l (B, Q, H) from H^{l-1}."""
        return self.attention_norm(x + self.dropout(sees(self.attention, x, self.cache_name, before)))

    def fed_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return H^l (B, Q, H) from the feed-forward layer's input ``x`` and its residual."""
        return self.feed_forward_norm(residual + self.dropout(self.feed_forward(x)))

    def store(self, x: Tensor, sees: VideoPass, before: Tensor | None = None) -> Tensor:
        """Cache what words need of the video in the last layer, and return ``x`` unchanged."""
        sees.store(self.attention, x, self.cache_name, before)
        return x

    def forward(self, x: Tensor, sees: Pass, before: Tensor | None = None) -> Tensor:
        """Return H^l (B, Q, H) from H^{l-1}."""
        hidden = self.intermediate(x, sees, before)
        return self.fed_forward(hidden, hidden)


class TransformerCaptioner(ParagraphCaptioner):
    """Tokens of video and text, and the output layer; the subclass puts a stack between them."""

    layers: Any
    absolute: ClassVar[bool] = True  # whether tokens carry their positions

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        hidden = config.hidden
        if hidden % config.heads:
            raise UsageError(
                f"hidden = {hidden}, heads = {config.heads}: the heads cannot share the width evenly",
                remedy=f"choose hidden = {hidden - hidden % config.heads + config.heads}, say",
            )
        self.dropout = nn.Dropout(config.dropout)
        self.frame = self.projection(config.feature_width)
        self.embedding = embed(normal(config.vocabulary_size, config.word_width, std=0.02))
        self.word = self.projection(config.word_width)
        self.mark_embedding = nn.Parameter(normal(2, hidden, std=0.02))  # [CLS], [SEP]
        self.type_embedding = nn.Parameter(normal(2, hidden, std=0.02))  # video, text
        self.transform: nn.Module = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), config.norm())
        self.vocabulary = nn.Linear(hidden, config.vocabulary_size)

    def projection(self, width: int) -> nn.Sequential:
        """Return the layers that turn frames or word vectors of ``width`` into tokens."""
        return nn.Sequential(nn.Linear(width, self.config.hidden), self.config.norm())

    def video_tokens(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return [CLS] video [SEP] (B, T + 2, H) from features and mask (B, T), and their mask (B, T + 2)."""
        first, last = self.mark_embedding.expand(len(features), -1, -1).split(1, 1)
        tokens = torch.cat([first, self.frame(self.standardise(features)), last], 1)
        tokens = tokens + self.type_embedding[0]
        mask = F.pad(mask, (1, 1), value=True)
        if self.absolute:
            tokens = tokens + self.video_positions(mask)
        return self.dropout(tokens), mask

    def video_positions(self, mask: Tensor) -> Tensor:
        """Return position encodings (B, N, H) that count the real tokens of ``mask`` (B, N)."""
        order = torch.arange(mask.shape[1], device=mask.device)
        encodings = sinusoids(order, self.config.hidden, self.type_embedding)
        return F.embedding(mask.cumsum(1) - 1, encodings)

    def text_tokens(self, tokens: Tensor, state: State, number: int | None = None) -> Tensor:
        """Return tokens (V, L, H) of words (V, L): of a sentence, or all of them word ``number`` of one."""
        words = self.word(self.embedding(tokens)) + self.type_embedding[1]
        if self.absolute:
            words = words + self.text_positions(tokens, number)
        return self.dropout(words)

    def text_positions(self, tokens: Tensor, number: int | None, start: int = 0) -> Tensor:
        """Return position encodings (L, H) or (1, H) of words (V, L), counted from ``start``."""
        first, last = (0, tokens.shape[1]) if number is None else (number, number + 1)
        order = torch.arange(start + first, start + last, device=tokens.device)
        return sinusoids(order, self.config.hidden, self.type_embedding)

    def next_tokens(self, tokens: Tensor, state: State) -> Tensor:
        """Return tokens (V, K, H) of the next word of K captions of each video, ``tokens`` (V K,)."""
        return self.text_tokens(tokens.view(len(state.video["mask"]), -1), state, state.words)

    def next_logits(self, hidden: Tensor) -> Tensor:
        """Return logits (V K, vocabulary) from the output of the stack (V, K, H)."""
        return self.logits(self.transform(hidden).flatten(0, 1))
