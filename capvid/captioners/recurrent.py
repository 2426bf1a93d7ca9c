"""Base classes of the LSTM captioners: frames and words as inputs, teacher forcing, the first state.

Notation for tensor shapes as in :mod:`capvid.captioners.layers`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from capvid.captioners.base import Captioner, CaptionerConfig, State, Trace
from capvid.captioners.layers import DeepOutput, LSTMCell, at_least_float32, mean_frame


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(CaptionerConfig):
    """Sizes common to the LSTM captioners.

    Attributes:
        embedding: E, width of a word embedding.
        hidden: H, width of the LSTM's hidden state.
        attention: A, width of the attention's hidden layer.
        projection: width to which frames are projected first; 0 leaves them unchanged.
    """

    embedding: int = 468
    hidden: int = 512
    attention: int = 512
    projection: int = 0


class RecurrentCaptioner(Captioner):
    """A captioner around an LSTM cell whose word input is known beforehand under teacher forcing.

    A subclass sets ``cell`` and computes one word's step in :meth:`advance` and the input of the vocabulary
    layer in :meth:`readout`. Dropout falls on words and on projected frames; elsewhere the subclass decides.
    """

    cell: LSTMCell

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)
        self.projection = self.make_projection(config)
        self.embedding = nn.Embedding(config.vocabulary_size, config.embedding, padding_idx=0)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)

    @staticmethod
    def make_projection(config: RecurrentConfig) -> nn.Module:
        """Return the layer that frames go through first."""
        return nn.Linear(config.feature_width, config.projection) if config.projection else nn.Identity()

    @staticmethod
    def frame_width(config: RecurrentConfig) -> int:
        """Return D', the width of a projected frame."""
        return config.projection or config.feature_width

    def frames(self, features: Tensor, mask: Tensor) -> Tensor:
        """Return standardised, projected frames (B, T, D'), zero where ``mask`` (B, T) is False."""
        frames = self.projection(self.standardise(features))
        return self.dropout(frames) * mask.unsqueeze(-1)

    @abstractmethod
    def advance(self, word_gates: Tensor, state: State) -> tuple[tuple[Tensor, ...], State, Trace]:
        """Compute one step from the word's gates (B, 4 H): results for :meth:`readout`, state, trace."""

    def readout(self, *results: Tensor, words: Tensor) -> Tensor:
        """Return the input of the vocabulary layer (..., Z) from results of a step and words (..., E)."""
        return self.dropout(results[0])

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption, ``tokens`` (B,); return logits (B, V) of the next, state and trace."""
        # Beams often end in the same word, so a CPU embeds each word once. A GPU would wait for their number.
        unique = not self.training and tokens.device.type == "cpu"
        if unique:
            tokens, rows = tokens.unique(return_inverse=True)
        words = self.dropout(self.embedding(tokens))  # (B, E)
        gates = self.cell.word(words)  # (B, 4 H)
        if unique:
            words, gates = words[rows], gates[rows]
        results, state, trace = self.advance(gates, state)
        return self.logits(self.readout(*results, words=words)), state, trace

    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Return the input of the vocabulary layer (B, L, Z) after each of ``tokens`` (B, L)."""
        state = self.encode(features, mask).expand(tokens.shape[0] // features.shape[0])
        words = self.dropout(self.embedding(tokens))  # (B, L, E)
        steps = []
        for gates in self.cell.word(words).unbind(1):  # (B, 4 H)
            results, state, _ = self.advance(gates, state)
            steps.append(results)
        stacked = [torch.stack(parts, 1) for parts in zip(*steps, strict=True)]
        return self.readout(*stacked, words=words)


def first_state(layer: nn.Module, frames: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return h_0 and c_0 (B, H): a tanh layer D' -> 2 H of the mean frame (Yao et al. 2015).

    ``frames`` (B, T, D') are zero where ``mask`` (B, T) is False.
    """
    h, c = torch.tanh(layer(mean_frame(frames, mask))).chunk(2, -1)
    return h, at_least_float32(c)


@dataclass(frozen=True, kw_only=True)
class AttentiveConfig(RecurrentConfig):
    """Sizes of the captioners of the M3 paper.

    Attributes:
        output: width of z in the deep output layer.
    """

    output: int = 512


class AttentiveCaptioner(RecurrentCaptioner):
    """Additive attention, one LSTM and a deep output layer; dropout also on h and z there."""

    def __init__(self, config: AttentiveConfig, *, extra_width: int) -> None:
        super().__init__(config)
        width = self.frame_width(config)
        self.initial = nn.Linear(width, 2 * config.hidden)
        self.cell = LSTMCell(word=config.embedding, extra=extra_width, hidden=config.hidden)
        self.output = DeepOutput(
            context=width,
            hidden=config.hidden,
            word=config.embedding,
            width=config.output,
            vocabulary=config.vocabulary_size,
            dropout=config.dropout,
        )

    def readout(self, *results: Tensor, words: Tensor) -> Tensor:
        """Return z (..., Z) of the deep output from context (..., D'), h_t (..., H) and words (..., E)."""
        context, hidden = results
        return self.output(context, hidden, words)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the vocabulary layer: (..., Z) -> logits (..., V)."""
        return self.output.vocabulary(hidden)
