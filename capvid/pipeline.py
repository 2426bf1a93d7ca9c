"""Video in, captions out: ``load()`` and the pipeline from inputs to results.

Inputs are prefetched and decoded by worker processes, backbones compute their features, the captioner
decodes captions for batches of videos or segments, and these are rescored in double precision.

Array shapes: B videos or segments, T frames, D feature width, L locations of a feature map.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from capvid.captioners.base import Carried, ParagraphCaptioner
from capvid.captioners.checkpoint import Checkpoint
from capvid.captioners.layers import pad_frames, pad_segments
from capvid.checkpoints.lookup import find_captioner, load_captioner
from capvid.decoding.beam_search import as_tokens, check_repetition, decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.decoding.rescoring import Calibration, average_logprobs, check_specificity, in_double, rescore
from capvid.errors import (
    CapvidError,
    CheckpointError,
    DataError,
    FeatureMismatchError,
    RunError,
    UsageError,
    input_error,
)
from capvid.features.extraction import TIMEOUT, ExtractionResult, compute_features, views_of
from capvid.features.feature_file import Features, load_features
from capvid.features.prefetch import DecodeStage, Video, decode_video, fetched, holds_features
from capvid.output.results import Caption, CaptionResult, Segment, WordScore
from capvid.utils.device import resolve_device
from capvid.utils.storage import VideoPath, parse_path
from capvid.utils.validation import limits
from capvid.video.frame_sampling import ChosenTimes, Sampling, UniformSampling, parse_sampling
from capvid.video.frame_source import ArraySource
from capvid.video.worker_pool import WorkerPool

if TYPE_CHECKING:
    from typing_extensions import Self

    from capvid.backbones.backbone import Backbone
    from capvid.video.segmentation import Segmentation

DEFAULT_FRAMES = 28
TRAINED_OPTIONS = (
    "length_penalty",
    "specificity",
    "no_repeat_words",
)  # decoding options stored in checkpoints
FRAMES_PER_VIDEO = 4  # frames per video of a batch that the backbones process together
FILES_PER_VIDEO = 8  # feature files captioned in the place of one video; feature maps are too large for that
RESCORED_TOGETHER = 64  # segments rescored in one batch
MAPS_RESCORED_TOGETHER = 8  # the same for feature maps
CACHED_SENTENCES = 4096  # sentences whose probability given the average video is cached

Span = tuple[float, float | None]


def load(
    model: str | Path | None = None,
    *,
    device: str = "auto",
    weights: str | Path | None = None,
    batch_size: int = 8,
    workers: int = 2,
    timeout: float | None = TIMEOUT,
    reader: str = "auto",
    segments: str | int | Path | None = None,
    attention: bool = False,
    thumbnails: bool = False,
    **decoding: Any,
) -> CaptionPipeline:
    """Load a trained captioner with the backbones it needs.

    Args:
        model: name of a bundled captioner, folder of a trained one, or ``OWNER/NAME[@REVISION]`` on the
            Hugging Face Hub (also a GIT as transformers publishes it); None loads the default captioner.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        weights: file or folder of the backbone's weights; by default they are looked up in ``model/weights``,
            the folders in ``CAPVID_WEIGHTS`` and the cache.
        batch_size: videos captioned together; captions do not depend on it.
        workers: processes that decode videos.
        timeout: seconds before a file, or a part of a long one, is abandoned; None disables the limit.
        reader: video reader: ``auto``, ``pyav`` or ``decord``.
        segments: one sentence per segment: ``auto``, their number, or a file with their times; None captions
            whole videos, except for paragraph captioners, which use ``auto``.
        attention: whether captions carry attention traces.
        thumbnails: whether results carry thumbnails of the sampled frames.
        decoding: see :class:`~capvid.decoding.decoding_options.DecodingOptions` such as ``beam_size``; None
            stands for the value the captioner was trained with.

    Raises:
        CheckpointError: the captioner does not exist or is damaged.
        HubError: it cannot be downloaded.
        UsageError: an argument cannot be used.
        DataError: the file of segments is not understood.

    Example:
        >>> captioner = capvid.load("m3")
        >>> captioner("video.mp4")
        'a man is playing a guitar'
    """
    chosen = {name: value for name, value in decoding.items() if value is not None}
    options = DecodingOptions.from_dict(chosen)
    segmentation = None if segments is None else _parse_segments(segments)
    folder, published = find_captioner(model)
    torch_device = resolve_device(device)
    checkpoint, backbones, label = load_captioner(folder, published, weights=weights, device=torch_device)

    max_words = int(checkpoint.info.get("max_words", options.max_length))
    if options.max_length > max_words:
        raise UsageError(f"{label}: its captions have {max_words} words at most", remedy="ask for no more")
    trained = checkpoint.info.get("decoding", {})
    try:
        stored = {name: trained[name] for name in TRAINED_OPTIONS if name in trained.keys() - chosen.keys()}
        DecodingOptions(**stored)
    except (AttributeError, UsageError) as error:
        raise CheckpointError(
            f"{label}: its decoding options are damaged", remedy="train it again or copy it anew"
        ) from error
    if segmentation is None and checkpoint.captioner.paragraphs:
        segmentation = _parse_segments("auto")
    try:
        spec = checkpoint.header.sampling
        max_frames = int(checkpoint.info.get("max_frames", DEFAULT_FRAMES))
        sampling = parse_sampling(spec) if spec else UniformSampling(max_frames)
    except UsageError as error:
        raise CheckpointError(
            f"{label}: captioner.json: features.sampling: {error.message}",
            remedy="train it again or copy it anew",
        ) from error
    return CaptionPipeline(
        checkpoint,
        backbones,
        device=torch_device,
        sampling=sampling,
        options=replace(options, **stored),
        batch_size=batch_size,
        workers=workers,
        timeout=timeout,
        reader=reader,
        segments=segmentation,
        attention=attention,
        thumbnails=thumbnails,
        model=label,
    )


def _parse_segments(segments: str | int | Path) -> Segmentation:
    from capvid.video.segmentation import parse_segments  # not needed for whole videos

    return parse_segments(str(segments))


@dataclass(eq=False, repr=False)
class CaptionPipeline:
    """A trained captioner with its backbones; captions videos, frames and feature files.

    Worker processes start with the first video and are kept until :meth:`close`, the end of a ``with`` block,
    or garbage collection.

    Args:
        checkpoint: the captioner, its vocabulary and the header of its training features.
        backbones: the backbones that compute such features, or a function that loads them when needed.
        device: where the captioner computes.
        sampling: which frames to sample.
        options: decoding options.
        batch_size: videos captioned together; captions do not depend on it.
        workers: processes that decode videos.
        timeout: seconds before a file, or a part of a long one, is abandoned; None disables the limit.
        reader: name of the video reader.
        segments: segmentation of videos, one sentence each; None captions whole videos.
        attention: whether captions carry attention traces.
        thumbnails: whether results carry thumbnails of the sampled frames.
        model: name and revision for results; by default the checkpoint's name.
    """

    checkpoint: Checkpoint
    backbones: Sequence[Backbone] | Callable[[], Sequence[Backbone]]
    _: KW_ONLY
    device: torch.device | str
    sampling: Sampling
    options: DecodingOptions
    batch_size: int = 8
    workers: int = 2
    timeout: float | None = TIMEOUT
    reader: str = "auto"
    segments: Segmentation | None = None
    attention: bool = False
    thumbnails: bool = False
    model: str = ""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.workers < 1:
            raise UsageError("batch size and workers must be at least 1")
        self.device = torch.device(self.device)
        self.model = self.model or self.checkpoint.name
        maps = self.checkpoint.captioner.config.locations
        self._files_per_video = 1 if maps else FILES_PER_VIDEO
        self._capacity = self._files_per_video * self.batch_size  # feature files captioned together
        self._generator = CaptionGenerator(
            self.checkpoint,
            device=self.device,
            options=self.options,
            batch_size=self._capacity,
            trace=self.attention,
        )

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"CaptionPipeline({self.model!r}, device={str(self.device)!r}, {settings})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes; they start again with the next video."""
        if "_pool" in vars(self):
            self._pool.close()
            del self._pool

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the worker processes."""
        return _rebuild, (self._arguments(),)

    def on(self, device: torch.device | str) -> CaptionPipeline:
        """Return this pipeline on another device; it takes the networks with it."""
        moved = [backbone.on(device) for backbone in self.loaded_backbones]
        return _rebuild({**self._arguments(), "backbones": moved, "device": device})

    def _arguments(self) -> dict[str, Any]:
        arguments = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**arguments, "backbones": tuple(self.loaded_backbones)}

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything besides the model that a caption depends on."""
        segments = {} if self.segments is None else {"segments": self.segments.spec}
        return {"sampling": self.sampling.spec(), **segments, **self.options.to_dict()}

    @cached_property
    def loaded_backbones(self) -> Sequence[Backbone]:
        """The backbones, loaded on first use: feature files need none."""
        return self.backbones() if callable(self.backbones) else self.backbones

    @cached_property
    def _pool(self) -> WorkerPool:
        pool = WorkerPool(self.workers, timeout=self.timeout)
        weakref.finalize(self, pool.close)
        return pool

    @property
    def decoding(self) -> DecodeStage:
        """The first stage: decoding of videos into the crops that the backbones see."""
        return DecodeStage(
            views=tuple(views_of(self.loaded_backbones)),
            sampling=self.sampling,
            cut=self.segments,
            thumbnails=self.thumbnails,
            frames=FRAMES_PER_VIDEO * self.batch_size,
            reader=self.reader,
            stored=True,
        )

    def __call__(
        self, video: str | VideoPath | np.ndarray | Tensor, times: Sequence[float] | None = None
    ) -> str:
        """Return the best caption of one video, of frames in memory, or of a feature file.

        Args:
            video: path or address, or RGB frames (T, H, W, 3) uint8.
            times: presentation times (T,) of such frames in seconds, ascending; 25 per second by default.

        Raises:
            UsageError: ``video`` is neither a path nor such frames.
            CapvidError: it cannot be read, or is not what the captioner was trained on.
        """
        if isinstance(video, str | VideoPath):
            result = next(self.stream([video]))
        else:
            result = next(self.describe(self.features_of([self._decode_frames(video, times)])))
        if result.error is not None:
            raise result.error
        return result.captions[0].text

    def _decode_frames(self, frames: np.ndarray | Tensor, times: Sequence[float] | None) -> Video:
        """Crop frames in memory as a worker process crops those of a video."""
        source = ArraySource(frames, times)
        sampling = self.sampling
        if self.segments is not None:
            duration = source.info.duration
            chosen = self.segments.choose(source.info.path, source.frame_times(), duration, sampling)
            sampling = ChosenTimes(tuple(source.frame_times()[chosen].tolist()), sampling)
        decoded = decode_video(source, sampling, self.decoding.views, self.reader, self.thumbnails)
        return Video(path=source.info.path, name=source.info.path.name, decoded=decoded)

    def stream(self, inputs: Iterable[str | VideoPath]) -> Generator[CaptionResult, None, None]:
        """Caption videos and feature files (``.safetensors``), yielding results in order.

        Videos are decoded in the background while the captioner works. Inputs are consumed lazily, so there
        may be any number of them. An input that fails yields a result with its error.

        Raises:
            CapvidError: an error that concerns all inputs, such as missing weights of the backbone.
        """
        with closing(self._features(map(parse_path, inputs))) as features:
            yield from self.describe(features)

    def _features(self, paths: Iterator[VideoPath]) -> Generator[ExtractionResult, None, None]:
        """Yield the features of each input; backbones are loaded when the first video comes."""
        for path in paths:
            if not holds_features(path):
                with closing(self.decoding.videos(self._pool, chain([path], paths))) as videos:
                    yield from self.features_of(videos)
                return
            yield self._load_features(path)

    def features_of(self, videos: Iterable[Video]) -> Iterator[ExtractionResult]:
        """Yield features of decoded videos in order, the second stage; feature files are read."""
        dtype = "float32" if self.checkpoint.sees else "float16"  # GIT's features are never stored in a file
        frames = FRAMES_PER_VIDEO * self.batch_size
        computed = compute_features(
            videos, self.loaded_backbones, self.sampling, batch_size=frames, dtype=dtype
        )
        for result in computed:
            is_file = result.features is None and result.error is None
            yield self._load_features(result.path) if is_file else result

    def _load_features(self, path: VideoPath) -> ExtractionResult:
        try:
            with fetched(path, max_bytes=limits().feature_bytes, timeout=self.timeout) as file:
                return ExtractionResult(path=path, features=load_features(file), error=None)
        except Exception as cause:
            return ExtractionResult(path=path, features=None, error=input_error(path, cause))

    def describe(self, results: Iterable[ExtractionResult]) -> Iterator[CaptionResult]:
        """Yield captions of videos by their features in order, the last stage."""
        batch: list[_Clip | CaptionResult] = []
        room = self._capacity
        for result in results:
            batch.append(self._segment(result))
            room -= 1 if holds_features(result.path) else self._files_per_video
            if room <= 0:
                yield from self._caption_batch(batch)
                batch, room = [], self._capacity
        if batch:
            yield from self._caption_batch(batch)

    def _segment(self, result: ExtractionResult) -> _Clip | CaptionResult:
        """Check a video's features and cut them into segments; a failed input becomes its final result."""
        path, features = result.path, result.features
        if features is None:
            assert result.error is not None
            return self._failed(result, result.error)
        try:
            try:
                self.checkpoint.accept(features.header)
            except FeatureMismatchError as error:
                raise FeatureMismatchError(f"{path}: {error.message}", remedy=error.remedy) from error
            array, times, duration = features.concatenated(), features.times, features.seconds
            spans: Sequence[Span] = [(0.0, duration)]
            indices = [np.arange(len(array))]
            if self.segments is not None:
                from capvid.video.segmentation import frames_within

                if times is None or duration is None:
                    raise DataError(
                        f"{path}: segments need times, and these features have none",
                        remedy="give the video, or leave out --segments",
                    )
                bounds = self.segments.spans(path, array, times, duration)
                spans = list(bounds)
                indices = [frames_within(span, times, duration) for span in bounds]
            frames = [index[self._generator.frames(len(index))] for index in indices]
            return _Clip(result, spans=spans, frames=frames, segments=[array[index] for index in frames])
        except Exception as cause:
            return self._failed(result, input_error(path, cause))

    def _caption_batch(self, batch: Sequence[_Clip | CaptionResult]) -> Iterator[CaptionResult]:
        """Caption one batch; inputs that failed keep their place."""
        clips = [clip for clip in batch if isinstance(clip, _Clip)]
        captions = iter(self._generate(clips))
        for clip in batch:
            if isinstance(clip, CaptionResult):
                yield clip
                continue
            captioned = next(captions)
            try:
                if isinstance(captioned, Exception):
                    raise captioned
                yield self._result(clip, captioned)
            except Exception as cause:
                yield self._failed(clip.result, input_error(clip.result.path, cause))

    def _generate(self, clips: Sequence[_Clip]) -> Sequence[Sequence[Described] | Exception]:
        """Caption videos together, or one by one where that fails, so that only the one at fault has none."""
        try:
            return self._generator.describe([clip.segments for clip in clips])
        except RunError:
            raise
        except Exception as cause:
            return [cause] if len(clips) == 1 else [self._generate([clip])[0] for clip in clips]

    def _result(self, clip: _Clip, captioned: Sequence[Described]) -> CaptionResult:
        """Assemble the result of a video from the captions of its segments."""
        segments = [
            Segment(
                start=start,
                end=end,
                captions=segment.captions,
                frames=frames,
                memory_change=segment.memory_change,
            )
            for (start, end), frames, segment in zip(clip.spans, clip.frames, captioned, strict=True)
        ]
        features = clip.result.features
        assert features is not None
        best = [segment.captions[0] for segment in segments]
        return CaptionResult(
            path=clip.result.path,
            status="ok",
            captions=segments[0].captions if self.segments is None else (paragraph(best),),
            error=None,
            model=self.model,
            lost=clip.result.lost,
            duration=features.seconds,
            segments=tuple(segments),
            paragraph=self.segments is not None,
            times=features.times,
            thumbnails=clip.result.thumbnails,
        )

    def _failed(self, result: ExtractionResult, error: CapvidError) -> CaptionResult:
        return CaptionResult(
            path=result.path, status="error", captions=(), error=error, model=self.model, lost=result.lost
        )

    def caption_features(self, videos: Sequence[Features | np.ndarray]) -> list[tuple[Caption, ...]]:
        """Caption features of videos together; return each one's captions, best first.

        Args:
            videos: :class:`~capvid.features.feature_file.Features`, or arrays (T, D), or (T, L, D) of maps.

        Raises:
            FeatureMismatchError: they are not what the captioner was trained on.
        """
        header = self.checkpoint.header
        inner = (header.locations, header.width) if header.locations else (header.width,)
        segments = []
        for video in videos:
            if isinstance(video, Features):
                self.checkpoint.accept(video.header)
                video = video.concatenated()
            if video.shape[1:] != inner or not len(video):
                expected = ", ".join(("T", *map(str, inner)))
                raise FeatureMismatchError(
                    f"features of the shape {video.shape}, and the captioner was trained on ({expected})",
                    remedy="extract them with the captioner's backbone and layer",
                )
            array = np.ascontiguousarray(video, dtype=np.float32)
            segments.append([array[self._generator.frames(len(array))]])
        return [captioned[0].captions for captioned in self._generator.describe(segments)]


