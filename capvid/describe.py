"""From the features of videos, or of their segments, to captions by one captioner.

Notation for array shapes: T frames, D width of the features, L locations of a feature map.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from capvid.captioners.base import Carried, ParagraphCaptioner
from capvid.captioners.checkpoint import Checkpoint
from capvid.decoding import DecodingOptions, Hypothesis, decode, decode_paragraphs, pad_frames, pad_segments
from capvid.decoding.confidence import Calibration, average_logprob
from capvid.decoding.constraints import check_repetition
from capvid.decoding.follow import follow
from capvid.decoding.paragraphs import as_tokens
from capvid.decoding.specificity import check_specificity
from capvid.results import Caption, WordScore

_SENTENCES = 4096  # of which it is remembered how probable they are of the average video


@dataclass(frozen=True, kw_only=True)
class Described:
    """Captions of one segment, best first, and by how much it changed the memory of each layer."""

    captions: tuple[Caption, ...]
    memory_change: tuple[float, ...] = ()


class Describer:
    """Writes captions of features; none depends on what is captioned together with it.

    Args:
        checkpoint: the captioner with its vocabulary.
        device: where it computes.
        options: of the decoding; with ``trace``, captions have traces.
        batch_size: segments captioned together at most.

    Raises:
        UsageError: a specificity that the captioner cannot rank by, or words that it cannot tell.
        CheckpointError: its calibration is damaged.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, device: torch.device, options: DecodingOptions, batch_size: int
    ) -> None:
        check_specificity(checkpoint.captioner, options)
        check_repetition(checkpoint.captioner, options)
        self.checkpoint = checkpoint
        self.device = device
        self.options = options
        self.batch_size = batch_size
        self._captioner = checkpoint.captioner.to(device).eval()
        self._calibration = Calibration.of(checkpoint.info)
        self._by_average = lru_cache(maxsize=_SENTENCES)(self._average_logprob)

    def frames(self, count: int) -> np.ndarray:
        """Which of so many frames the captioner looks at, as indices (T,)."""
        return self.checkpoint.frames(torch.arange(count)).numpy()

    @torch.inference_mode()
    def describe(self, videos: Sequence[Sequence[np.ndarray]]) -> list[list[Described]]:
        """Caption each segment of each video by its features (T, D), or maps (T, L, D)."""
        clips = [[torch.from_numpy(segment) for segment in video] for video in videos]
        captioner = self._captioner
        if isinstance(captioner, ParagraphCaptioner) and captioner.recurrent:
            return [
                self._told(captioner, clip, found)
                for clip, found in zip(clips, self._paragraphs(captioner, clips), strict=True)
            ]
        found = iter(self._sentences([segment for video in clips for segment in video]))
        return [
            [Described(captions=self._captions(segment, next(found))) for segment in video] for video in clips
        ]

    def _sentences(self, segments: Sequence[Tensor]) -> Iterator[list[Hypothesis]]:
        """Hypotheses for each segment (T, D) by itself."""
        for start in range(0, len(segments), self.batch_size):
            features, mask = pad_frames(segments[start : start + self.batch_size])  # (B, T, D), (B, T)
            yield from decode(
                self._captioner, features.to(self.device), mask.to(self.device), self._searching
            )

    def _paragraphs(
        self, captioner: ParagraphCaptioner, clips: Sequence[Sequence[Tensor]]
    ) -> list[list[list[Hypothesis]]]:
        """Hypotheses for each segment of each video, knowing the segments before."""
        features, mask, counts = pad_segments(clips)  # (B, S, T, D), (B, S, T), (B,)
        return decode_paragraphs(
            captioner, features.to(self.device), mask.to(self.device), counts, self._searching
        )

    @property
    def _searching(self) -> DecodingOptions:
        """Options of the search, which keeps no traces: those handed out are computed afterwards."""
        return replace(self.options, trace=False)

    def _told(
        self, captioner: ParagraphCaptioner, clips: Sequence[Tensor], found: Sequence[list[Hypothesis]]
    ) -> list[Described]:
        """The sentences ``found`` for the segments of one video, and what the segments left."""
        told = []
        carried: Carried | None = None
        for segment, hypotheses in zip(clips, found, strict=True):
            captions = self._captions(segment, hypotheses, carried)
            state = captioner.encode(*self._single(segment), carried)
            carried = captioner.remember(state, as_tokens([hypotheses[0].tokens], self.device))
            change = captioner.memory_change(state, carried)
            told.append(Described(captions=captions, memory_change=tuple(change.tolist())))
        return told

    def _single(self, segment: Tensor) -> tuple[Tensor, Tensor]:
        """Features (1, T, D) and mask (1, T) of one segment."""
        features, mask = pad_frames([segment])
        return features.to(self.device), mask.to(self.device)

    def _captions(
        self, segment: Tensor, hypotheses: Sequence[Hypothesis], carried: Carried | None = None
    ) -> tuple[Caption, ...]:
        """The captions of one segment (T, D)."""
        features, mask = self._single(segment)
        trace = self.options.trace
        found = follow(self._captioner, features, mask, hypotheses, carried=carried, trace=trace)
        return tuple(map(self._caption, found))

    def _caption(self, hypothesis: Hypothesis) -> Caption:
        text, words = self.checkpoint.vocabulary.sentence(hypothesis.tokens)
        scores = [
            WordScore(word=word, logprob=sum(hypothesis.logprobs[place] for place in places))
            for word, places in words
        ]
        trace = hypothesis.trace
        rows = [places for _, places in words] + [[len(hypothesis.tokens)]]  # and that of the end
        return Caption(
            text=text,
            logprob=hypothesis.logprob,
            words=tuple(scores),
            generic=self._is_generic(hypothesis),
            traces=None
            if trace is None
            else {
                name: torch.stack([tensor[places].float().mean(0) for places in rows]).numpy()
                for name, tensor in trace.items()
            },
        )

    def _is_generic(self, hypothesis: Hypothesis) -> bool | None:
        """Whether a caption is likely generic, if the captioner was calibrated."""
        if self._calibration is None:
            return None
        return self._calibration.flags(hypothesis.logprob - self._by_average(tuple(hypothesis.tokens)))

    def _average_logprob(self, tokens: tuple[int, ...]) -> float:
        """Log-probability of a sentence, were the video the average one."""
        assert self._calibration is not None
        return average_logprob(self._captioner, self._calibration.average, tokens)


def paragraph(captions: Sequence[Caption]) -> Caption:
    """One text of the captions of a video's segments, a sentence each."""
    sentences = (caption.text for caption in captions if caption.text)
    return Caption(
        text=" ".join(f"{text[0].upper()}{text[1:]}." for text in sentences),
        logprob=sum(caption.logprob for caption in captions),
        words=tuple(word for caption in captions for word in caption.words),
        sentences=len(captions),
    )
