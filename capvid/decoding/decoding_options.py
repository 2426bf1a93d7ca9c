"""Decoding options and hypotheses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from capvid.errors import UsageError
from capvid.utils.validation import checked_fields, option

if TYPE_CHECKING:
    from torch import Tensor

_LOWEST_TEMPERATURE = 1e-3  # logits divided by less overflow


_option = partial(option, minimum=0, maximum=1000)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How captions are searched for, or sampled.

    The ``metadata`` of each field holds its ``help`` and, for numbers, ``minimum`` and ``maximum``.

    ``specificity`` and ``no_repeat_words`` are explained in :mod:`capvid.decoding.rescoring` and
    :func:`capvid.decoding.beam_search.check_repetition`. A sentence ends before ``min_length`` words only if
    no word is allowed. Sampling ignores ``beam_size`` and ``specificity``; a sample depends on the video, the
    seed and the sample's number alone, not on the batch.
    """

    beam_size: int = _option(
        5, "Beam width; 1 is greedy search.", minimum=1, shown="as in training; chat models: 1"
    )
    max_length: int = _option(
        20,
        "Maximum words per caption (chat models: tokens).",
        minimum=1,
        shown="as in training; chat models: 64",
    )
    min_length: int = _option(0, "Minimum words per caption.")
    length_penalty: float = _option(  # n ** 1000 overflows
        1.0, "Exponent of the length by which a caption's log-probability is divided.", maximum=100
    )
    specificity: float = _option(
        0.0, "Weight of the mutual-information score when ranking beams; 0 ranks by likelihood."
    )
    num_captions: int = _option(1, "Captions per video, best first.", minimum=1, maximum=10_000)
    no_repeat_ngram: int = _option(0, "Never repeat an n-gram of this size within a caption; 0 allows it.")
    no_repeat_words: bool = _option(
        False,
        "Never repeat a content word within a caption.",
        flags=("--no-repeat-words/--repeat-words",),
    )
    temperature: float = _option(0.0, "Sampling temperature; 0 uses beam search.")
    top_p: float = _option(
        1.0, "Sample from the smallest set of words with this total probability.", maximum=1
    )
    seed: int = _option(0, "Random seed for sampling.", maximum=2**63 - 1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecodingOptions:
        """Build from plain values.

        Raises:
            UsageError: an unknown option, or a value out of its bounds.
        """
        checked_fields(cls, values, what="decoding option")
        return cls(**values)

    def __post_init__(self) -> None:
        checked_fields(type(self), vars(self))
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            raise UsageError(
                f"temperature = {self.temperature}: must be 0 or at least {_LOWEST_TEMPERATURE}",
                remedy="0 takes the likeliest words",
            )
        if self.min_length > self.max_length:
            raise UsageError(
                f"no sentence has at least {self.min_length} words and at most {self.max_length}",
                remedy=f"choose a minimum length of 0 to {self.max_length}, or a greater maximum length",
            )
        if self.num_captions > self.beam_size and not self.temperature:
            raise UsageError(
                f"{self.num_captions} captions cannot come from {self.beam_size} beams",
                remedy=f"choose 1 to {self.beam_size} captions or more beams",
            )
        if not self.top_p:
            raise UsageError(f"top_p = {self.top_p}: must be above 0 and at most 1")
        if self.top_p < 1 and not self.temperature:
            raise UsageError(
                f"top_p = {self.top_p} is of use only when words are drawn",
                remedy="give a temperature above 0, or leave top_p at 1",
            )


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What a chat model is asked, and how much it is shown. Other captioners take none of these options.

    The prompt may contain ``{start}``, ``{end}`` and ``{duration}`` of the video or segment in seconds, and
    ``{previous}``, the captions of the ``context`` segments before; without this placeholder, they are
    appended to the prompt.
    """

    prompt: str = option(
        "Describe this video in one short, plain sentence.",
        "What to ask, or a file with it; may contain {start}, {end}, {duration} and {previous}.",
        metavar="TEXT|FILE",
        shown="one plain sentence",
    )
    system: str = option("", "System message.", metavar="TEXT", shown=False)
    context: int = _option(0, "Previous segments whose captions are added to the prompt.", shown="0")
    max_pixels: int = option(
        448 * 448,
        "Shrink larger frames to this number of pixels.",
        minimum=1024,
        maximum=1 << 26,
        metavar="N",
        shown="200704",
    )

    def __post_init__(self) -> None:
        checked_fields(type(self), vars(self))


class LoadOptions(TypedDict, total=False):
    """The fields of both, as keyword arguments of :func:`capvid.load`; None stands for the default."""

    beam_size: int | None
    max_length: int | None
    min_length: int | None
    length_penalty: float | None
    specificity: float | None
    num_captions: int | None
    no_repeat_ngram: int | None
    no_repeat_words: bool | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    prompt: str | None
    system: str | None
    context: int | None
    max_pixels: int | None


@dataclass(frozen=True)
class Hypothesis:
    """One caption of one video.

    Attributes:
        tokens: word numbers, without start and end.
        logprobs: natural log-probability of each token and, last, of the end; the captioner's own, whatever
            the temperature and the nucleus.
        score: ranking score: the sum of ``logprobs``, less ``specificity`` times that of the average video,
            normalised by length.
        trace: the captioner's trace by name, each (words + 1, ...) on the CPU, padded with zeros where its
            width differs from word to word; None unless rescored with it.
    """

    tokens: list[int]
    logprobs: list[float]
    score: float
    trace: dict[str, Tensor] | None = None

    @property
    def logprob(self) -> float:
        """Log-probability of the caption, its end included."""
        return sum(self.logprobs)
