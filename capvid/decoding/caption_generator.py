"""Caption generators: from decoded videos to captions, the stages of a pipeline after decoding.

Array shapes: B videos or segments, T frames, D feature width, L locations of a feature map, or words of a
sentence, W width of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from capvid.captioners.base import Carried, ParagraphCaptioner
from capvid.captioners.checkpoint import Checkpoint, limited
from capvid.captioners.layers import pad_frames, pad_segments
from capvid.decoding.beam_search import as_tokens, check_repetition, decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.decoding.rescoring import Calibration, average_logprobs, check_specificity, in_double, rescore
from capvid.errors import FeatureMismatchError, RunError
from capvid.features.extraction import ExtractionResult, compute_features, views_of
from capvid.features.feature_file import FeatureHeader, Features

if TYPE_CHECKING:
    from capvid.backbones.backbone import Backbone
    from capvid.features.prefetch import Video, View
    from capvid.video.frame_sampling import Sampling

FRAMES_PER_VIDEO = 4  # frames per video of a batch that the backbones process together
FILES_PER_VIDEO = 8  # feature files captioned in the place of one video; feature maps are too large for that
RESCORED_TOGETHER = 64  # segments rescored in one batch
MAPS_RESCORED_TOGETHER = 8  # the same for feature maps
LOW_CONFIDENCE = 0.2  # confidence of captions that are flagged
CACHED_SENTENCES = 4096  # sentences whose probability given the average video is cached


@dataclass(frozen=True, kw_only=True)
class WordScore:
    """One word of a caption, and its log-probability given the words before it."""

    word: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Caption:
    """One sentence, or the sentences of all segments of a video joined into one text.

    Attributes:
        text: the caption.
        logprob: log-probability of the sentence including its end; the sum of several.
        words: the words with their log-probabilities.
        confidence: probability that the caption is right (:mod:`capvid.decoding.rescoring`); None if the
            captioner is not calibrated.
        traces: model internals per word and, last, for the end of the sentence, each (L + 1, W), if
            requested: ``attention`` over the frames (W = T), and others by captioner.
        sentences: number of sentences in the text.
        clip_score: CLIPScore of the text and the frames, if requested.
    """

    text: str
    logprob: float
    words: tuple[WordScore, ...]
    confidence: float | None = None
    traces: Mapping[str, np.ndarray] | None = None
    sentences: int = 1
    clip_score: float | None = None

    @property
    def low_confidence(self) -> bool:
        """Whether the confidence is below 0.2: such captions are flagged."""
        return self.confidence is not None and self.confidence < LOW_CONFIDENCE

    @property
    def mean_logprob(self) -> float:
        """Log-probability per word; the end of a sentence counts as a word."""
        return self.logprob / (len(self.words) + self.sentences)


# captions of a segment, best first, and how much it changed the memory of each layer
Described = tuple[tuple[Caption, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A segment of a video, or the complete video, as the captioner sees it.

    Attributes:
        frames: features (T, D), feature maps (T, L, D), or RGB frames (T, h, w, 3) uint8.
        times: presentation times (T,) in seconds; None if unknown.
        start: start in seconds.
        end: end in seconds; None if unknown.
        embeddings: embeddings (T, D) of the frames by an image-text encoder, if requested.
    """

    frames: np.ndarray
    times: np.ndarray | None
    start: float
    end: float | None
    embeddings: np.ndarray | None = None


