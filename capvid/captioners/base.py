"""The Captioner protocol: encode a video once, then step from word to word; the registry of captioners.

Teacher forcing, decoding, training and saving know captioners by this protocol alone. A paragraph captioner
(:class:`ParagraphCaptioner`) does the same for one segment of a video after another and carries its memory
between them. A new captioner is one module of this package: a dataclass of sizes, derived from
:class:`CaptionerConfig`, and a class under ``@CAPTIONERS.register(name)``. Notation for tensor shapes as in
:mod:`capvid.captioners.layers`, and S segments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor, nn

from capvid.errors import UsageError
from capvid.utils.registry import Registry
from capvid.utils.validation import GIB, bounded, checked_fields, limits

Trace = dict[str, Tensor]
Carried = dict[str, Tensor]

CAPTIONERS: Registry[type[Captioner]] = Registry("captioner", "capvid.captioners")
MAX_LAYERS = 256


@dataclass(frozen=True)
class State:
    """A batch of captions in progress: V videos, K captions of each in a row.

    Attributes:
        video: tensors of the video, which never change (V first) and which its captions share.
        memory: tensors that change with every word: hidden states, external memory (V * K first).
        words: number of words read, the start token included.
        written: append-only caches (V first); ``memory`` holds each caption's indices into them.
        columns: number of words read of each video, those of all its captions counted.
    """

    video: dict[str, Tensor]
    memory: dict[str, Tensor]
    words: int = 0
    written: dict[str, Tensor] = field(default_factory=dict)
    columns: int = 0

    def expand(self, times: int) -> State:
        """Repeat every caption ``times`` over, side by side: K becomes K * times."""
        if times == 1:
            return self
        memory = {name: tensor.repeat_interleave(times, 0) for name, tensor in self.memory.items()}
        return replace(self, memory=memory)

    def repeat(self, times: int) -> State:
        """Repeat every video ``times`` over, side by side, as independent videos."""
        if times == 1:
            return self
        video = {name: tensor.repeat_interleave(times, 0) for name, tensor in self.video.items()}
        written = {name: tensor.repeat_interleave(times, 0) for name, tensor in self.written.items()}
        return replace(self.expand(times), video=video, written=written)

    def reorder(self, rows: Tensor) -> State:
        """Continue from ``rows`` (V * K',) of the captions, each of its own video (beams)."""
        memory = {name: tensor.index_select(0, rows) for name, tensor in self.memory.items()}
        return replace(self, memory=memory)

    def select(self, videos: Tensor, rows: Tensor) -> State:
        """Keep only ``videos`` (V',), and of their captions ``rows`` (V' * K',)."""
        video = {name: tensor.index_select(0, videos) for name, tensor in self.video.items()}
        written = {name: tensor.index_select(0, videos) for name, tensor in self.written.items()}
        return replace(self.reorder(rows), video=video, written=written)


@dataclass(frozen=True, kw_only=True)
class CaptionerConfig:
    """Options of every captioner; saved beside the weights.

    Attributes:
        vocabulary_size: words including the four special ones.
        feature_width: D, the summed width of the feature streams.
        locations: L, locations of a feature map (T, L, D); 0 for one vector per frame (T, D).
        dropout: dropout rate; each captioner says where it applies.
        standardise: subtract the training set's mean from the features and divide by its deviation.
    """

    vocabulary_size: int = bounded(minimum=4)
    feature_width: int
    locations: int = 0
    dropout: float = bounded(0.5, minimum=0, maximum=0.99)
    standardise: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CaptionerConfig:
        """Build from plain values; ``on`` and ``off`` are true and false.

        Raises:
            UsageError: an unknown name, or a value that does not fit.
        """
        switches = {option.name for option in fields(cls) if option.type in ("bool", bool)}
        words = {"on": True, "off": False}
        plain = {
            name: words.get(value, value) if name in switches and isinstance(value, str) else value
            for name, value in values.items()
        }
        return cls(**checked_fields(cls, plain, what="model option"))


class Standardise(nn.Module):
    """Features minus their mean over the training set, divided by their standard deviation.

    The statistics are buffers, saved with the captioner. Before :meth:`fit` it changes nothing.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def fit(self, parts: Tensor | Iterable[Tensor]) -> None:
        """Take the statistics of all vectors in ``parts``: (N, D), or several of (..., D)."""
        count, total, squares = 0, torch.zeros_like(self.mean).double(), torch.zeros_like(self.mean).double()
        for part in [parts] if isinstance(parts, Tensor) else parts:
            vectors = part.double().flatten(0, -2)  # (N, D)
            count += len(vectors)
            total += vectors.sum(0)
            squares += vectors.square().sum(0)
        mean = total / count
        variance = (squares - count * mean.square()) / max(1, count - 1)
        self.mean.copy_(mean)
        self.scale.copy_(1.0 / variance.clamp_min(0).sqrt().clamp_min(1e-4))

    def forward(self, features: Tensor) -> Tensor:
        """Standardise ``features`` (..., D)."""
        return (features - self.mean) * self.scale


class Captioner(nn.Module, ABC):
    """Writes a sentence for a video, word by word.

    Attributes:
        paragraphs: whether it writes a sentence for each segment of a video (:class:`ParagraphCaptioner`).
        maps_option: the option that makes it read feature maps instead of vectors; empty if none does.
        standardise: standardisation of the features; the identity if off.
        vocabulary: the vocabulary layer.
        function_words: tokens that ``no_repeat_words`` lets repeat; None where tokens are no words.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[CaptionerConfig]]
    paragraphs: ClassVar[bool] = False
    maps_option: ClassVar[str] = ""
    config: Any
    vocabulary: nn.Module
    function_words: Sequence[int] | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.standardise = Standardise(config.feature_width) if config.standardise else nn.Identity()
        expected = self.needs_maps(config)
        if expected != bool(config.locations):
            switch = f" with {self.maps_option} {'on' if expected else 'off'}" if self.maps_option else ""
            shapes = ("one vector per frame", "feature maps (frames, locations, channels)")
            wanted, actual = shapes[expected], shapes[not expected]
            raise UsageError(
                f"{self.name}{switch} expects {wanted}, and the features are {actual}",
                remedy="extract a layer that gives them: capvid models lists each backbone's layers",
            )

    @classmethod
    def needs_maps(cls, config: Any) -> bool:
        """Return whether it reads feature maps (T, L, D) with this configuration, not vectors (T, D)."""
        return bool(cls.maps_option) and bool(getattr(config, cls.maps_option))

    @abstractmethod
    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Return the first state of features (B, T, D), or maps (B, T, L, D), real by ``mask`` (B, T)."""

    @abstractmethod
    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption, ``tokens`` (B,); return logits (B, V) of the next, state and trace.

        A state may be stepped from once only: caches are written in place.
        """

    @abstractmethod
    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Return the input of the vocabulary layer (B, L, Z) after each of ``tokens`` (B, L).

        With fewer videos than captions, each video serves ``B / videos`` captions in a row and is
        encoded once.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the vocabulary layer: (..., Z) -> logits (..., V); loss and decoder apply the softmax."""
        return self.vocabulary(hidden)

    def forward(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-force: logits (B, L, V) of the word after each of ``tokens`` (B, L)."""
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
        """Return the first state of a segment (B, T, D); ``carried`` is None for a video's first segment."""

    @abstractmethod
    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, Carried]:
        """Read a sentence at once, from the state that :meth:`encode` returned, one video to each sentence.

        ``tokens`` (B, L) begin with the start token and lack the end token; they are padded with 0. Returns
        the input of the vocabulary layer after each word (B, L, Z), and the memory for the next segment.
        """

    def remember(self, state: State, tokens: Tensor) -> Carried:
        """Return what the segment of ``state`` and its sentence ``tokens`` (B, L) leave for the next one."""
        return self.read(state, tokens)[1] if self.recurrent else {}

    def memory_change(self, state: State, carried: Carried) -> Tensor:
        """Return the relative change of each layer's memory by a segment, (B, layers); (B, 0) without any."""
        return torch.zeros(len(next(iter(state.video.values()))), 0)

    def teacher_forced(
        self, features: Tensor, mask: Tensor, tokens: Tensor, remembered: Tensor | None = None
    ) -> Tensor:
        """Return (B, S, L, Z) from features (B, S, T, D), mask (B, S, T) and tokens (B, S, L).

        After a video's last segment, the last with words, all is zero. Without the dimension S, the one
        sentence of a video that is one segment: (B, L, Z). The sentences ``remembered`` (B, S - 1, L')
        replace ``tokens`` in what is carried to the next segment.
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
            active = real[rows, segment].nonzero().squeeze(1)
            if not len(active):
                hidden.append(torch.zeros_like(hidden[0]))
                continue
            rows, carried = rows[active], {name: tensor[active] for name, tensor in carried.items()}
            state = self.encode(*trim(features[rows, segment], mask[rows, segment]), carried or None)
            read, carried = self.read(state, tokens[rows, segment])
            if remembered is not None and segment < remembered.shape[1]:
                carried = self.remember(state, remembered[rows, segment])
            hidden.append(_spread(read, rows, len(tokens)))
        return torch.stack(hidden, 1)


def trim(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (B, T, D) and mask (B, T) without the last frames, which no video has."""
    frames = mask.any(0).nonzero()
    length = int(frames[-1]) + 1 if len(frames) else 0
    return features[:, :length], mask[:, :length]


