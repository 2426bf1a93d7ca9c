"""The vanilla transformer of Zhou et al. (2018), as Lei et al. describe it (the MART paper, Section 3.1).

An encoder reads the video of one segment, a decoder writes its sentence; segments know nothing of each other.
Layer l of the decoder looks at what layer l of the encoder gives, as printed. The encoder reads
[CLS] video [SEP], the same tokens as MART, so that the two differ in what stands between input and output.
What is common to the transformers is described in :mod:`capvid.captioners.transformer`, the notation too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from capvid.captioners.base import CAPTIONERS, Carried, State, Trace
from capvid.captioners.transformer import (
    Attention,
    Layer,
    SentencePass,
    TransformerCaptioner,
    TransformerConfig,
    VideoPass,
    WordPass,
)


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
        self.encoder = nn.ModuleList(Layer(config, str(n)) for n in range(config.layers))
        self.decoder = nn.ModuleList(DecoderLayer(config, str(n)) for n in range(config.layers))

    @property
    def recurrent(self) -> bool:
        """Segments do not depend on each other."""
        return False

    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """Return the first state of a segment (B, T, D), real by ``mask`` (B, T); nothing is carried."""
        x, mask = self.video_tokens(features, mask)
        sees, kept = VideoPass(mask), {"mask": mask}
        for encoder, decoder in zip(self.encoder, self.decoder, strict=True):
            x = encoder(x, sees)
            keys, values = decoder.cross_attention.keys_values(x)
            kept |= {f"keys.{decoder.across}": keys, f"values.{decoder.across}": values}
        return State(kept, {})

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
        across, frames = f"{self.config.layers - 1}.across", state.video["mask"].shape[1] - 2
        return self.next_logits(x), sees.after(), {"attention": sees.looked(across, 1, frames)}
