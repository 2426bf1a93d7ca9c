"""The vanilla transformer of Zhou et al. (2018), as Lei et al. describe it (the MART paper, Section 3.1).

An encoder reads the video of one segment, a decoder writes its sentence; segments know nothing of each other.
Layer l of the decoder looks at what layer l of the encoder gives, as printed. The encoder reads
[CLS] video [SEP], the same tokens as MART, so that the two differ in what stands between input and output.
What is common to the transformers is described in :mod:`capvid.captioners.transformer`, the notation too.

``layout = "authors"`` is the masked transformer in the MART authors' code. The encoder reads frames alone,
padded to ``text_start`` with zeros that no layer changes, but that attention sees. Frames go through layer
norm, dropout and a linear layer; word vectors are the rows of the vocabulary layer, times sqrt(H), and its
input is the decoder's output. Scores are divided by sqrt(H), whatever the heads; attention has no biases, but
dropout. Layer norm divides by the standard deviation (of n - 1) plus 1e-6; feed-forward layers have a ReLU.
Weights begin as torch has them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners.base import CAPTIONERS, Carried, State, Trace
from capvid.captioners.layers import at_least_float32
from capvid.captioners.transformer import (
    Attention,
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


class DecoderLayer(Layer):
    """Masked self-attention, attention to the encoder's layer, and a feed-forward layer."""

    def __init__(self, config: TransformerConfig, cache_name: str) -> None:
        super().__init__(config, cache_name)
        self.across = f"{cache_name}.across"  # name of the encoder's cached keys and values
        self.cross_attention = Attention(config)
        self.cross_norm = config.norm()

    def decoded(self, x: Tensor, sees: SentencePass | WordPass) -> Tensor:
        """Return H^l (B, Q, H) of the words from their H^{l-1}."""
        hidden = self.intermediate(x, sees)
        attended = sees.across(self.cross_attention, hidden, self.across)
        hidden = self.cross_norm(hidden + self.dropout(attended))
        return self.fed_forward(hidden, hidden)


class DeviationNorm(nn.Module):
    """Layer norm of the authors' layout: by the standard deviation of n - 1 values, plus 1e-6."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., D), in float32 at least."""
        deviation, mean = torch.std_mean(at_least_float32(x), -1, keepdim=True)
        return self.weight * (x - mean) / (deviation + 1e-6) + self.bias


@CAPTIONERS.register("vanilla-transformer")
class VanillaTransformer(TransformerCaptioner):
    """Encoder and decoder, apart."""

    name = "vanilla-transformer"
    config_class = TransformerConfig
    encoder: Any
    decoder: Any
    vocabulary: Any

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        common = replace(config, layout="paper")
        self.encoder = nn.ModuleList(Layer(common, str(n)) for n in range(config.layers))
        self.decoder = nn.ModuleList(DecoderLayer(common, str(n)) for n in range(config.layers))
        if config.authors:
            self._to_authors_layout()

    def _to_authors_layout(self) -> None:
        """Exchange the layers that differ, and drop those that the layout has not.

        Raises:
            UsageError: word vectors are given.
        """
        config, hidden = self.config, self.config.hidden
        if config.word_vectors:
            raise UsageError(
                "word_vectors: the authors' masked transformer has no word embeddings of its own",
                remedy="leave model.word_vectors out",
            )
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
        del self.embedding, self.word, self.token_norm, self.mark_embedding, self.type_embedding

    @property
    def recurrent(self) -> bool:
        """Segments do not depend on each other."""
        return False

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment (B, T, D), real by ``mask`` (B, T); nothing is carried."""
        x, real, kept = self.video_tokens(features, mask)
        seen = kept.get("mask", real)
        sees, kept = VideoPass(seen), {**kept, "mask": seen}
        for encoder, decoder in zip(self.encoder, self.decoder, strict=True):
            x = encoder(x, sees)
            if self.config.authors:
                x = x * real.unsqueeze(-1)
            keys, values = decoder.cross_attention.keys_values(x)
            kept |= {f"keys.{decoder.across}": keys, f"values.{decoder.across}": values}
        return State(kept, {})

    def video_tokens(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the video's tokens, their mask, and what goes into the state.

        In the authors' layout these are the frames and zeros (B, text_start, H); the state gets the mask of
        what attention sees, and that of the frames.
        """
        if not self.config.authors:
            return super().video_tokens(features, mask)
        frames, real = without_gaps(self.standardise(features), mask)
        places = max(self.config.text_start, mask.shape[1])
        tokens = self.frame(F.pad(frames, (0, 0, 0, places - mask.shape[1])))
        number = torch.arange(places, device=mask.device)
        tokens = self.dropout(tokens + sinusoids(number, self.config.hidden, tokens))
        padded = F.pad(real, (0, places - mask.shape[1]))
        # a longer video in the batch adds no zeros to this one
        kept = {"mask": padded | (number < self.config.text_start), "frames": real}
        return tokens * padded.unsqueeze(-1), padded, kept

    def text_tokens(self, tokens: Tensor, state: State, number: int | None = None) -> Tensor:
        """Return tokens (V, L, H) of words (V, L): of a sentence, or all of them word ``number`` of one."""
        if not self.config.authors:
            return super().text_tokens(tokens, state, number)
        words = F.embedding(tokens, self.vocabulary.weight) * self.config.hidden**0.5
        order = torch.arange(tokens.shape[1], device=tokens.device) if number is None else number
        positions = torch.as_tensor(order, device=tokens.device).reshape(-1)
        return self.dropout(words + sinusoids(positions, self.config.hidden, words))

    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Return the input of the vocabulary layer (B, L, H) after each of ``tokens``; carry nothing."""
        x, sees = self.text_tokens(tokens, state), SentencePass(state, tokens)
        for layer in self.decoder:
            x = layer.decoded(x, sees)
        return self.transform(x), {}

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption; the trace has the last layer's weights of the frames."""
        x = self.next_tokens(tokens, state)
        sees = WordPass(state, x.shape[1])
        for layer in self.decoder:
            x = layer.decoded(x, sees)
        across, video = f"{self.config.layers - 1}.across", state.video
        if self.config.authors:
            frames = video["frames"].repeat_interleave(x.shape[1], 0)
            attention = sees.looked(across, 0, frames.shape[1]) * frames
        else:
            attention = sees.looked(across, 1, video["mask"].shape[1] - 2)
        return self.next_logits(x), sees.after(), {"attention": attention}
