"""The Captioner protocol: encode a video once, then step from word to word.

Teacher forcing, decoding, training and saving know captioners by this protocol alone. A paragraph captioner
(:class:`ParagraphCaptioner`) does the same for one segment of a video after another and carries its memory
between them. Notation for tensor shapes as in :mod:`capvid.captioners.layers`, and S segments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from capvid.captioners.layers import Standardise
from capvid.errors import UsageError
from capvid.fields import bounded, checked_fields

Trace = dict[str, Tensor]
Carried = dict[str, Tensor]

MOST_LAYERS = 256

_ON_OFF = {"on": True, "off": False}


@dataclass(frozen=True)
class State:
    """Where a captioner stands, for a batch of captions in progress: V videos, K captions of each in a row.

    Attributes:
        video: what belongs to the video and never changes while words are added (V first). All captions of a
            video look at the same copy.
        memory: what changes with every word: hidden states, external memory (V * K first).
        words: how many words were read, the start token included.
        written: what is added to with every word and never moves (V first); ``memory`` says which of it is a
            caption's own.
        columns: how many words were read of each video, those of all its captions counted.
    """

    video: dict[str, Tensor]
    memory: dict[str, Tensor]
    words: int = 0
    written: dict[str, Tensor] = field(default_factory=dict)
    columns: int = 0

    def after(self, memory: dict[str, Tensor]) -> State:
        """The state one word later."""
        return replace(self, memory=memory, words=self.words + 1)

    def expand(self, times: int) -> State:
        """Every caption so far ``times`` over, side by side: K becomes K * times."""
        if times == 1:
            return self
        memory = {name: tensor.repeat_interleave(times, 0) for name, tensor in self.memory.items()}
        return replace(self, memory=memory)

    def repeat(self, times: int) -> State:
        """Every video ``times`` over, side by side, as videos that know nothing of each other."""
        if times == 1:
            return self
        memory = self.expand(times).memory
        return replace(self._of_videos(lambda tensor: tensor.repeat_interleave(times, 0)), memory=memory)

    def reorder(self, rows: Tensor) -> State:
        """Continue from ``rows`` (V * K',) of the captions, each of its own video (beams)."""
        memory = {name: tensor.index_select(0, rows) for name, tensor in self.memory.items()}
        return replace(self, memory=memory)

    def select(self, videos: Tensor, rows: Tensor) -> State:
        """Keep only some ``videos`` (V',), and of their captions ``rows`` (V' * K',)."""
        memory = self.reorder(rows).memory
        return replace(self._of_videos(lambda tensor: tensor.index_select(0, videos)), memory=memory)

    def _of_videos(self, function: Callable[[Tensor], Tensor]) -> State:
        video, written = (
            {name: function(tensor) for name, tensor in part.items()} for part in (self.video, self.written)
        )
        return replace(self, video=video, written=written)


@dataclass(frozen=True, kw_only=True)
class CaptionerConfig:
    """What all captioners are told; saved beside the weights.

    Attributes:
        vocabulary_size: words including the four special ones.
        feature_width: D, the summed width of the feature streams.
        locations: L, places of a feature map (T, L, D); 0 for one vector per frame (T, D).
        dropout: rate of dropout; where, the captioner says.
        standardise: subtract the training set's mean from the features and divide by its deviation.
    """

    vocabulary_size: int = bounded(least=4)
    feature_width: int
    locations: int = 0
    dropout: float = bounded(0.5, least=0, most=0.99)
    standardise: bool = False

    def to_dict(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CaptionerConfig:
        """Build from plain values; ``on`` and ``off`` are true and false.

        Raises:
            UsageError: a name that is not known, or a value that does not fit.
        """
        switches = {option.name for option in fields(cls) if option.type == "bool"}
        plain = {
            name: _ON_OFF.get(value, value) if name in switches and isinstance(value, str) else value
            for name, value in values.items()
        }
        return cls(**checked_fields(cls, plain, what="model option"))


class Captioner(nn.Module, ABC):
    """Writes a sentence for a video, word by word.

    Attributes:
        paragraphs: whether it writes a sentence for each segment of a video (:class:`ParagraphCaptioner`).
        standardise: how features are standardised first; the identity if they are not.
        function_words: tokens of the words that may be said twice where content words may not; None where
            tokens are no words.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[CaptionerConfig]]
    paragraphs: ClassVar[bool] = False
    config: Any
    function_words: Sequence[int] | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.standardise = Standardise(config.feature_width) if config.standardise else nn.Identity()
        wanted, given = self.needs_maps(config), bool(config.locations)
        if wanted != given:
            shapes = {True: "feature maps (frames, locations, channels)", False: "one vector per frame"}
            raise UsageError(
                f"{self.name}{self.why_maps(config)} expects {shapes[wanted]}, and the features are "
                f"{shapes[given]}",
                remedy="extract a layer that gives them: capvid models lists each backbone's layers",
            )

    @classmethod
    def needs_maps(cls, config: Any) -> bool:
        """Whether a captioner so configured looks at feature maps (T, L, D) instead of vectors (T, D)."""
        return False

    @classmethod
    def why_maps(cls, config: Any) -> str:
        """The options that decide it, for the error message."""
        return ""

    @abstractmethod
    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Features (B, T, D), or maps (B, T, L, D), and mask (B, T) of real frames -> the first state."""

    @abstractmethod
    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption, ``tokens`` (B,); returns logits (B, V) of the next, state and trace.

        A state may be stepped from once only: caches are written in place.
        """

    @abstractmethod
    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """What the vocabulary layer sees, (B, L, Z), after each of ``tokens`` (B, L).

        With fewer videos than captions, each video serves ``B / videos`` captions in a row and is
        encoded once.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The vocabulary layer: (..., Z) -> logits (..., V)."""

    def forward(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Teacher forcing: logits (B, L, V) of the word after each of ``tokens`` (B, L)."""
        return self.logits(self.teacher_forced(features, mask, tokens))


class ParagraphCaptioner(Captioner):
    """Writes a sentence for each segment of a video, knowing the segments and sentences before it.

    ``encode`` begins a segment with what the segments before it left (:meth:`remember`); ``step`` then adds
    words as for any captioner. A video without segments is one segment.
    """

    paragraphs = True

    @property
    def recurrent(self) -> bool:
        """Whether a segment depends on those before it; if not, all can be decoded at once."""
        return True

    @abstractmethod
    def encode(self, features: Tensor, mask: Tensor, carried: Carried | None = None) -> State:
        """A segment's features (B, T, D) and mask (B, T), and what is carried (None: first segment)."""

    @abstractmethod
    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Read a whole sentence at once, from the state that :meth:`encode` gave.

        Args:
            state: of the segment, before its first word; one of its videos to each sentence.
            tokens: (B, L) from the start token on, without the end token; padded with 0.

        Returns:
            what the vocabulary layer sees after each word (B, L, Z), and what to carry to the next segment.
        """

    def remember(self, state: State, tokens: Tensor) -> Carried:
        """What the segment of ``state`` and its sentence ``tokens`` (B, L) leave for the next one."""
        return self.read(state, tokens)[1] if self.recurrent else {}

    def memory_change(self, state: State, carried: Carried) -> Tensor:
        """By how much a segment changed the memory of each layer, relative to its length before: (B, layers).

        Args:
            state: of the segment.
            carried: what it leaves for the next one.

        Returns:
            nothing (B, 0) where what is carried is no memory that is changed.
        """
        return torch.zeros(len(next(iter(state.video.values()))), 0)

    def teacher_forced(
        self, features: Tensor, mask: Tensor, tokens: Tensor, remembered: Tensor | None = None
    ) -> Tensor:
        """(B, S, L, Z) from features (B, S, T, D), mask (B, S, T) and tokens (B, S, L).

        What a segment leaves for the next one is of ``tokens``, or of other sentences that are
        ``remembered`` (B, S - 1, L') in their place.

        After a video's last segment, the last with words, all is zero. Without the dimension S, the one
        sentence of a video that is one segment: (B, L, Z).
        """
        if tokens.dim() == 2:
            times = tokens.shape[0] // features.shape[0]
            return self.read(self.encode(features, mask).repeat(times), tokens)[0]
        # Videos whose segments are over leave the batch, so that they cost nothing.
        real = tokens.flip(1).any(-1).cumsum(1).flip(1) > 0  # (B, S)
        real[:, 0] = True
        if not self.recurrent:
            rows = real.flatten().nonzero().squeeze(1)
            flat = (tensor.flatten(0, 1)[rows] for tensor in (features, mask, tokens))
            return _spread(self.teacher_forced(*flat), rows, real.numel()).unflatten(0, real.shape)
        hidden: list[Tensor] = []
        carried: Carried = {}
        rows = torch.arange(len(tokens), device=tokens.device)
        for segment in range(tokens.shape[1]):
            going = real[rows, segment].nonzero().squeeze(1)
            if not len(going):
                hidden.append(torch.zeros_like(hidden[0]))
                continue
            rows, carried = rows[going], {name: tensor[going] for name, tensor in carried.items()}
            state = self.encode(features[rows, segment], mask[rows, segment], carried or None)
            read, carried = self.read(state, tokens[rows, segment])
            if remembered is not None and segment < remembered.shape[1]:
                carried = self.remember(state, remembered[rows, segment])
            hidden.append(_spread(read, rows, len(tokens)))
        return torch.stack(hidden, 1)


def _spread(tensor: Tensor, rows: Tensor, count: int) -> Tensor:
    """Put the rows of ``tensor`` (R, ...) at places ``rows`` (R,) of ``count``; the others are zero."""
    return tensor.new_zeros(count, *tensor.shape[1:]).index_copy(0, rows, tensor)