def _rebuild(arguments: dict[str, Any]) -> CaptionPipeline:
    return CaptionPipeline(arguments.pop("checkpoint"), arguments.pop("backbones"), **arguments)


@dataclass(frozen=True)
class _Clip:
    """A video cut into segments: their times, and the frames and features that the captioner looks at."""

    result: ExtractionResult
    _: KW_ONLY
    spans: Sequence[Span]
    frames: Sequence[np.ndarray]  # indices (T,)
    segments: Sequence[np.ndarray]  # (T, D) or (T, L, D)


@dataclass(frozen=True, kw_only=True)
class Described:
    """Captions of one segment, best first, and how much it changed the memory of each layer."""

    captions: tuple[Caption, ...]
    memory_change: tuple[float, ...] = ()


class CaptionGenerator:
    """Captions features with one captioner; no caption depends on what is captioned together with it.

    Args:
        checkpoint: the captioner and its vocabulary.
        device: where it computes.
        options: decoding options.
        batch_size: maximum number of segments decoded together.
        trace: whether captions carry traces.

    Raises:
        UsageError: the captioner cannot rank by specificity or cannot tell which words repeat.
        CheckpointError: its calibration is damaged.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        options: DecodingOptions,
        batch_size: int,
        trace: bool = False,
    ) -> None:
        check_specificity(checkpoint.captioner, options)
        check_repetition(checkpoint.captioner, options)
        self.checkpoint = checkpoint
        self.device = device
        self.batch_size = batch_size
        self._options, self._trace = options, trace
        self._captioner = checkpoint.captioner.to(device).eval()
        self._calibration = Calibration.of(checkpoint.info)
        precise = in_double(self._captioner, device)
        # Without double precision, captions are rescored one by one, so that none depends on the others.
        together = MAPS_RESCORED_TOGETHER if self._captioner.config.locations else RESCORED_TOGETHER
        self._precise, self._together = (precise, together) if precise else (self._captioner, 1)
        self._average_logprobs: dict[tuple[int, ...], float] = {}

    def frames(self, count: int) -> np.ndarray:
        """Return the indices (T,) of the frames that the captioner looks at, of ``count``."""
        return self.checkpoint.frames(torch.arange(count)).numpy()

    @torch.inference_mode()
    def describe(self, videos: Sequence[Sequence[np.ndarray]]) -> list[list[Described]]:
        """Caption each segment of each video by its features (T, D), or maps (T, L, D).

        Raises:
            RunError: the device runs out of memory.
        """
        if not videos:  # a batch of inputs that all failed
            return []
        clips = [[torch.from_numpy(segment) for segment in video] for video in videos]
        captioner = self._captioner
        try:
            if isinstance(captioner, ParagraphCaptioner) and captioner.recurrent:
                return self._describe_paragraphs(captioner, clips)
            return self._describe_segments(clips)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"{self.device} has not the memory to caption {len(videos)} videos at once",
                remedy="use a smaller --batch-size",
            ) from error

    def _describe_segments(self, clips: Sequence[Sequence[Tensor]]) -> list[list[Described]]:
        """Decode and rescore each segment by itself."""
        segments = [segment for video in clips for segment in video]
        hypotheses: list[list[Hypothesis]] = []
        for start in range(0, len(segments), self.batch_size):
            features, mask = pad_frames(segments[start : start + self.batch_size])  # (B, T, D), (B, T)
            hypotheses += decode(
                self._captioner, features.to(self.device), mask.to(self.device), self._options
            )
        captions: list[tuple[Caption, ...]] = []
        for start in range(0, len(segments), self._together):
            batch = slice(start, start + self._together)
            captions += self._rescore(*self._pad(segments[batch]), hypotheses[batch])
        described = iter(captions)
        return [[Described(captions=next(described)) for _ in video] for video in clips]

    def _describe_paragraphs(
        self, captioner: ParagraphCaptioner, clips: Sequence[Sequence[Tensor]]
    ) -> list[list[Described]]:
        """Decode segments with the memory of the ones before, then rescore them in the same order."""
        features, mask, counts = pad_segments(clips)  # (B, S, T, D), (B, S, T), (B,)
        hypotheses = decode_paragraphs(
            captioner, features.to(self.device), mask.to(self.device), counts, self._options
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
                described[row].append(Described(captions=caption, memory_change=tuple(change)))
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
        rescored = rescore(self._precise, features, mask, hypotheses, carried=carried, trace=self._trace)
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


def paragraph(captions: Sequence[Caption]) -> Caption:
    """Join the captions of a video's segments into one text, a sentence each."""
    sentences = (caption.text for caption in captions if caption.text)
    return Caption(
        text=" ".join(f"{text[0].upper()}{text[1:]}." for text in sentences),
        logprob=sum(caption.logprob for caption in captions),
        words=tuple(word for caption in captions for word in caption.words),
        sentences=len(captions),
    )
