"""What captioning gives: sentences with their log-probabilities, or what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capvid.errors import CapvidError


@dataclass(frozen=True, kw_only=True)
class WordScore:
    """One word and the logarithm of its probability given the words before it."""

    word: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Caption:
    """One sentence; ``logprob`` is that of the whole sentence, its end included."""

    text: str
    logprob: float
    words: tuple[WordScore, ...]


@dataclass(frozen=True, kw_only=True)
class CaptionResult:
    """What became of one input: captions, best first, or the error; ``model`` is ``name@revision``.

    ``lost`` is the number of its frames that could not be decoded, ``duration`` that of the video in seconds,
    if it is known.
    """

    path: Path
    status: str
    captions: tuple[Caption, ...]
    error: CapvidError | None
    model: str
    lost: int = 0
    duration: float | None = None
