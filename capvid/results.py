"""What captioning gives: sentences with their log-probabilities, or what went wrong.

Notation for array shapes: L words of a sentence, T frames that were looked at, W width of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from capvid.errors import CapvidError
from capvid.storage import VideoPath


@dataclass(frozen=True, kw_only=True)
class WordScore:
    """One word and the logarithm of its probability given the words before it."""

    word: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Caption:
    """One sentence, or the sentences of a video's segments as one text.

    Attributes:
        text: the words.
        logprob: of the whole sentence, its end included; of several, their sum.
        words: each with its own.
        generic: whether it is likely to be generic, said of many videos (:mod:`capvid.decoding.confidence`);
            None where the captioner was not calibrated.
        traces: where they were asked for, what the captioner looked at for each word and, last, for the end,
            by name, each (L + 1, W): ``attention`` over the frames (W = T), and what else the captioner has.
        sentences: how many the text has.
    """

    text: str
    logprob: float
    words: tuple[WordScore, ...]
    generic: bool | None = None
    traces: Mapping[str, np.ndarray] | None = None
    sentences: int = 1

    @property
    def mean_logprob(self) -> float:
        """Per word, where the end of a sentence counts as one."""
        return self.logprob / (len(self.words) + self.sentences)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a video with its captions, best first; the whole video where no segments were asked for.

    Attributes:
        start: in seconds.
        end: in seconds; None where it is not known how long the video is.
        captions: best first.
        frames: the frames that the captioner looked at, as indices (T,) into the result's ``times``.
        memory_change: of captioners that carry memory to the next segment, by how much this one changed it:
            the length of the difference through that of the memory before, for each layer.
    """

    start: float
    end: float | None
    captions: tuple[Caption, ...]
    frames: np.ndarray
    memory_change: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CaptionResult:
    """What became of one input: captions, or the error.

    Attributes:
        path: of the input.
        status: ``ok`` or ``error``.
        captions: best first; of a video in segments one, their best captions as one text.
        error: why there are none.
        model: that wrote them, ``name@revision``.
        lost: how many of its frames could not be decoded.
        duration: of the video in seconds, if it is known.
        segments: each with its captions; one, the whole video, where no segments were asked for.
        paragraph: whether segments were asked for.
        times: of the sampled frames in seconds, if they are known.
        pictures: of the sampled frames, small and as JPEG files, where they were asked for.
    """

    path: VideoPath
    status: str
    captions: tuple[Caption, ...]
    error: CapvidError | None
    model: str
    lost: int = 0
    duration: float | None = None
    segments: tuple[Segment, ...] = ()
    paragraph: bool = False
    times: np.ndarray | None = None
    pictures: tuple[bytes, ...] = ()

    def failed(self, error: CapvidError) -> CaptionResult:
        """Return the result of the same input with an error instead of captions."""
        return CaptionResult(
            path=self.path, status="error", captions=(), error=error, model=self.model, lost=self.lost
        )
