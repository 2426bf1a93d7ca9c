"""From the features of videos, or of their segments, to captions by one captioner.

Notation for array shapes: T frames, D width of the features, L locations of a feature map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from capvid.captioners.base import Carried, ParagraphCaptioner
from capvid.captioners.checkpoint import Checkpoint
from capvid.decoding import DecodingOptions, Hypothesis, decode, decode_paragraphs, pad_frames, pad_segments
from capvid.decoding.confidence import Calibration, logprobs_of_average
from capvid.decoding.constraints import check_repetition
from capvid.decoding.follow import follow, in_double
from capvid.decoding.paragraphs import as_tokens
from capvid.decoding.specificity import check_specificity
from capvid.errors import RunError
from capvid.results import Caption, WordScore

_SENTENCES = 4096  # of which it is remembered how probable they are of the average video
_TOGETHER = 64  # segments whose captions are followed together
_MAPS_TOGETHER = 8  # the same of feature maps

_Thing = TypeVar("_Thing")
_Video = tuple[Sequence[Tensor], Sequence[Sequence[Hypothesis]]]  # features and hypotheses of its segments


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
        precise = in_double(self._captioner, device)
        # Without double precision, captions are followed one by one, so that none depends on others.
        together = _MAPS_TOGETHER if self._captioner.config.locations else _TOGETHER
        self._precise, self._together = (precise, together) if precise else (self._captioner, 1)
        self._by_average: dict[tuple[int, ...], float] = {}

    def frames(self, count: int) -> np.ndarray:
        """Which of so many frames the captioner looks at, as indices (T,)."""
        return self.checkpoint.frames(torch.arange(count)).numpy()

    @torch.inference_mode()
    def describe(self, videos: Sequence[Sequence[np.ndarray]]) -> list[list[Described]]:
        """Caption each segment of each video by its features (T, D), or maps (T, L, D).

        Raises:
            RunError: there is too little device memory.
        """
        if not videos:  # a batch of inputs that all failed
            return []
        try:
            return self._describe(videos)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"{self.device} has not the memory to caption {len(videos)} videos at once",
                remedy="use a smaller --batch-size",
            ) from error

    def _describe(self, videos: Sequence[Sequence[np.ndarray]]) -> list[list[Described]]:
        clips = [[torch.from_numpy(segment) for segment in video] for video in videos]
        captioner, precise = self._captioner, self._precise
        if isinstance(captioner, ParagraphCaptioner) and captioner.recurrent:
            assert isinstance(precise, ParagraphCaptioner)
            paragraphs = list(zip(clips, self._paragraphs(captioner, clips), strict=True))
            return [
                told for some in _batched(paragraphs, self._together) for told in self._told(precise, some)
            ]
        segments = [segment for video in clips for segment in video]
        found = zip(segments, self._sentences(segments), strict=True)
        captions = iter([c for some in _batched(found, self._together) for c in self._captions_of(some)])
        return [[Described(captions=next(captions)) for _ in video] for video in clips]

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

    def _told(self, captioner: ParagraphCaptioner, videos: Sequence[_Video]) -> list[list[Described]]:
        """The sentences that were found for the segments of each video, and what the segments left."""
        told: list[list[Described]] = [[] for _ in videos]
        rows, carried = list(range(len(videos))), None
        for place in range(max(len(clips) for clips, _ in videos)):
            going = [at for at, row in enumerate(rows) if place < len(videos[row][0])]
            if carried is not None and len(going) < len(rows):
                on = torch.tensor(going, device=self.device)
                carried = {name: tensor.index_select(0, on) for name, tensor in carried.items()}
            rows = [rows[at] for at in going]
            features, mask = self._padded([videos[row][0][place] for row in rows])
            found = [videos[row][1][place] for row in rows]
            captions = self._captions(features, mask, found, carried)
            state = captioner.encode(features, mask, carried)
            best = as_tokens([hypotheses[0].tokens for hypotheses in found], self.device)
            carried = captioner.remember(state, best)
            changes = captioner.memory_change(state, carried).float().tolist()
            for row, said, change in zip(rows, captions, changes, strict=True):
                told[row].append(Described(captions=said, memory_change=tuple(change)))
        return told

    def _padded(self, segments: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Features (B, T, D) of segments (T, D), as precise as what is handed out, and mask (B, T)."""
        features, mask = pad_frames(segments)
        return features.to(self.device, next(self._precise.parameters()).dtype), mask.to(self.device)

    def _captions_of(self, found: Sequence[tuple[Tensor, list[Hypothesis]]]) -> list[tuple[Caption, ...]]:
        """The captions of segments (T, D) by what was found for each."""
        segments, hypotheses = zip(*found, strict=True)
        return self._captions(*self._padded(segments), hypotheses)

    def _captions(
        self,
        features: Tensor,
        mask: Tensor,
        found: Sequence[Sequence[Hypothesis]],
        carried: Carried | None = None,
    ) -> list[tuple[Caption, ...]]:
        """The captions of segments (B, T, D), real by ``mask`` (B, T), by what was found for each."""
        followed = follow(self._precise, features, mask, found, carried=carried, trace=self.options.trace)
        self._ask_average([hypothesis for each in followed for hypothesis in each])
        return [tuple(map(self._caption, each)) for each in followed]

    def _caption(self, hypothesis: Hypothesis) -> Caption:
        text, words = self.checkpoint.vocabulary.sentence(hypothesis.tokens)
        logprobs: list[float] = np.asarray(hypothesis.logprobs, dtype=np.float32).tolist()
        scores = [
            WordScore(word=word, logprob=sum(logprobs[place] for place in places)) for word, places in words
        ]
        trace = hypothesis.trace
        rows = [places for _, places in words] + [[len(hypothesis.tokens)]]  # and that of the end
        return Caption(
            text=text,
            logprob=sum(logprobs),
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
        return self._calibration.flags(hypothesis.logprob - self._by_average[tuple(hypothesis.tokens)])

    def _ask_average(self, found: Sequence[Hypothesis]) -> None:
        """Find out how probable the sentences were if the video were the average one, if that is wanted."""
        if self._calibration is None:
            return
        if len(self._by_average) > _SENTENCES:
            self._by_average.clear()
        new = list(dict.fromkeys(tuple(h.tokens) for h in found if tuple(h.tokens) not in self._by_average))
        for some in _batched(new, self._together):
            logprobs = logprobs_of_average(self._precise, self._calibration.average, some)
            self._by_average.update(zip(some, logprobs, strict=True))


def _batched(things: Iterable[_Thing], size: int) -> Iterator[list[_Thing]]:
    """Things in lists of ``size``, the last of what is left."""
    rest = iter(things)
    while batch := list(islice(rest, size)):
        yield batch


def paragraph(captions: Sequence[Caption]) -> Caption:
    """One text of the captions of a video's segments, a sentence each."""
    sentences = (caption.text for caption in captions if caption.text)
    return Caption(
        text=" ".join(f"{text[0].upper()}{text[1:]}." for text in sentences),
        logprob=sum(caption.logprob for caption in captions),
        words=tuple(word for caption in captions for word in caption.words),
        sentences=len(captions),
    )
