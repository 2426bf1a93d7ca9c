"""How sentences are decoded, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from capvid.errors import UsageError

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((float, int), "a number"),
    "bool": ((bool,), "true or false"),
}
_MAXIMA: dict[str, float] = {
    "beam_size": 1000,
    "max_length": 1000,
    "num_captions": 10_000,
    "no_repeat_ngram": 1000,
    "length_penalty": 100,  # n ** 1000 overflows
    "specificity": 1000,
    "temperature": 1000,
    "seed": 2**63 - 1,
}
_LEAST_TEMPERATURE = 1e-3  # logits divided by less overflow


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How sentences are searched for, or drawn.

    Attributes:
        beam_size: beams per video; 1 is greedy search. Without meaning when sampling.
        max_length: words at most, the end token not counted.
        min_length: words at least; only a sentence that has no word left to say may end earlier.
        length_penalty: a hypothesis of n tokens (end included) ranks by its log-probability / n ** this.
        specificity: finished hypotheses are ranked by how much likelier they are of their own video than of
            the average one (:mod:`capvid.decoding.specificity`): this times the log-probability by the
            average video is subtracted before the division by n ** ``length_penalty``. The search stays the
            same, and stops as soon as ``beam_size`` of them have ended; all are ranked. Without meaning for
            greedy search, which finds one, and when sampling.
        num_captions: hypotheses returned per video, best first; at most ``beam_size``, any number when
            sampling.
        no_repeat_ngram: no sequence of so many words occurs twice in a sentence; 0 allows repetition.
        no_repeat_words: no word occurs twice in a sentence but the captioner's function words.
        temperature: 0 searches; above 0 every word is drawn at random, from the probabilities to the power
            1 / temperature, normalised again.
        top_p: words are drawn from the nucleus only, the fewest likeliest words of this much probability.
        seed: of the drawing. A sample depends on it, on the video and on the sample's number, on nothing
            else.
        trace: keep what the captioner attended to at every word, as :attr:`Hypothesis.trace`.
    """

    beam_size: int = 5
    max_length: int = 20
    min_length: int = 0
    length_penalty: float = 1.0
    specificity: float = 0.0
    num_captions: int = 1
    no_repeat_ngram: int = 0
    no_repeat_words: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    trace: bool = False

    @property
    def sampling(self) -> bool:
        """Whether words are drawn at random."""
        return self.temperature > 0

    def to_dict(self) -> dict[str, Any]:
        """Everything that captions depend on, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "trace"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecodingOptions:
        """Build from plain values.

        Raises:
            UsageError: an option that is not known, or a value that does not fit.
        """
        known = [option.name for option in fields(cls)]
        for name in values:
            if name not in known:
                raise UsageError(f"{name}: no such decoding option", remedy=f"known are {', '.join(known)}")
        return cls(**values)

    def __post_init__(self) -> None:
        for option in fields(self):
            value, (kinds, expected) = getattr(self, option.name), _KINDS[str(option.type)]
            if type(value) not in kinds:
                raise UsageError(f"{option.name} = {value!r}: expected {expected}")
        if self.beam_size < 1 or self.max_length < 1:
            raise UsageError("beam size and maximum length must be at least 1")
        for name, maximum in _MAXIMA.items():
            value = getattr(self, name)
            if value > maximum:
                raise UsageError(f"{name} = {value}: must be at most {maximum}")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise UsageError(
                f"temperature = {self.temperature}: must be 0 or at least {_LEAST_TEMPERATURE}",
                remedy="0 takes the likeliest words",
            )
        for name in ("min_length", "no_repeat_ngram", "seed", "temperature", "length_penalty", "specificity"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UsageError(f"{name} = {value}: must be 0 or more")
        if self.min_length > self.max_length:
            raise UsageError(
                f"no sentence has at least {self.min_length} words and at most {self.max_length}",
                remedy=f"choose a minimum length of 0 to {self.max_length}, or a greater maximum length",
            )
        self._check_captions()
        self._check_nucleus()

    def _check_captions(self) -> None:
        if self.num_captions < 1:
            raise UsageError(f"{self.num_captions} captions: at least 1 per video can be asked for")
        if self.num_captions > self.beam_size and not self.sampling:
            raise UsageError(
                f"{self.num_captions} captions cannot come from {self.beam_size} beams",
                remedy=f"choose 1 to {self.beam_size} captions or more beams",
            )

    def _check_nucleus(self) -> None:
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p = {self.top_p}: must be above 0 and at most 1")
        if self.top_p < 1 and not self.sampling:
            raise UsageError(
                f"top_p = {self.top_p} is of use only when words are drawn",
                remedy="give a temperature above 0, or leave top_p at 1",
            )


@dataclass(frozen=True)
class Hypothesis:
    """One caption of one video.

    Attributes:
        tokens: word numbers, without start and end.
        logprobs: natural log-probability of each token and, last, of the end. They are the captioner's own,
            also where words were drawn at another temperature or from a nucleus.
        score: what hypotheses are ranked by: their sum, less its like by the average video where there is a
            ``specificity``, normalised by length.
        trace: the captioner's trace by name, each (words, ...) for the step that gave each word and, last,
            the end; on the CPU. Where its width differs from word to word, zeros follow. None unless
            asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    score: float
    trace: dict[str, Tensor] | None = None

    @property
    def logprob(self) -> float:
        """Log-probability of the whole caption, its end included."""
        return sum(self.logprobs)
