"""The Captioner protocol: encode a video once, then step from word to word.

Everything that is not a paper's own is written here once: teacher forcing, initial states, the state that
decoding reorders. Notation for tensor shapes as in :mod:`capvid.captioners.layers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from capvid.captioners.layers import DeepOutput, LSTMCell, Standardise, at_least_float32
from capvid.errors import UsageError

Trace = dict[str, Tensor]


@dataclass(frozen=True)
class State:
    """Where a captioner stands, for a batch of captions in progress.

    Attributes:
        video: what belongs to the video and never changes while words are added (B first).
        memory: what changes with every word: hidden states, external memory (B first).
    """

    video: dict[str, Tensor]
    memory: dict[str, Tensor]

    def expand(self, times: int) -> State:
        """Every video's state ``times`` over, side by side: (B, ...) -> (B * times, ...)."""
        if times == 1:
            return self
        return State(
            {name: tensor.repeat_interleave(times, 0) for name, tensor in self.video.items()},
            {name: tensor.repeat_interleave(times, 0) for name, tensor in self.memory.items()},
        )

    def reorder(self, rows: Tensor) -> State:
        """Continue from other rows ``(B,)`` of the same video (beams): only ``memory`` moves."""
        return State(self.video, {name: tensor.index_select(0, rows) for name, tensor in self.memory.items()})

    def select(self, rows: Tensor) -> State:
        """Keep only ``rows`` of the batch."""
        return State(
            {name: tensor.index_select(0, rows) for name, tensor in self.video.items()},
            {name: tensor.index_select(0, rows) for name, tensor in self.memory.items()},
        )


@dataclass(frozen=True, kw_only=True)
class CaptionerConfig:
    """Sizes common to all captioners; saved beside the weights.

    Attributes:
        vocabulary_size: words including the four special ones.
        feature_width: D, the summed width of the feature streams.
        embedding: E, width of a word embedding.
        hidden: H, width of the LSTM's hidden state.
        attention: A, width of the attention's hidden layer.
        output: width of z in the deep output layer.
        projection: width to which frames are projected before attention; 0 leaves them as they are.
        dropout: rate on words, on projected frames, on the LSTM's output and on the deep output layer.
        standardise: subtract the training set's mean from the features and divide by its deviation.
    """

    vocabulary_size: int
    feature_width: int
    embedding: int = 468
    hidden: int = 512
    attention: int = 512
    output: int = 512
    projection: int = 0
    dropout: float = 0.5
    standardise: bool = False

    def to_dict(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CaptionerConfig:
        """Build from plain values; an unknown name or a wrong kind of value is a UsageError."""
        known = {field.name: field.type for field in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise UsageError(
                    f"{name}: no such model option", remedy=f"known are {', '.join(sorted(known))}"
                )
            wanted = str(known[name])
            right = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(wanted)
            if right and type(value) not in right:
                raise UsageError(f"{name} = {value!r}: not a value for this model option ({wanted})")
            if name == "dropout" and not 0 <= value < 1:
                raise UsageError(f"dropout = {value}: must be from 0 to below 1")
            if wanted == "int" and value < (0 if name == "projection" else 1):
                raise UsageError(f"{name} = {value}: must be positive")
        return cls(**values)


class Captioner(nn.Module, ABC):
    """A captioner over one video's frames: additive attention, an LSTM, a deep output layer.

    A subclass computes one word's step in :meth:`advance` and says in ``extra_width`` how wide the LSTM's
    further input is.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[CaptionerConfig]]
    config: Any

    def __init__(self, config: Any, *, extra_width: int, context_width: int) -> None:
        super().__init__()
        self.config = config
        self.standardise = Standardise(config.feature_width) if config.standardise else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.projection = (
            nn.Linear(config.feature_width, config.projection) if config.projection else nn.Identity()
        )
        self.embedding = nn.Embedding(config.vocabulary_size, config.embedding, padding_idx=0)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        self.initial = nn.Linear(self.frame_width(config), 2 * config.hidden)
        self.cell = LSTMCell(word=config.embedding, extra=extra_width, hidden=config.hidden)
        self.output = DeepOutput(
            context=context_width,
            hidden=config.hidden,
            word=config.embedding,
            width=config.output,
            vocabulary=config.vocabulary_size,
            dropout=config.dropout,
        )

    @staticmethod
    def frame_width(config: CaptionerConfig) -> int:
        """Width of a frame as attention sees it."""
        return config.projection or config.feature_width

    def frames(self, features: Tensor, mask: Tensor) -> Tensor:
        """Standardised, projected frames (B, T, D'), zero where ``mask`` (B, T) is False."""
        frames = self.projection(self.standardise(features))
        return self.dropout(frames) * mask.unsqueeze(-1)

    def words(self, tokens: Tensor) -> Tensor:
        """Embedded words (..., E) of ``tokens`` (...)."""
        return self.dropout(self.embedding(tokens))

    def initial_hidden(self, frames: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """h_0 and c_0 (B, H) from the mean frame, through one tanh layer (Yao et al. 2015)."""
        mean = frames.sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
        h, c = torch.tanh(self.initial(mean)).chunk(2, -1)
        return h, at_least_float32(c)

    @abstractmethod
    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Features (B, T, D) and mask (B, T) of real frames -> the state before the first word."""

    @abstractmethod
    def advance(self, word_gates: Tensor, state: State) -> tuple[Tensor, Tensor, State, Trace]:
        """One step from the word's gates (B, 4 H): context (B, C), h_t (B, H), new state, trace."""

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption, ``tokens`` (B,); returns logits (B, V) of the next, state and trace."""
        words = self.words(tokens)  # (B, E)
        context, hidden, state, trace = self.advance(self.cell.word_gates(words), state)
        return self.output(context, hidden, words), state, trace

    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """The deep output layer's z (B, L, Z) after each of ``tokens`` (B, L).

        With fewer videos than captions, each video serves ``B / videos`` captions in a row and is
        encoded once.
        """
        state = self.encode(features, mask).expand(tokens.shape[0] // features.shape[0])
        words = self.words(tokens)  # (B, L, E)
        contexts, hiddens = [], []
        for gates in self.cell.word_gates(words).unbind(1):  # (B, 4 H)
            context, hidden, state, _ = self.advance(gates, state)
            contexts.append(context)
            hiddens.append(hidden)
        return self.output.features(torch.stack(contexts, 1), torch.stack(hiddens, 1), words)

    def forward(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Teacher forcing: logits (B, L, V) of the word after each of ``tokens`` (B, L)."""
        return self.output.vocabulary(self.teacher_forced(features, mask, tokens))
