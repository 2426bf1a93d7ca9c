"""What the LSTM captioners share: frames and words as they see them, teacher forcing, a first state.

Notation for tensor shapes as in :mod:`capvid.captioners.layers`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from capvid.captioners.base import Captioner, CaptionerConfig, State, Trace
from capvid.captioners.layers import DeepOutput, LSTMCell, at_least_float32


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(CaptionerConfig):
    """Sizes common to the LSTM captioners.

    Attributes:
        embedding: E, width of a word embedding.
        hidden: H, width of the LSTM's hidden state.
        attention: A, width of the attention's hidden layer.
        projection: width to which frames are projected first; 0 leaves them as they are.
    """

    embedding: int = 468
    hidden: int = 512
    attention: int = 512
    projection: int = 0


class RecurrentCaptioner(Captioner):
    """A captioner around an LSTM cell whose word input is known beforehand under teacher forcing.

    A subclass sets ``cell`` and computes one word's step in :meth:`advance` and what the vocabulary layer
    sees of its results in :meth:`readout`. Dropout falls on words and on projected frames; further places
    are the subclass's.
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
        """The layer that frames go through first."""
        return nn.Linear(config.feature_width, config.projection) if config.projection else nn.Identity()

    @staticmethod
    def frame_width(config: RecurrentConfig) -> int:
        """D', width of a projected frame."""
        return config.projection or config.feature_width

    def frames(self, features: Tensor, mask: Tensor) -> Tensor:
        """Standardised, projected frames (B, T, D'), zero where ``mask`` (B, T) is False."""
        frames = self.projection(self.standardise(features))
        return self.dropout(frames) * mask.unsqueeze(-1)

    def words(self, tokens: Tensor) -> Tensor:
        """Embedded words (..., E) of ``tokens`` (...)."""
        return self.dropout(self.embedding(tokens))

    @abstractmethod
    def advance(self, word_gates: Tensor, state: State) -> tuple[tuple[Tensor, ...], State, Trace]:
        """One step from the word's gates (B, 4 H): what :meth:`readout` needs, the new state, the trace."""

    @abstractmethod
    def readout(self, *results: Tensor, words: Tensor) -> Tensor:
        """What the vocabulary layer sees (..., Z): of what :meth:`advance` gave, and the words (..., E)."""

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption, ``tokens`` (B,); returns logits (B, V) of the next, state and trace."""
        words, gates = self._read(tokens)  # (B, E), (B, 4 H)
        results, state, trace = self.advance(gates, state)
        return self.logits(self.readout(*results, words=words)), state, trace

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Words (B, E) of ``tokens`` (B,) and their gates (B, 4 H).

        Beams often say the same word; a processor computes each word once. A GPU would have to wait for their
        number.
        """
        if self.training or tokens.device.type != "cpu":
            words = self.words(tokens)
            return words, self.cell.word_gates(words)
        said, places = tokens.unique(return_inverse=True)
        words = self.words(said)
        return words[places], self.cell.word_gates(words)[places]

    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """What the vocabulary layer sees (B, L, Z) after each of ``tokens`` (B, L)."""
        state = self.encode(features, mask).expand(tokens.shape[0] // features.shape[0])
        words = self.words(tokens)  # (B, L, E)
        steps = []
        for gates in self.cell.word_gates(words).unbind(1):  # (B, 4 H)
            results, state, _ = self.advance(gates, state)
            steps.append(results)
        stacked = [torch.stack(parts, 1) for parts in zip(*steps, strict=True)]
        return self.readout(*stacked, words=words)


class FirstState(nn.Linear):
    """h_0 and c_0 from the mean frame, through one tanh layer (Yao et al. 2015)."""

    def __init__(self, *, width: int, hidden: int) -> None:
        super().__init__(width, 2 * hidden)

    def of(self, frames: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T, D'), zero where ``mask`` (B, T) is False -> h_0 and c_0, each (B, H)."""
        mean = frames.sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
        h, c = torch.tanh(self(mean)).chunk(2, -1)
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
        self.initial = FirstState(width=width, hidden=config.hidden)
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
        """Give z (..., Z) of the deep output from context (..., D'), h_t (..., H) and the words (..., E)."""
        context, hidden = results
        return self.output.features(context, hidden, words)

    def logits(self, hidden: Tensor) -> Tensor:
        """The vocabulary layer: (..., Z) -> logits (..., V)."""
        return self.output.vocabulary(hidden)
