"""Building blocks of the captioners: attention, external memory, LSTM captioners, padding, softmax.

Notation for tensor shapes: B batch, T frames, L words, D feature width, D' width of a projected frame, E word
embedding, H hidden state, A attention width, N memory rows, M row width, V vocabulary; where K captions are
written of each of V videos, B = V * K.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from capvid.captioners.base import Captioner, CaptionerConfig, State, Trace
from capvid.text.vocabulary import EOS, PAD

EPSILON = 1e-8


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 if it is in half precision, else unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax over the last axis, in float32 at least, 0 where ``mask`` is False.

    All weights of a video without frames are 0.
    """
    scores = at_least_float32(scores)
    if mask is None:
        return scores.softmax(-1)
    # not -inf: a row of nothing but -inf would become NaN
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~mask, 0)


def mean_frame(frames: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (B, D) of the real frames; ``frames`` (B, T, D) are zero where ``mask`` is False."""
    return frames.sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


def at_least_one_frame(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Add a masked frame where no video has any: an LSTM refuses sequences without elements."""
    if features.shape[1]:
        return features, mask
    return features.new_zeros(len(features), 1, *features.shape[2:]), mask.new_zeros(len(mask), 1)


def pad_frames(clips: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad clips of (T_i, D) frames with zeros to features (B, T, D) and a mask (B, T) of real frames."""
    features = torch.nn.utils.rnn.pad_sequence(list(clips), batch_first=True)
    lengths = torch.tensor([len(clip) for clip in clips], device=features.device)
    mask = torch.arange(features.shape[1], device=features.device) < lengths.unsqueeze(-1)
    return features, mask


def pad_segments(videos: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad segments of (T_ij, D) frames to features (B, S, T, D), mask (B, S, T), segment counts (B,)."""
    flat, flat_mask = pad_frames([clip for segments in videos for clip in segments])  # (N, T, D), (N, T)
    counts = torch.tensor([len(segments) for segments in videos], device=flat.device)
    real = torch.arange(int(counts.max()), device=flat.device) < counts.unsqueeze(-1)  # (B, S)
    features = flat.new_zeros(*real.shape, *flat.shape[1:])
    mask = flat_mask.new_zeros(*real.shape, flat.shape[1])
    features[real], mask[real] = flat, flat_mask
    return features, mask, counts


def with_end(tokens: Tensor, room: int) -> Tensor:
    """Return sentences (B, L), padded with 0, with the end token (B, L + 1) if shorter than ``room``."""
    lengths = (tokens != PAD).sum(1, keepdim=True)  # (B, 1)
    end = torch.where(lengths < room, EOS, PAD)
    return torch.nn.functional.pad(tokens, (0, 1)).scatter(1, lengths, end)


class AdditiveAttention(nn.Module):
    """Temporal attention of Yao et al. (2015), as in M3, Eq. 11-13.

    ``e_i = w' tanh(W q + U v_i + b)``, ``alpha = softmax(e)``, ``context = sum_i alpha_i v_i``.
    """

    def __init__(self, *, query: int, value: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(query, width, bias=False)  # W
        self.key = nn.Linear(value, width)  # U, b
        self.score = nn.Linear(width, 1, bias=False)  # w

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to ``values`` (V, T, D) where ``mask`` (V or 1, T) is True.

        ``query`` (V * K, Q) holds K rows for each video; ``keys`` (V, T, A) are ``self.key(values)``, which
        do not depend on the step. Returns context (V * K, D) and weights (V * K, T).
        """
        queries = self.query(query).unflatten(0, (len(keys), -1)).unsqueeze(2)  # (V, K, 1, A)
        energy = self.score((queries + keys.unsqueeze(1)).tanh_()).squeeze(-1)  # (V, K, T)
        weights = masked_softmax(energy, mask.unsqueeze(-2))
        context = torch.bmm(weights.to(values.dtype), values)  # (V, K, D)
        return context.flatten(0, 1), weights.flatten(0, 1)


def address(memory: Tensor, key: Tensor, sharpening: Tensor) -> Tensor:
    """Address an external memory by content, as in M3, Eq. 21-23.

    Memory (B, N, M), key (B, M) and sharpening (B, 1) give weights (B, N).
    """
    norms = memory.norm(dim=-1) * key.norm(dim=-1, keepdim=True)  # (B, N)
    similarity = torch.bmm(memory, key.unsqueeze(-1)).squeeze(-1) / (norms + EPSILON)  # Eq. 21
    return (sharpening * similarity).softmax(-1)  # Eq. 22, 23


def read_rows(memory: Tensor, weights: Tensor) -> Tensor:
    """Return the rows of ``memory`` (B, N, M) weighted by ``weights`` (B, N), as (B, M): M3, Eq. 10, 17."""
    return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


def write_rows(memory: Tensor, weights: Tensor, erase: Tensor, add: Tensor) -> Tensor:
    """Return M(i) [1 - w(i) e] + w(i) a, as in M3, Eq. 8, 15.

    Memory M (B, N, M), weights w (B, N), erase vector e and add vector a (B, M).
    """
    w = weights.unsqueeze(-1)  # (B, N, 1)
    change = torch.addcmul(add.unsqueeze(1), memory, erase.unsqueeze(1), value=-1)  # a - M(i) e
    return torch.addcmul(memory, w, change)


def normal(*shape: int, std: float = 1.0) -> Tensor:
    """Return normally distributed numbers; on the meta device, where they take seconds to import, none."""
    numbers = torch.empty(*shape)
    return numbers if numbers.is_meta else numbers.normal_(std=std)


def embed(weight: Tensor) -> nn.Embedding:
    """Return a trainable layer of word embeddings (V, E); that of padding keeps its value."""
    return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=PAD)


@torch.no_grad()
def init_gates(inputs: nn.Linear, recurrent: nn.Linear) -> None:
    """Initialise the gates of an LSTM: open forget gates, orthogonal recurrence."""
    if inputs.bias is not None:
        inputs.bias.zero_()
        inputs.bias.chunk(4)[1].fill_(1.0)
    for gate in recurrent.weight.chunk(4):
        if not gate.is_meta:  # its random numbers take seconds to import there
            nn.init.orthogonal_(gate)


class LSTMCell(nn.Module):
    """An LSTM cell with a further input r_t beside the word (M3, Eq. 1-6).

    The word's share of the gates, ``word(E)``, is computed by the caller, because under teacher forcing it is
    one product for all words of all captions. ``extra`` = 0 is no further input. Without ``squash``,
    h_t = o_t * c_t, as the key-value memory paper prints it (its Eq. 9).
    """

    def __init__(self, *, word: int, extra: int, hidden: int, squash: bool = True) -> None:
        super().__init__()
        self.squash = squash
        self.word = nn.Linear(word, 4 * hidden)  # W_i, W_f, W_o, W_c and their biases
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)  # U
        self.extra = nn.Linear(extra, 4 * hidden, bias=False) if extra else None  # M
        init_gates(self.word, self.recurrent)

    def forward(self, word_gates: Tensor, extra: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step: (B, 4 H), (B, R), (B, H), (B, H) -> h_t, c_t, each (B, H)."""
        gates = word_gates + self.recurrent(h)
        if self.extra is not None:
            gates = gates + self.extra(extra)
        i, f, o, candidate = gates.chunk(4, -1)
        c = torch.sigmoid(i) * torch.tanh(candidate) + torch.sigmoid(f) * c  # Eq. 4, 5
        return torch.sigmoid(o) * (torch.tanh(c) if self.squash else c), c  # Eq. 6


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
    layer in :meth:`readout`. Dropout falls on words and, with ``drops_features``, on frames that are not
    projected too; elsewhere the subclass decides.
    """

    cell: LSTMCell
    drops_features: ClassVar[bool] = True

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)
        self.frame_dropout = self.dropout if config.projection or self.drops_features else nn.Identity()
        self.projection = self.make_projection(config)
        words = torch.empty(config.vocabulary_size, config.embedding)
        self.embedding = embed(words.uniform_(-0.05, 0.05))

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
        return self.frame_dropout(frames) * mask.unsqueeze(-1)

    @abstractmethod
    def advance(
        self, word_gates: Tensor, state: State
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Trace]:
        """Compute one step from the word's gates (B, 4 H).

        Returns results for :meth:`readout`, the new ``state.memory``, and a trace.
        """

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
        results, memory, trace = self.advance(gates, state)
        state = State(state.video, memory, state.words + 1)
        return self.logits(self.readout(*results, words=words)), state, trace

    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Return the input of the vocabulary layer (B, L, Z) after each of ``tokens`` (B, L)."""
        state = self.encode(features, mask).expand(tokens.shape[0] // features.shape[0])
        words = self.dropout(self.embedding(tokens))  # (B, L, E)
        steps = []
        for gates in self.cell.word(words).unbind(1):  # (B, 4 H)
            results, memory, _ = self.advance(gates, state)
            state = State(state.video, memory, state.words + 1)
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
    """Additive attention, one LSTM and a deep output layer.

    ``z = tanh(W_v V_t + W_h h_t + W_e y_{t-1} + b_h)``; the logits are ``U z + b`` (M3, Eq. 25-26).

    Dropout falls on outputs of fully connected layers and of the LSTM (M3, Section 4.4): words, projected
    frames, and h_t and z_t in the deep output. Features of the CNN, which are no output of this network, keep
    all numbers, and so does what goes from step to step: h_{t-1}, also where the memory's heads read it.
    """

    drops_features = False

    def __init__(self, config: AttentiveConfig, *, extra_width: int) -> None:
        super().__init__(config)
        width = self.frame_width(config)
        self.initial = nn.Linear(width, 2 * config.hidden)
        self.cell = LSTMCell(word=config.embedding, extra=extra_width, hidden=config.hidden)
        layers = {
            "context": nn.Linear(width, config.output, bias=False),  # W_v
            "hidden": nn.Linear(config.hidden, config.output),  # W_h, b_h
            "word": nn.Linear(config.embedding, config.output, bias=False),  # W_e
            "vocabulary": nn.Linear(config.output, config.vocabulary_size),  # U, b
        }
        self.output = nn.ModuleDict(layers)

    def readout(self, *results: Tensor, words: Tensor) -> Tensor:
        """Return z (..., Z) of the deep output from context (..., D'), h_t (..., H) and words (..., E)."""
        context, hidden = results
        layers = self.output
        z = layers["context"](context) + layers["hidden"](self.dropout(hidden)) + layers["word"](words)
        return self.dropout(torch.tanh(z))

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the vocabulary layer: (..., Z) -> logits (..., V)."""
        logits: Tensor = self.output["vocabulary"](hidden)
        return logits
