"""The transformers of the MART paper as its authors' code computes them, where it departs from the paper.

Subclasses of :mod:`capvid.captioners.mart`, :mod:`capvid.captioners.transformer_xl` and
:mod:`capvid.captioners.vanilla_transformer` under their own names; ``capvid convert --words`` reads their
checkpoints (:mod:`capvid.captioners.authors_weights`). Notation as in :mod:`capvid.captioners.transformer`.

MART and Transformer-XL: words and frames go through layer norm, dropout, a linear layer, ReLU and layer norm;
a token is the sum of both, normalised again, where frames have the word [VID], and words a frame of zeros.
The end token is remembered where ``text_length`` leaves room. All linear layers and embeddings begin as
N(0, 0.02), biases as 0. What remains different: words of a segment share the dropout of their frame of zeros;
[CLS], [SEP] and [VID] are not in the vocabulary; the authors' label smoothing e leaves 1 - e to the right
word, as e V / (V - 1) does here, with V words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners.base import CAPTIONERS, Carried, State, Trace
from capvid.captioners.layers import at_least_float32, normal, with_end
from capvid.captioners.mart import MART, MARTConfig, MemoryLayer
from capvid.captioners.transformer import (
    Attention,
    Distances,
    Layer,
    Pass,
    TransformerCaptioner,
    TransformerConfig,
    VideoPass,
    WordPass,
    sinusoids,
)
from capvid.captioners.transformer_xl import RelativeAttention, TransformerXL, TransformerXLConfig
from capvid.captioners.vanilla_transformer import VanillaTransformer
from capvid.errors import UsageError
from capvid.text.vocabulary import PAD
from capvid.utils.validation import bounded


@dataclass(frozen=True, kw_only=True)
class AuthorsConfig(TransformerConfig):
    """Sizes common to the authors' transformers.

    Attributes:
        text_start: position of the first word.
        text_length: maximum number of words that are remembered, start and end included.
    """

    text_start: int = bounded(100, maximum=1000)
    text_length: int = bounded(22, maximum=1000)

    def norm(self, width: int = 0) -> nn.LayerNorm:
        """Return a layer norm over ``width``, by default ``hidden``."""
        return nn.LayerNorm(width or self.hidden, eps=1e-12)


@dataclass(frozen=True, kw_only=True)
class AuthorsMARTConfig(AuthorsConfig, MARTConfig):
    """Sizes of :class:`AuthorsMART`."""


@dataclass(frozen=True, kw_only=True)
class AuthorsTransformerXLConfig(AuthorsConfig, TransformerXLConfig):
    """Sizes of :class:`AuthorsTransformerXL`."""


class AuthorsTokens(TransformerCaptioner):
    """Tokens and first weights of the authors' MART and Transformer-XL."""

    def __init__(self, config: AuthorsConfig) -> None:
        super().__init__(config)
        # [CLS], [SEP], [VID]
        self.mark_embedding = nn.Parameter(normal(3, config.word_width, std=0.02))
        self.token_norm = config.norm()
        if not self.type_embedding.is_meta:
            self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    def projection(self, width: int) -> nn.Sequential:
        """Return the layers that turn frames or word vectors of ``width`` into tokens."""
        config = self.config
        linear = nn.Linear(width, config.hidden)
        return nn.Sequential(config.norm(width), nn.Dropout(config.dropout), linear, nn.ReLU(), config.norm())

    def with_blank(self, state: State, features: Tensor) -> State:
        """Add ``blank`` (B, 1, H), the frame of zeros of a segment's words, to its first state."""
        blank = self.frame(features.new_zeros(len(features), 1, features.shape[-1]))
        return replace(state, video={**state.video, "blank": blank})

    def video_tokens(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return [CLS] video [SEP] (B, T + 2, H) from features and mask (B, T), and their mask (B, T + 2)."""
        frames = self.frame(F.pad(self.standardise(features), (0, 0, 1, 1)))
        first, last, middle = self.mark_embedding.unsqueeze(1)
        marks = torch.cat([first, middle.expand(features.shape[1], -1), last])
        mask = F.pad(mask, (1, 1), value=True)
        tokens = frames + self.word(marks.expand(len(features), -1, -1)) + self.type_embedding[0]
        return self.dropout(self.token_norm(tokens + self.video_positions(mask))), mask

    def text_tokens(self, tokens: Tensor, state: State, number: int | None = None) -> Tensor:
        """Return tokens (V, L, H) of words (V, L): of a sentence, or all of them word ``number`` of one."""
        words = self.word(self.embedding(tokens)) + self.type_embedding[1] + state.video["blank"]
        if self.absolute:
            words = words + self.text_positions(tokens, number, self.config.text_start)
        return self.dropout(self.token_norm(words))


class BiasedAttention(Attention):
    """Attention with biases, and dropout of its weights."""

    def __init__(self, config: TransformerConfig, *, output: bool = True, bias: bool = True) -> None:
        super().__init__(config, output=output, bias=bias)
        self.rate = config.dropout


class AuthorsMemoryLayer(MemoryLayer):
    """A layer whose memory reads GELU(linear(H-bar)) instead of H-bar.

    A linear layer alone, not the feed-forward layer, follows the attention to the memory. The updater's
    attention has no output layer, and a slot's bias is one number.
    """

    def __init__(self, config: AuthorsMARTConfig, cache_name: str) -> None:
        super().__init__(config, cache_name, BiasedAttention)
        self.updater.attention = BiasedAttention(config, output=False)
        self.slots = nn.Parameter(normal(config.memory_length, 1))

    def memory_input(self, hidden: Tensor) -> Tensor:
        """Return GELU(linear(H-bar^l)), (B, Q, H)."""
        return self.feed_forward[1](self.feed_forward[0](hidden))

    def augmented(self, hidden: Tensor, states: Tensor, sees: Pass, memory: Tensor | None = None) -> Tensor:
        """Return H^l (B, Q, H) from H-bar^l and ``states`` S that the memory reads."""
        attended = sees(self.memory_attention, states, f"{self.cache_name}.memory", memory)
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward[2](attended)))


@CAPTIONERS.register("mart-authors")
class AuthorsMART(AuthorsTokens, MART):
    """MART as its authors' code computes it."""

    name = "mart-authors"
    config_class = AuthorsMARTConfig

    def __init__(self, config: AuthorsMARTConfig) -> None:
        if config.recurrence and config.feed_forward != config.hidden:
            raise UsageError(
                f"feed_forward = {config.feed_forward}: must be hidden = {config.hidden}",
                remedy="the authors' code has one width for both",
            )
        super().__init__(config)

    def build_layer(self, cache_name: str) -> Layer:
        """Return a new layer, with a memory if there is recurrence."""
        if self.recurrent:
            return AuthorsMemoryLayer(self.config, cache_name)
        return Layer(self.config, cache_name, BiasedAttention)

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment; ``carried`` holds the layers' memories."""
        return self.with_blank(super().encode(features, mask, carried), features)

    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Return the input of the vocabulary layer (B, L, H), and the layers' memories M_t."""
        length = tokens.shape[1]
        hidden, carried = super().read(state, with_end(tokens, self.config.text_length))
        return hidden[:, :length], carried


@dataclass(frozen=True)
class WrappedDistances(Distances):
    """Relative positions of the authors' Transformer-XL.

    Attributes:
        wraps: whether an index goes on into the encodings of the next query.
        unseen: keys masked per query, in addition to the padding mask, (B, Q or 1, N).
    """

    wraps: bool
    unseen: Tensor


class WrappedAttention(RelativeAttention):
    """Relative attention whose shift of the position terms runs into the row of the next query."""

    def queries(self, x: Tensor, distances: Distances | None) -> tuple[Tensor, Tensor | None]:
        """Return queries (B, heads, Q, h) and a bias of the scores (B, heads, Q, N)."""
        query, positional = super().queries(x, distances)
        assert isinstance(distances, WrappedDistances) and positional is not None
        return query, positional.masked_fill(distances.unseen.unsqueeze(1), float("-inf"))

    def position_scores(self, query: Tensor, distances: Distances) -> Tensor:
        """Return the scores of all distances, followed by those of the next query, then 0."""
        scores = super().position_scores(query, distances)
        if isinstance(distances, WrappedDistances) and distances.wraps:
            scores = torch.cat([scores, F.pad(scores[:, :, 1:], (0, 1, 0, 1))], -1)
        return scores


@CAPTIONERS.register("transformer-xl-authors")
class AuthorsTransformerXL(AuthorsTokens, TransformerXL):
    """Transformer-XL as the MART authors' code computes it.

    A segment has always ``text_start`` tokens of video and ``text_length`` of text, [PAD] included, and
    distances count them all. A token sees all tokens of the previous segment, [PAD] included, if the token at
    its own position there is real, and otherwise none. For a key behind the query, the shift of the position
    terms runs into the next row: one position behind, the term is 0; d behind, it is the next query's term
    for a distance of R + 1 - d, with R tokens in both segments. The feed-forward layer has a ReLU; dropout
    falls on tokens twice, on the encodings, inside the feed-forward layer, and on the output. What remains
    different: encodings of video and text have dropout of their own, and u and v begin at 0, while theirs
    hold whatever was in memory.
    """

    name = "transformer-xl-authors"
    config_class = AuthorsTransformerXLConfig

    def __init__(self, config: AuthorsTransformerXLConfig) -> None:
        super().__init__(config)
        linear, gelu, norm = self.transform.children()
        parts = [("dropout", nn.Dropout(config.dropout)), ("0", linear), ("1", gelu), ("2", norm)]
        self.transform = nn.Sequential(OrderedDict(parts))

    def build_layer(self, cache_name: str) -> Layer:
        """Return a new layer."""
        layer = Layer(self.config, cache_name, WrappedAttention)
        layer.attention_norm.eps = layer.feed_forward_norm.eps = 1e-5
        first, _, second = layer.feed_forward
        layer.feed_forward = nn.Sequential(first, nn.ReLU(), nn.Dropout(self.config.dropout), second)
        return layer

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment; ``carried`` holds each layer's input in the one before.

        Raises:
            UsageError: more frames than there are positions.
        """
        state = self.with_blank(super().encode(features, mask, carried), features)
        return replace(state, video={**state.video, "frames": without_gaps(features, mask)[1]})

    def video_tokens(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return [CLS] video [SEP] [PAD]... (B, text_start, H), and which are real (B, text_start)."""
        places, count = self.config.text_start, features.shape[1]
        if count > places - 2:
            raise UsageError(
                f"{count} frames: at most {places - 2} fit the authors' layout",
                remedy="use fewer (data.max_frames) or more positions (model.text_start)",
            )
        frames, _ = without_gaps(self.standardise(features), mask)
        frames = self.frame(F.pad(frames, (0, 0, 1, places - count - 1)))  # (B, text_start, H)
        number, last = torch.arange(places, device=mask.device), mask.sum(1, keepdim=True) + 1
        inside = (number > 0) & (number < last)  # (B, text_start)
        first, second, middle = self.mark_embedding
        marks = torch.stack([first, second, middle, self.embedding.weight[PAD].detach()])
        which = torch.where(inside, 2, 3).masked_fill(number == 0, 0).masked_fill(number == last, 1)
        tokens = self.token_norm(frames + self.word(marks[which]) + self.type_embedding[0])
        return self.dropout(self.dropout(tokens)), number <= last

    def text_tokens(self, tokens: Tensor, state: State, number: int | None = None) -> Tensor:
        """Return tokens (V, L, H) of words (V, L): of a sentence, or all of them word ``number`` of one."""
        return self.dropout(super().text_tokens(tokens, state, number))

    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Return the input of the vocabulary layer (B, L, H), and each layer's input for the next segment."""
        length, room = tokens.shape[1], self.config.text_length
        tokens = with_end(tokens, room)
        tokens = F.pad(tokens, (0, max(0, room - tokens.shape[1])))
        state = replace(state, video={**state.video, "padding": tokens == PAD})
        hidden, carried = super().read(state, tokens)
        count = state.video["own"].shape[1] + room
        return hidden[:, :length], {name: tensor[:, :count] for name, tensor in carried.items()}

    def positions(self, before: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens are seen, and their positions, both (B, P + text_start)."""
        seen = F.pad(own, (before.shape[1], 0), value=True)
        return seen, torch.arange(seen.shape[1], device=seen.device).expand(len(seen), -1)

    def text_start(self, video: Mapping[str, Tensor]) -> Tensor:
        """Return the position (B, 1) of the first word, behind all tokens of the video."""
        return torch.ones_like(video["mask"]).sum(1, keepdim=True)

    def distances(
        self, video: Mapping[str, Tensor], queries: Tensor, keys: Tensor, first: int, reach: int = 0
    ) -> Distances:
        """Return the distances of queries at positions (B, Q) from keys at (B, N)."""
        before = video["before"]
        previous, end = before.shape[1], first + queries.shape[1]
        # all tokens of both segments; the next query's encodings follow in reverse
        reach = max(reach, keys.shape[1], previous + self.config.text_start + self.config.text_length)
        distance = queries.unsqueeze(2) - keys.unsqueeze(1)  # (B, Q, N)
        index = distance.clamp_min(0) if first else distance % (2 * reach + 1)
        real = F.pad(before, (0, max(0, end - previous)))[:, first:end]  # (B, Q), in the previous segment
        unseen = F.pad(~real.unsqueeze(2).expand(-1, -1, previous), (0, keys.shape[1] - previous))
        if "padding" in video:
            unseen[:, :, video["at"].shape[1] :] |= video["padding"].unsqueeze(1)
        possible = torch.arange(reach, device=keys.device)
        encodings = self.dropout(sinusoids(possible, self.config.hidden, self.type_embedding))
        biases = self.content_bias, self.position_bias
        return WrappedDistances(encodings, index, *biases, wraps=not first, unseen=unseen)


class DeviationNorm(nn.Module):
    """Layer norm by the standard deviation of n - 1 values, plus 1e-6."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., D), in float32 at least."""
        deviation, mean = torch.std_mean(at_least_float32(x), -1, keepdim=True)
        return self.weight * (x - mean) / (deviation + 1e-6) + self.bias


@CAPTIONERS.register("vanilla-transformer-authors")
class AuthorsVanillaTransformer(VanillaTransformer):
    """The masked transformer of the MART authors' code.

    The encoder reads frames alone, padded to ``text_start`` with zeros that no layer changes, but that
    attention sees. Frames go through layer norm, dropout and a linear layer; word vectors are the rows of the
    vocabulary layer, times sqrt(H), and its input is the decoder's output. Scores are divided by sqrt(H),
    whatever the heads; attention has no biases, but dropout. Layer norm is :class:`DeviationNorm`;
    feed-forward layers have a ReLU. Weights begin as torch has them.
    """

    name = "vanilla-transformer-authors"
    config_class = AuthorsConfig
    vocabulary: Any

    def __init__(self, config: AuthorsConfig) -> None:
        if config.word_vectors:
            raise UsageError(
                "word_vectors: the authors' masked transformer has no word embeddings of its own",
                remedy="remove model.word_vectors",
            )
        super().__init__(config)
        hidden = config.hidden
        for layer in [*self.encoder, *self.decoder]:
            layer.feed_forward[1] = nn.ReLU()
            for name, part in list(layer.named_children()):
                if isinstance(part, nn.LayerNorm):
                    setattr(layer, name, DeviationNorm(hidden))
                if isinstance(part, Attention):
                    part.scale, part.rate = hidden**-0.5, config.dropout
        norm, linear = DeviationNorm(config.feature_width), nn.Linear(config.feature_width, hidden)
        self.frame = nn.Sequential(norm, nn.Dropout(config.dropout), linear)
        self.transform = nn.Identity()
        del self.embedding, self.word, self.mark_embedding, self.type_embedding

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment (B, T, D), real by ``mask`` (B, T); nothing is carried."""
        frames, real = without_gaps(self.standardise(features), mask)
        places = max(self.config.text_start, mask.shape[1])
        padding = places - mask.shape[1]
        number = torch.arange(places, device=mask.device)
        x = self.frame(F.pad(frames, (0, 0, 0, padding)))
        x = self.dropout(x + sinusoids(number, self.config.hidden, x))
        padded = F.pad(real, (0, padding))
        # a longer video in the batch adds no zeros to this one
        seen = padded | (number < self.config.text_start)
        sees, kept = VideoPass(seen), {"mask": seen, "frames": real}
        x = x * padded.unsqueeze(-1)
        for encoder, decoder in zip(self.encoder, self.decoder, strict=True):
            x = encoder(x, sees) * padded.unsqueeze(-1)
            keys, values = decoder.cross_attention.keys_values(x)
            kept |= {f"keys.{decoder.across}": keys, f"values.{decoder.across}": values}
        return State(kept, {})

    def text_tokens(self, tokens: Tensor, state: State, number: int | None = None) -> Tensor:
        """Return tokens (V, L, H) of words (V, L): of a sentence, or all of them word ``number`` of one."""
        words = F.embedding(tokens, self.vocabulary.weight) * self.config.hidden**0.5
        order = torch.arange(tokens.shape[1], device=tokens.device) if number is None else number
        positions = torch.as_tensor(order, device=tokens.device).reshape(-1)
        return self.dropout(words + sinusoids(positions, self.config.hidden, words))

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption; the trace has the last layer's weights of the frames."""
        x = self.next_tokens(tokens, state)
        sees = WordPass(state, x.shape[1])
        for layer in self.decoder:
            x = layer.decoded(x, sees)
        frames = state.video["frames"].repeat_interleave(x.shape[1], 0)
        weights = sees.looked(f"{self.config.layers - 1}.across", 0, frames.shape[1])
        return self.next_logits(x), sees.after(), {"attention": weights * frames}


def without_gaps(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (B, T, D), the real ones first and the others 0, and their mask (B, T)."""
    order = mask.byte().argsort(dim=1, descending=True, stable=True).unsqueeze(-1)
    real = torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True)
    return features.gather(1, order.expand_as(features)) * real.unsqueeze(-1), real