class CaptionGenerator(Protocol):
    """Captions videos; no caption depends on what is captioned together with it.

    Attributes:
        device: where it computes.
        batch_size: maximum number of videos captioned together.
        files_per_video: number of feature files that are captioned in the place of one video.
        prefetched_frames: number of frames to decode in advance.
        max_frames: maximum number of frames of a video or segment; None for its own.
    """

    device: torch.device
    batch_size: int
    files_per_video: int
    prefetched_frames: int
    max_frames: int | None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything besides the model that a caption depends on."""

    @property
    def views(self) -> tuple[View, ...]:
        """What it sees of a video."""

    def features_of(self, videos: Iterable[Video], sampling: Sampling) -> Iterator[ExtractionResult]:
        """Yield what it captions of each decoded video, in order."""

    def accept(self, header: FeatureHeader) -> None:
        """Accept features with this header; raise FeatureMismatchError if it cannot caption them."""

    def frames(self, count: int) -> np.ndarray:
        """Return the indices (T,) of the frames that it looks at, of ``count``."""

    def describe(self, videos: Sequence[Sequence[Clip]]) -> Sequence[list[Described] | Exception]:
        """Caption each segment of each video; a video that fails alone gives its error."""

    def caption_features(self, videos: Sequence[Features | np.ndarray]) -> list[tuple[Caption, ...]]:
        """Caption features together; raise FeatureMismatchError if it cannot."""

    def on(self, device: torch.device | str) -> CaptionGenerator:
        """Return the same on another device; it takes the networks with it."""


@dataclass(eq=False, repr=False)
class FeatureCaptionGenerator:
    """Captions features of backbones with a trained captioner.

    Args:
        checkpoint: the captioner, its vocabulary and the header of its training features.
        backbones: the backbones that compute such features, or a function that loads them when needed.
        device: where the captioner computes.
        options: decoding options.
        batch_size: maximum number of videos captioned together.
        attention: whether captions carry attention traces.
        max_frames: maximum number of frames of a video or segment; None takes that of training.

    Raises:
        UsageError: the captioner cannot rank by specificity or cannot tell which words repeat.
        CheckpointError: its calibration is damaged.
    """

    checkpoint: Checkpoint
    backbones: Sequence[Backbone] | Callable[[], Sequence[Backbone]]
    _: KW_ONLY
    device: torch.device
    options: DecodingOptions
    batch_size: int = 8
    attention: bool = False
    max_frames: int | None = None

    def __post_init__(self) -> None:
        check_specificity(self.checkpoint.captioner, self.options)
        check_repetition(self.checkpoint.captioner, self.options)
        self._captioner = self.checkpoint.captioner.to(self.device).eval()
        maps = self._captioner.config.locations
        self.files_per_video = 1 if maps else FILES_PER_VIDEO
        self.prefetched_frames = FRAMES_PER_VIDEO * self.batch_size  # which the backbones process together
        self._calibration = Calibration.of(self.checkpoint.info)
        precise = in_double(self._captioner, self.device)
        # Without double precision, captions are rescored one by one, so that none depends on the others.
        together = MAPS_RESCORED_TOGETHER if maps else RESCORED_TOGETHER
        self._precise, self._together = (precise, together) if precise else (self._captioner, 1)
        self._average_logprobs: dict[tuple[int, ...], float] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with loaded backbones, without the copy in double precision."""
        arguments = {each.name: getattr(self, each.name) for each in fields(self)}
        arguments["backbones"] = tuple(self.loaded_backbones)
        return partial(FeatureCaptionGenerator, **arguments), ()

    def on(self, device: torch.device | str) -> FeatureCaptionGenerator:
        """Return the same on another device; it takes the networks with it."""
        moved = [backbone.on(device) for backbone in self.loaded_backbones]
        return replace(self, backbones=moved, device=torch.device(device))

    @cached_property
    def loaded_backbones(self) -> Sequence[Backbone]:
        """The backbones, loaded on first use: feature files need none."""
        return self.backbones() if callable(self.backbones) else self.backbones

    @property
    def views(self) -> tuple[View, ...]:
        """What the backbones see of a video."""
        return tuple(views_of(self.loaded_backbones))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything besides the model that a caption depends on."""
        frames = {} if self.max_frames is None else {"max_frames": self.max_frames}
        return {**asdict(self.options), **frames}

    def features_of(self, videos: Iterable[Video], sampling: Sampling) -> Iterator[ExtractionResult]:
        """Yield features of decoded videos in order."""
        dtype = "float32" if self.checkpoint.sees else "float16"  # GIT's features are never stored in a file
        frames = self.prefetched_frames
        return compute_features(videos, self.loaded_backbones, sampling, batch_size=frames, dtype=dtype)

    def accept(self, header: FeatureHeader) -> None:
        """Accept features with this header.

        Raises:
            FeatureMismatchError: it differs from that of training; the message names each field.
        """
        try:
            self.checkpoint.header.require_match(header)
        except FeatureMismatchError as error:
            if not self.checkpoint.sees:
                raise
            problem = f"{self.checkpoint.name} takes videos, which it sees itself, not features"
            raise FeatureMismatchError(problem, remedy="give the video") from error

    def frames(self, count: int) -> np.ndarray:
        """Return the indices (T,) of the frames that the captioner looks at, of ``count``."""
        indices = torch.arange(count)
        return self.checkpoint.frames(limited(indices, self.max_frames or count, "spread")).numpy()

    def caption_features(self, videos: Sequence[Features | np.ndarray]) -> list[tuple[Caption, ...]]:
        """Caption features of videos together; return each one's captions, best first.

        Args:
            videos: :class:`~capvid.features.feature_file.Features`, or arrays (T, D), or (T, L, D) of maps.

        Raises:
            FeatureMismatchError: they are not what the captioner was trained on.
        """
        header = self.checkpoint.header
        inner = (header.locations, header.width) if header.locations else (header.width,)
        clips = []
        for video in videos:
            if isinstance(video, Features):
                self.accept(video.header)
                video = video.concatenated()
            if video.shape[1:] != inner or not len(video):
                expected = ", ".join(("T", *map(str, inner)))
                raise FeatureMismatchError(
                    f"features of the shape {video.shape}, and the captioner was trained on ({expected})",
                    remedy="extract them with the captioner's backbone and layer",
                )
            array = np.ascontiguousarray(video, dtype=np.float32)
            array = array[self.frames(len(array))]
            clips.append([Clip(frames=array, times=None, start=0.0, end=None)])
        return [segments[0][0] for segments in self.describe(clips)]

    @torch.inference_mode()
    def describe(self, videos: Sequence[Sequence[Clip]]) -> list[list[Described]]:
        """Caption each segment of each video by its features.

        Raises:
            RunError: the device runs out of memory.
        """
        if not videos:  # a batch of inputs that all failed
            return []
        clips = [[torch.from_numpy(clip.frames) for clip in video] for video in videos]
        captioner = self._captioner
        try:
            if isinstance(captioner, ParagraphCaptioner) and captioner.recurrent:
                return self._describe_paragraphs(captioner, clips)
            segments = [segment for video in clips for segment in video]
            together = self.files_per_video * self.batch_size
            hypotheses: list[list[Hypothesis]] = []
            for start in range(0, len(segments), together):
                features, mask = pad_frames(segments[start : start + together])  # (B, T, D), (B, T)
                hypotheses += decode(captioner, features.to(self.device), mask.to(self.device), self.options)
            captions: list[tuple[Caption, ...]] = []
            for start in range(0, len(segments), self._together):
                batch = slice(start, start + self._together)
                captions += self._rescore(*self._pad(segments[batch]), hypotheses[batch])
        except torch.OutOfMemoryError as error:
            count, remedy = f"{len(videos)} videos at once", "use a smaller --batch-size"
            if len(videos) == 1:
                count, remedy = "one video", "use fewer --max-frames, or --device cpu"
            raise RunError(
                f"{self.device} has too little memory to caption {count}", remedy=remedy
            ) from error
        described = iter(captions)
        return [[(next(described), ()) for _ in video] for video in clips]

    def _describe_paragraphs(
        self, captioner: ParagraphCaptioner, clips: Sequence[Sequence[Tensor]]
    ) -> list[list[Described]]:
        """Decode segments with the memory of the ones before, then rescore them in the same order."""
        features, mask, counts = pad_segments(clips)  # (B, S, T, D), (B, S, T), (B,)
        hypotheses = decode_paragraphs(
            captioner, features.to(self.device), mask.to(self.device), counts, self.options
        )
        described: list[list[Described]] = []
        for start in range(0, len(clips), self._together):
            batch = slice(start, start + self._together)
            described += self._rescore_paragraphs(clips[batch], hypotheses[batch])
        return described

    def _rescore_paragraphs(
        self, clips: Sequence[Sequence[Tensor]], hypotheses: Sequence[Sequence[list[Hypothesis]]]
    ) -> list[list[Described]]:
        captioner = self._precise
        assert isinstance(captioner, ParagraphCaptioner)
        described: list[list[Described]] = [[] for _ in clips]
        rows, carried = list(range(len(clips))), None
        for step in range(max(map(len, clips))):
            going = [at for at, row in enumerate(rows) if step < len(clips[row])]
            if carried is not None and len(going) < len(rows):
                index = torch.tensor(going, device=self.device)
                carried = {name: tensor.index_select(0, index) for name, tensor in carried.items()}
            rows = [rows[at] for at in going]
            features, mask = self._pad([clips[row][step] for row in rows])
            sentences = [hypotheses[row][step] for row in rows]
            captions = self._rescore(features, mask, sentences, carried)
            state = captioner.encode(features, mask, carried)
            best = as_tokens([sentence[0].tokens for sentence in sentences], self.device)
            carried = captioner.remember(state, best)
            changes = captioner.memory_change(state, carried).float().tolist()
            for row, caption, change in zip(rows, captions, changes, strict=True):
                described[row].append((caption, tuple(change)))
        return described

    def _pad(self, segments: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Pad segments (T, D) to features (B, T, D) in the precision of rescoring, and their mask (B, T)."""
        features, mask = pad_frames(segments)
        return features.to(self.device, next(self._precise.parameters()).dtype), mask.to(self.device)

    def _rescore(
        self,
        features: Tensor,
        mask: Tensor,
        hypotheses: Sequence[Sequence[Hypothesis]],
        carried: Carried | None = None,
    ) -> list[tuple[Caption, ...]]:
        """Turn the hypotheses of segments (B, T, D) into captions with exact log-probabilities."""
        rescored = rescore(self._precise, features, mask, hypotheses, carried=carried, trace=self.attention)
        if self._calibration is not None:
            if len(self._average_logprobs) > CACHED_SENTENCES:
                self._average_logprobs.clear()
            sentences = {tuple(each.tokens): None for group in rescored for each in group}
            new = [tokens for tokens in sentences if tokens not in self._average_logprobs]
            for start in range(0, len(new), self._together):
                batch = new[start : start + self._together]
                logprobs = average_logprobs(self._precise, self._calibration.average, batch)
                self._average_logprobs.update(zip(batch, logprobs, strict=True))
        return [tuple(map(self._caption, group)) for group in rescored]

    def _caption(self, hypothesis: Hypothesis) -> Caption:
        text, words = self.checkpoint.vocabulary.sentence(hypothesis.tokens)
        logprobs: list[float] = np.asarray(hypothesis.logprobs, dtype=np.float32).tolist()
        traces, confidence = None, None
        if hypothesis.trace is not None:
            rows = [tokens for _, tokens in words] + [[len(hypothesis.tokens)]]  # the last for the end
            traces = {
                name: torch.stack([tensor[tokens].float().mean(0) for tokens in rows]).numpy()
                for name, tensor in hypothesis.trace.items()
            }
        if self._calibration is not None:
            average = self._average_logprobs[tuple(hypothesis.tokens)]
            confidence = self._calibration.confidence(hypothesis, average)
        return Caption(
            text=text,
            logprob=sum(logprobs),
            words=tuple([WordScore(word=word, logprob=sum([logprobs[n] for n in at])) for word, at in words]),
            confidence=confidence,
            traces=traces,
        )
