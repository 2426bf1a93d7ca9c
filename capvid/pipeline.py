"""Video in, captions out: what ``capvid.load`` returns and what the command line calls.

Notation for tensor shapes: B videos, T frames, D width of the features.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from capvid.captioners.checkpoint import Checkpoint
from capvid.decoding import DecodingOptions
from capvid.describe import Described, Describer, paragraph
from capvid.errors import CapvidError, DataError, FeatureMismatchError, RunError, UsageError
from capvid.features.ahead import Video, holds_features
from capvid.features.decode import fetched
from capvid.features.extract import TIMEOUT, ExtractionResult, compute_features, views_of
from capvid.features.file import Features, load_features
from capvid.features.parts import DecodeStage, joined
from capvid.isolation import input_error
from capvid.limits import limits
from capvid.results import Caption, CaptionResult, Segment
from capvid.storage import VideoPath, located
from capvid.video.sampling import Sampling
from capvid.video.segments import Segmentation, frames_within
from capvid.video.workers import WorkerPool

if TYPE_CHECKING:
    from capvid.features.backbones import Backbone

FRAMES_PER_VIDEO_IN_BATCH = 4
FILES_PER_VIDEO_IN_BATCH = 8  # of features, which hold no frames and come at once; not of feature maps


class CaptionPipeline:
    """Captions videos, and files of features, with one captioner.

    Args:
        checkpoint: the captioner, its vocabulary and the header of the features it was trained on.
        backbones: those that make such features, or a function that loads them, called when the first
            video comes (files of features need none).
        device: where the captioner computes.
        sampling: which frames to take.
        options: of the decoding.
        batch_size: videos captioned together (of files of vectors eight times as many); captions do not
            depend on it.
        workers: processes that decode videos.
        timeout: seconds after which a file, or a part of a long one, is given up; None waits for ever.
        segments: what cuts videos into segments, of which each gets a sentence; None captions them whole.
        pictures: whether results have small pictures of the sampled frames.
        model: name and revision of the captioner for results; None takes the checkpoint's name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backbones: Sequence[Backbone] | Callable[[], Sequence[Backbone]],
        *,
        device: torch.device | str,
        sampling: Sampling,
        options: DecodingOptions,
        batch_size: int = 8,
        workers: int = 2,
        timeout: float | None = TIMEOUT,
        segments: Segmentation | None = None,
        pictures: bool = False,
        model: str | None = None,
    ) -> None:
        if batch_size < 1 or workers < 1:
            raise UsageError("batch size and workers must be at least 1")
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.sampling = sampling
        self.options = options
        self.batch_size = batch_size
        self.workers = workers
        self.timeout = timeout
        self.segments = segments
        self.pictures = pictures
        self.model = model or checkpoint.name
        self._given_backbones = backbones
        self._describer = Describer(checkpoint, device=self.device, options=options, batch_size=self._most)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything besides the model that a caption depends on."""
        cut = {} if self.segments is None else {"segments": self.segments.spec}
        return {"sampling": self.sampling.spec(), **cut, **self.options.to_dict()}

    def __call__(self, path: str | Path) -> str:
        """Give the best caption of one video or file of features.

        Raises:
            CapvidError: it cannot be read, or is not what the captioner was trained on.
        """
        result = next(self.stream([path]))
        if result.error is not None:
            raise result.error
        return result.captions[0].text

    def stream(self, paths: Iterable[str | VideoPath]) -> Generator[CaptionResult, None, None]:
        """Caption videos and files of features (``.safetensors``), in their order, as they come.

        Videos are decoded in the background while the captioner works. Paths are taken one by one as they are
        needed, so that there may be any number of them. An input that fails is a result with its error.

        Raises:
            CapvidError: what concerns all inputs, such as the backbone's weights.
        """
        with closing(self._features(map(located, paths))) as features:
            yield from self.describe(features)

    def caption_features(self, videos: Sequence[Features | np.ndarray]) -> list[tuple[Caption, ...]]:
        """Caption videos by their features, together; of each the captions, best first.

        Args:
            videos: features as :func:`~capvid.features.file.load_features` gives them, or bare arrays (T, D),
                or (T, L, D) of feature maps.

        Raises:
            FeatureMismatchError: they are not what the captioner was trained on.
        """
        arrays = []
        for video in videos:
            if isinstance(video, Features):
                self.checkpoint.accept(video.header)
                video = video.concatenated()
            arrays.append(self._fitting(video))
        clips = [[array[self._describer.frames(len(array))]] for array in arrays]
        return [whole.captions for (whole,) in self._describer.describe(clips)] if clips else []

    def _fitting(self, array: np.ndarray) -> np.ndarray:
        """The array in single precision, if its shape is that of what the captioner was trained on."""
        header = self.checkpoint.header
        inner = (header.locations, header.width) if header.locations else (header.width,)
        if array.shape[1:] != inner or not len(array):
            wanted = ", ".join(("T", *map(str, inner)))
            raise FeatureMismatchError(
                f"features of the shape {array.shape}, and the captioner was trained on ({wanted})",
                remedy="extract them with the captioner's backbone and layer",
            )
        return np.ascontiguousarray(array, dtype=np.float32)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be sent to another process without the processes that decode."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return _rebuilt, (self.checkpoint, tuple(self._backbones), options)

    def on(self, device: torch.device | str) -> CaptionPipeline:
        """The same pipeline on another device; it takes the networks with it."""
        options = {name: getattr(self, name) for name in _OPTIONS} | {"device": torch.device(device)}
        return _rebuilt(self.checkpoint, [one.on(device) for one in self._backbones], options)

    @cached_property
    def _backbones(self) -> Sequence[Backbone]:
        given = self._given_backbones
        return given() if callable(given) else given

    @cached_property
    def _pool(self) -> WorkerPool:
        """Processes that decode, kept for the next call."""
        pool = WorkerPool(self.workers, timeout=self.timeout)
        weakref.finalize(self, pool.close)
        return pool

    def _features(self, paths: Iterator[VideoPath]) -> Generator[ExtractionResult, None, None]:
        """Features of every input in order: made for videos, read from files of features."""
        for path in paths:
            if not holds_features(path):  # the backbones are needed from the first video on
                with closing(self.decoding.videos(self._pool, chain([path], paths))) as videos:
                    yield from self.features_of(videos)
                return
            yield self._loaded(path)

    def _loaded(self, path: VideoPath) -> ExtractionResult:
        try:
            with fetched(path, max_bytes=limits().feature_bytes, timeout=self.timeout) as file:
                features = load_features(file)
        except Exception as cause:
            return ExtractionResult(path=path, features=None, error=input_error(path, cause))
        return self._checked(ExtractionResult(path=path, features=features, error=None))

    def _checked(self, result: ExtractionResult) -> ExtractionResult:
        """Give the same result, or the error if its features are not like those trained on."""
        if result.features is None:
            return result
        try:
            self.checkpoint.accept(result.features.header)
            return result
        except FeatureMismatchError as error:
            return result.failed(FeatureMismatchError(f"{result.path}: {error.message}", remedy=error.remedy))
        except Exception as cause:
            return result.failed(input_error(result.path, cause))

    @property
    def decoding(self) -> DecodeStage:
        """The stage that decodes videos for this captioner."""
        return DecodeStage(
            views=tuple(views_of(self._backbones)),
            sampling=self.sampling,
            cut=self.segments,
            pictures=self.pictures,
            frames=self._frames,
            stored=True,
        )

    @property
    def _frames(self) -> int:
        """Gathered before the backbones compute."""
        return FRAMES_PER_VIDEO_IN_BATCH * self.batch_size

    def features_of(self, videos: Iterable[Video]) -> Iterator[ExtractionResult]:
        """The stage after :attr:`decoding`: features of decoded videos, in their order, as they come.

        Files of features that passed are read.
        """
        dtype = "float32" if self.checkpoint.sees else "float16"  # no file has to hold what GIT sees
        results = compute_features(
            videos, self._backbones, self.sampling, batch_size=self._frames, dtype=dtype
        )
        for result in joined(results):
            passed = result.features is None and result.error is None
            yield self._loaded(result.path) if passed else self._checked(result)

    def describe(self, results: Iterable[ExtractionResult]) -> Iterator[CaptionResult]:
        """The last stage: captions of videos by their features, in their order, as they come."""
        for batch in self._gathered(results):
            yield from self._describe(batch)

    def _gathered(self, results: Iterable[ExtractionResult]) -> Iterator[list[ExtractionResult]]:
        """Batches of as many videos as are captioned together, or of more files of features."""
        batch: list[ExtractionResult] = []
        room = self._most
        for result in results:
            batch.append(result)
            room -= 1 if holds_features(result.path) else self._files
            if room <= 0:
                yield batch
                batch, room = [], self._most
        if batch:
            yield batch

    @property
    def _most(self) -> int:
        """Segments captioned together at most."""
        return self._files * self.batch_size

    @property
    def _files(self) -> int:
        """Files of features that are captioned together in the place of one video."""
        return 1 if self.checkpoint.captioner.config.locations else FILES_PER_VIDEO_IN_BATCH

    def _describe(self, batch: Sequence[ExtractionResult]) -> Iterator[CaptionResult]:
        """Caption one batch; inputs that failed pass through in their places."""
        cut = [result if result.features is None else self._cut(result) for result in batch]
        described = iter(self._described([found for found in cut if isinstance(found, _Cut)]))
        for found in cut:
            if isinstance(found, _Cut):
                yield self._result(found, next(described))
                continue
            assert found.error is not None
            yield self._failed(found, found.error)

    def _described(self, videos: Sequence[_Cut]) -> Sequence[Sequence[Described] | Exception]:
        """Caption videos together; of each the descriptions of its segments, or what was raised.

        Where that fails, they are captioned one by one, which gives the same captions, so that only the
        video at fault has none.
        """
        try:
            return self._describer.describe([video.clips for video in videos])
        except RunError:
            raise
        except Exception as cause:
            return [cause] if len(videos) == 1 else [self._described([video])[0] for video in videos]

    def _failed(self, result: ExtractionResult, error: CapvidError) -> CaptionResult:
        return CaptionResult(
            path=result.path, status="error", captions=(), error=error, model=self.model, lost=result.lost
        )

    def _cut(self, result: ExtractionResult) -> _Cut | ExtractionResult:
        """A video's features by its segments, or why it cannot be cut."""
        try:
            return self._segmented(result)
        except Exception as cause:
            return result.failed(input_error(result.path, cause))

    def _segmented(self, result: ExtractionResult) -> _Cut:
        features = result.features
        assert features is not None
        array, times, duration = features.concatenated(), features.times, features.seconds
        spans: list[tuple[float, float | None]] = [(0.0, duration)]
        places = [np.arange(len(array))]
        if self.segments is not None:
            if times is None or duration is None:
                raise DataError(
                    f"{result.path}: segments need times, and these features have none",
                    remedy="give the video, or leave out --segments",
                )
            found = self.segments.spans(result.path, array, times, duration)
            spans = list(found)
            places = [frames_within(span, times, duration) for span in found]
        frames = [here[self._describer.frames(len(here))] for here in places]
        return _Cut(result=result, spans=spans, frames=frames, clips=[array[here] for here in frames])

    def _result(self, cut: _Cut, described: Sequence[Described] | Exception) -> CaptionResult:
        """The result of a video whose segments were ``described``."""
        try:
            if isinstance(described, Exception):
                raise described
            return self._captioned(cut, described)
        except Exception as cause:
            return self._failed(cut.result, input_error(cut.result.path, cause))

    def _captioned(self, cut: _Cut, described: Sequence[Described]) -> CaptionResult:
        segments = tuple(
            Segment(
                start=start,
                end=end,
                captions=told.captions,
                frames=frames,
                memory_change=told.memory_change,
            )
            for (start, end), frames, told in zip(cut.spans, cut.frames, described, strict=True)
        )
        best = [segment.captions[0] for segment in segments]
        features = cut.result.features
        assert features is not None
        return CaptionResult(
            path=cut.result.path,
            status="ok",
            captions=segments[0].captions if self.segments is None else (paragraph(best),),
            error=None,
            model=self.model,
            lost=cut.result.lost,
            duration=features.seconds,
            segments=segments,
            paragraph=self.segments is not None,
            times=features.times,
            pictures=cut.result.pictures,
        )


_OPTIONS = (
    "device",
    "sampling",
    "options",
    "batch_size",
    "workers",
    "timeout",
    "segments",
    "pictures",
    "model",
)


def _rebuilt(
    checkpoint: Checkpoint, backbones: Sequence[Backbone], options: Mapping[str, Any]
) -> CaptionPipeline:
    return CaptionPipeline(checkpoint, backbones, **options)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A video in segments: from when to when, which frames, and their features."""

    result: ExtractionResult
    spans: Sequence[tuple[float, float | None]]
    frames: Sequence[np.ndarray]
    clips: Sequence[np.ndarray]