def _spread(tensor: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return ``count`` rows: those of ``tensor`` (R, ...) at ``rows`` (R,), zeros elsewhere."""
    return tensor.new_zeros(count, *tensor.shape[1:]).index_copy(0, rows, tensor)


def build(name: str, options: Mapping[str, Any]) -> Captioner:
    """Build the captioner ``name`` with fresh weights and the configuration in ``options``.

    Raises:
        UsageError: no such captioner, or an option that is unknown or does not fit.
    """
    cls: Any = CAPTIONERS[name]
    captioner: Captioner = cls(cls.config_class.from_dict(options))
    return captioner


def sketch(name: str, options: Mapping[str, Any], *, copies: int = 1) -> Captioner:
    """Build a captioner on the meta device: its tensors have names, shapes and types, but no data.

    Args:
        name: name of the captioner.
        options: its configuration.
        copies: number of copies of its weights that must fit into memory.

    Raises:
        UsageError: as :func:`build`, or the weights are too large for this machine.
    """
    with torch.device("meta"):
        captioner = build(name, options)
    size = copies * sum([tensor.nbytes for tensor in captioner.state_dict().values()])
    room = min(limits().model_bytes, psutil.virtual_memory().total)
    if size > room:
        largest = max(options, key=lambda option: options[option] if type(options[option]) is int else 0)
        raise UsageError(
            f"{largest} = {options[largest]}: the captioner takes {size / GIB:.1f} GiB, more than the "
            f"{room / GIB:.1f} GiB that this machine and the limit model-bytes allow",
            remedy="choose smaller sizes",
        )
    return captioner
