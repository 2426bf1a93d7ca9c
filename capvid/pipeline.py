"""Video in, captions out: ``load()`` and the pipeline from inputs to results.

Inputs are prefetched and decoded by worker processes, backbones compute their features, the captioner
decodes captions for batches of videos or segments, and these are rescored in double precision.

Array shapes: B videos or segments, T frames, D feature width, L locations of a feature map.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from capvid.checkpoints.lookup import chat_label, find_captioner, holds_chat_model, load_captioner
from capvid.decoding.caption_generator import (
    Caption,
    CaptionGenerator,
    Clip,
    Described,
    FeatureCaptionGenerator,
)
from capvid.decoding.decoding_options import ChatOptions, DecodingOptions
from capvid.errors import (
    CapvidError,
    CheckpointError,
    DataError,
    FeatureMismatchError,
    RunError,
    UsageError,
    input_error,
)
from capvid.features.extraction import TIMEOUT, ExtractionResult
from capvid.features.feature_file import Features, load_features
from capvid.features.prefetch import DecodeStage, Input, Video, decode_video, is_feature_file, local_file
from capvid.output.results import CaptionResult, Segment
from capvid.utils.device import resolve_device
from capvid.utils.storage import Readable, VideoPath, saved_copy
from capvid.utils.validation import GIB, checked_fields, limits
from capvid.video.frame_sampling import (
    ChosenTimes,
    LimitedSampling,
    Sampling,
    UniformSampling,
    parse_sampling,
)
from capvid.video.worker_pool import WorkerPool, check_process

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from capvid.captioners.checkpoint import Checkpoint
    from capvid.decoding.decoding_options import LoadOptions
    from capvid.video.segmentation import Segmentation
    from capvid.vlm.image_text import Reranker

DEFAULT_FRAMES = 28
MAX_HELD = GIB  # bytes of features or frames that wait for a batch
# decoding options stored in checkpoints: captions are written as for validation
TRAINED_OPTIONS = ("beam_size", "max_length", "length_penalty", "specificity", "no_repeat_words")
Span = tuple[float, float | None]
Frames = np.ndarray | Tensor | Sequence[Any]  # (T, H, W, 3) uint8, or T of (H, W, 3), or T Pillow images


def load(
    model: str | Path | None = None,
    *,
    device: str = "auto",
    weights: str | Path | None = None,
    batch_size: int = 8,
    workers: int = 2,
    timeout: float | None = TIMEOUT,
    reader: str = "auto",
    sampling: str | None = None,
    max_frames: int | None = None,
    precision: str = "auto",
    quantize: str | None = None,
    endpoint: str | None = None,
    segments: str | int | Path | None = None,
    attention: bool | None = False,
    thumbnails: bool = False,
    prefix: str = "",
    suffix: str = "",
    rerank: str | None = None,
    **options: Unpack[LoadOptions],
) -> CaptionPipeline:
    """Load a trained captioner with the backbones it needs, or a chat model.

    Args:
        model: name of a bundled captioner, folder of a trained one, or ``OWNER/NAME[@REVISION]`` on the
            Hugging Face Hub (also a GIT or a chat model as transformers publishes them); None loads the first
            default whose backbones are on this machine or can be downloaded (see ``capvid models``).
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        weights: file or folder of the backbone's weights; by default they are looked up in ``model/weights``,
            the folders in ``CAPVID_WEIGHTS`` and the cache.
        batch_size: videos captioned together; captions do not depend on it.
        workers: processes that decode videos.
        timeout: seconds before a file, or a part of a long one, is abandoned; None disables the limit.
        reader: video reader: ``auto``, ``pyav`` or ``decord``.
        sampling: frames to sample, such as ``uniform:16`` or ``fps:2``; None takes those of training.
        max_frames: maximum number of frames of a video or segment; None takes that of training.
        precision: of a chat model: ``auto``, ``fp32``, ``fp16`` or ``bf16``.
        quantize: weights of a chat model, on CUDA: ``8bit`` or ``4bit``.
        endpoint: address of an OpenAI-compatible API, such as ``http://localhost:8000/v1``; ``model`` is then
            the name of a model there, None for the first one. The key is in ``CAPVID_API_KEY``.
        segments: one sentence per segment: ``auto``, their number, or a file with their times; None captions
            whole videos, except for paragraph captioners, which use ``auto``.
        attention: whether captions carry attention traces; None if the captioner has any.
        thumbnails: whether results carry thumbnails of the sampled frames.
        prefix: text before the caption of each video, such as a trigger word and a space.
        suffix: text after the caption of each video.
        rerank: image-text encoder, such as ``clip``: the candidates (``num_captions``) that fit the frames
            best come first. Needs videos; beams are as many as candidates unless ``beam_size`` is set.
        options: fields of :class:`~capvid.decoding.decoding_options.DecodingOptions`, such as ``beam_size``,
            and of :class:`~capvid.decoding.decoding_options.ChatOptions`, such as ``prompt``; None stands for
            the captioner's default.

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
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    chat = {each.name: chosen.pop(each.name) for each in fields(ChatOptions) if each.name in chosen}
    if max_frames is not None and max_frames < 1:
        raise UsageError(f"max_frames must be at least 1, got {max_frames}")
    if rerank is not None and chosen.get("num_captions", 1) < 2:
        raise UsageError("rerank needs several candidates", remedy="ask for more, such as --num-captions 20")
    if rerank is not None and not chosen.get("temperature"):
        chosen.setdefault("beam_size", chosen["num_captions"])
    requested_sampling = None if sampling is None else parse_sampling(sampling)
    segmentation = None if segments is None else _parse_segments(segments)
    folder, published = (Path(), None) if endpoint is not None else find_captioner(model, weights=weights)
    torch_device = resolve_device(device)
    common: dict[str, Any] = {
        "workers": workers,
        "timeout": timeout,
        "reader": reader,
        "thumbnails": thumbnails,
        "prefix": prefix,
        "suffix": suffix,
    }
    if rerank is not None:
        from capvid.vlm.image_text import Reranker, load_encoder

        common["reranker"] = Reranker(load_encoder(rerank, device=torch_device))
    if endpoint is not None or holds_chat_model(folder):
        from capvid.vlm import chat as vlm

        unused = {"attention": attention, "weights": weights}
        if endpoint is not None:
            unused |= {"precision": precision != "auto", "quantize": quantize}
        for name, value in unused.items():
            if value:
                kind = "chat models have" if endpoint is None else "endpoints have"
                raise UsageError(f"{name}: {kind} no such option", remedy=f"leave out --{name}")
        language_model: vlm.LanguageModel
        if endpoint is not None:
            from capvid.vlm.endpoint import ServedModel

            language_model = ServedModel(endpoint, None if model is None else str(model), timeout=timeout)
            label = language_model.label
        else:
            language_model = vlm.load_chat_model(
                folder, device=device, precision=precision, quantize=quantize
            )
            label = chat_label(folder, published)
        chat_sampling = requested_sampling or parse_sampling(vlm.SAMPLING)
        if isinstance(chat_sampling, UniformSampling):  # as many of a segment, where auto decodes more
            max_frames = min(max_frames or chat_sampling.num_frames, chat_sampling.num_frames)
        generator = vlm.ChatCaptionGenerator(
            language_model,
            options=DecodingOptions.from_dict({**vlm.DEFAULTS, **chosen}),
            chat=ChatOptions(**chat),
            batch_size=batch_size,
            max_frames=max_frames,
        )
        return CaptionPipeline(
            generator,
            sampling=chat_sampling,
            segments=segmentation,
            model=label,
            **common,
        )
    checked_fields(DecodingOptions, chosen, what="decoding option")
    checkpoint, backbones, label = load_captioner(folder, published, weights=weights, device=torch_device)
    chat |= {"precision": precision} if precision != "auto" else {}
    if only_chat := [*chat, *(["quantize"] if quantize is not None else [])]:
        problem = f"{only_chat[0]}: only chat models have this option"
        raise UsageError(problem, remedy=f"leave out --{only_chat[0].replace('_', '-')}")

    stored, trained_sampling = _trained_settings(checkpoint, label)
    decoding = DecodingOptions(**{**stored, **chosen})
    max_words = int(checkpoint.info.get("max_words", decoding.max_length))
    if decoding.max_length > max_words:
        raise UsageError(f"{label}: its captions have {max_words} words at most", remedy="ask for no more")
    if segmentation is None and checkpoint.captioner.paragraphs:
        segmentation = _parse_segments("auto")
    if requested_sampling is not None:  # features of another sampling are accepted
        checkpoint = replace(checkpoint, header=replace(checkpoint.header, sampling=None))
    return CaptionPipeline(
        FeatureCaptionGenerator(
            checkpoint,
            backbones,
            device=torch_device,
            options=decoding,
            batch_size=batch_size,
            attention=attention is not False,
            max_frames=max_frames,
        ),
        sampling=requested_sampling or trained_sampling,
        segments=segmentation,
        model=label,
        **common,
    )


def _trained_settings(checkpoint: Checkpoint, label: str) -> tuple[dict[str, Any], Sampling]:
    """Return the decoding options and the sampling with which a captioner was trained."""
    remedy = "train it again or copy it anew"
    trained = checkpoint.info.get("decoding", {})
    try:
        stored = {name: trained[name] for name in trained.keys() & set(TRAINED_OPTIONS)}
        DecodingOptions(**stored)
    except (AttributeError, TypeError, UsageError) as error:
        raise CheckpointError(f"{label}: its decoding options are damaged", remedy=remedy) from error
    try:
        spec = checkpoint.header.sampling
        frames = int(checkpoint.info.get("max_frames", DEFAULT_FRAMES))
        return stored, parse_sampling(spec) if spec else UniformSampling(frames)
    except UsageError as error:
        problem = f"{label}: captioner.json: features.sampling: {error.message}"
        raise CheckpointError(problem, remedy=remedy) from error


def _parse_segments(segments: str | int | Path) -> Segmentation:
    from capvid.video.segmentation import parse_segments  # not needed for whole videos

    return parse_segments(str(segments))


@dataclass(eq=False, repr=False)
class CaptionPipeline:
    """A trained captioner with its backbones; captions videos, frames and feature files.

    Worker processes start with the first video and are kept until :meth:`close`, the end of a ``with`` block,
    or garbage collection.

    Args:
        generator: the captioner.
        sampling: which frames to sample.
        workers: processes that decode videos.
        timeout: seconds before a file, or a part of a long one, is abandoned; None disables the limit.
        reader: name of the video reader.
        segments: segmentation of videos, one sentence each; None captions whole videos.
        thumbnails: whether results carry thumbnails of the sampled frames.
        model: name and revision for results.
        prefix: text before the caption of each video; sentences of segments have none.
        suffix: text after it.
        reranker: orders the candidates of each segment by its frames; None leaves them best first.
    """

    generator: CaptionGenerator
    _: KW_ONLY
    sampling: Sampling
    workers: int = 2
    timeout: float | None = TIMEOUT
    reader: str = "auto"
    segments: Segmentation | None = None
    thumbnails: bool = False
    model: str = ""
    prefix: str = ""
    suffix: str = ""
    reranker: Reranker | None = None

    def __post_init__(self) -> None:
        if self.generator.batch_size < 1 or self.workers < 1:
            raise UsageError("batch size and workers must be at least 1")
        self._process = os.getpid()

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"CaptionPipeline({self.model!r}, device={str(self.generator.device)!r}, {settings})"

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

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the worker processes."""
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pipeline, which belongs to this process now."""
        vars(self).update(state, _process=os.getpid())

    def _check_process(self) -> None:
        """Raise RunError after a fork: PyTorch would wait for threads that are not there."""
        check_process(self._process, "the captioner was loaded")

    def on(self, device: torch.device | str) -> CaptionPipeline:
        """Return this pipeline on another device; it takes the networks with it."""
        self._check_process()
        reranker = None if self.reranker is None else self.reranker.on(device)
        return replace(self, generator=self.generator.on(device), reranker=reranker)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything besides the model that a caption depends on."""
        segments = {} if self.segments is None else {"segments": self.segments.spec}
        rerank = "" if self.reranker is None else self.reranker.encoder.name
        affixes = {"prefix": self.prefix, "suffix": self.suffix, "rerank": rerank}
        affixes = {name: text for name, text in affixes.items() if text}
        return {"sampling": self.sampling.spec(), **segments, **self.generator.settings, **affixes}

    @cached_property
    def _pool(self) -> WorkerPool:
        pool = WorkerPool(self.workers, timeout=self.timeout)
        weakref.finalize(self, pool.close)
        return pool

    @property
    def decoding(self) -> DecodeStage:
        """The first stage: decoding of videos into the crops that the backbones see."""
        sampling, max_frames = self.sampling, self.generator.max_frames
        # what is unchanged or where segments begin is only known once all frames are decoded
        if (
            max_frames is not None
            and not sampling.clean
            and not (self.segments and self.segments.spec == "auto")
        ):
            sampling = LimitedSampling(sampling, max_frames)
        return DecodeStage(
            views=(*self.generator.views, *([] if self.reranker is None else [self.reranker.encoder.view])),
            sampling=sampling,
            segmentation=self.segments,
            thumbnails=self.thumbnails,
            frames=self.generator.prefetched_frames,
            reader=self.reader,
            feature_files=True,
        )

    def __call__(
        self, video: str | VideoPath | Readable | Frames, times: Sequence[float] | None = None
    ) -> str:
        """Return the best caption of one video, of frames in memory, or of a feature file.

        Args:
            video: path or address; the bytes of a file, or a file open for reading in binary mode; or RGB
                frames: an array (T, H, W, 3) uint8, or a list of arrays (H, W, 3) uint8 or Pillow images.
            times: presentation times (T,) of such frames in seconds, ascending; 25 per second by default.

        Raises:
            UsageError: ``video`` is none of these.
            CapvidError: it cannot be read, is larger than the limits allow, or is not what the captioner was
                trained on. The message names the file, or ``bytes`` or ``frames``.
        """
        if isinstance(video, str | VideoPath):
            result = next(self.stream([video]))
        elif isinstance(video, bytes | bytearray | memoryview) or hasattr(video, "read"):
            with saved_copy(cast(Readable, video)) as (path, name):
                result = next(self.stream([path]))
                if result.error is not None:
                    result.error.message = result.error.message.replace(str(path), name)
        else:
            result = next(self.describe(self.features_of([self._decode_frames(video, times)])))
        if result.error is not None:
            raise result.error
        return result.captions[0].text

    def _decode_frames(self, frames: Frames, times: Sequence[float] | None) -> Video:
        """Crop frames in memory as a worker process crops those of a video."""
        from capvid.video.frame_source import ArraySource

        source = ArraySource(frames, times)
        stage = self.decoding
        sampling = stage.sampling
        if self.segments is not None:
            duration = source.info.duration
            chosen = self.segments.choose(source.info.path, source.frame_times(), duration, sampling)
            sampling = ChosenTimes(tuple(source.frame_times()[chosen].tolist()), sampling)
        decoded = decode_video(source, sampling, stage.views, self.reader, self.thumbnails)
        return Video(path=source.info.path, name=source.info.path.name, decoded=decoded)

    def stream(
        self, inputs: Iterable[Input], *, on_decoded: Callable[[VideoPath], object] | None = None
    ) -> Generator[CaptionResult, None, None]:
        """Caption videos and feature files (``.safetensors``), yielding results in order.

        Videos are decoded in the background while the captioner works. Inputs are consumed lazily, so there
        may be any number of them. An input that fails yields a result with its error.

        Args:
            inputs: paths, addresses, or objects with a ``path`` and the name of the video as ``key``.
            on_decoded: called with each input as soon as its frames, or features, are there or have failed.

        Raises:
            CapvidError: an error that concerns all inputs, such as missing weights of the backbone.
        """
        self._check_process()
        with closing(self._features(iter(inputs))) as features:
            yield from self.describe(features, first_soon=True, on_decoded=on_decoded)

    def _features(self, inputs: Iterator[Input]) -> Generator[ExtractionResult, None, None]:
        """Yield the features of each input; backbones are loaded when the first video comes."""
        for each in inputs:
            video = Video.of(each, feature_files=True)
            if not video.is_features:
                with closing(self.decoding.videos(self._pool, chain([each], inputs))) as videos:
                    yield from self.features_of(videos)
                return
            yield self._load_features(video.path, video.name)

    def features_of(self, videos: Iterable[Video]) -> Iterator[ExtractionResult]:
        """Yield features of decoded videos in order, the second stage; feature files are read."""
        self._check_process()
        features_of = self.generator.features_of
        if self.reranker is not None:
            features_of = partial(self.reranker.features_of, self.generator)
        for result in features_of(videos, self.sampling):
            is_file = result.features is None and result.error is None
            yield self._load_features(result.path, result.name) if is_file else result

    def _load_features(self, path: VideoPath, name: str) -> ExtractionResult:
        try:
            with local_file(path, max_bytes=limits().feature_bytes, timeout=self.timeout) as file:
                return ExtractionResult(path=path, features=load_features(file), error=None, name=name)
        except Exception as cause:
            return ExtractionResult(path=path, features=None, error=input_error(path, cause), name=name)

    def describe(
        self,
        results: Iterable[ExtractionResult],
        *,
        first_soon: bool = False,
        on_decoded: Callable[[VideoPath], object] | None = None,
    ) -> Iterator[CaptionResult]:
        """Yield captions of videos by their features in order, the last stage.

        Args:
            results: features.
            first_soon: whether to begin with a batch of one video, which is captioned sooner, and double it.
            on_decoded: called with each input as soon as its features are there.
        """
        self._check_process()
        batch: list[tuple[CaptionResult, list[Clip]]] = []
        generator, held = self.generator, 0  # bytes
        capacity = generator.files_per_video * generator.batch_size  # feature files captioned together
        room = size = generator.files_per_video if first_soon else capacity
        for result in results:
            if on_decoded is not None:
                on_decoded(result.path)
            captioned, clips = self._segment(result)
            batch.append((captioned, clips))
            room -= 1 if is_feature_file(result.path) else generator.files_per_video
            held += sum([clip.frames.nbytes for clip in clips])
            if room <= 0 or held > MAX_HELD:
                yield from self._caption_batch(batch)
                room = size = min(2 * size, capacity)
                batch, held = [], 0
        if batch:
            yield from self._caption_batch(batch)

    def _segment(self, extracted: ExtractionResult) -> tuple[CaptionResult, list[Clip]]:
        """Check a video's features and cut them into segments.

        Returns:
            the result, whose segments have no captions yet, and what the captioner sees of each segment; the
            final result, with an error, and no segment if the input has failed.
        """
        path, features = extracted.path, extracted.features
        result = CaptionResult(
            path=path,
            status="ok",
            captions=(),
            error=None,
            model=self.model,
            name=extracted.name,
            lost=extracted.lost,
            paragraph=self.segments is not None,
            thumbnails=extracted.thumbnails,
        )
        if features is None:
            assert extracted.error is not None
            return result.failed(extracted.error), []
        try:
            try:
                self.generator.accept(features.header)
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
            segments, clips = [], []
            for (start, end), index in zip(spans, indices, strict=True):
                frames = index[self.generator.frames(len(index))]
                clip_times = None if times is None else times[frames]
                embeddings = None if extracted.embeddings is None else extracted.embeddings[frames]
                clip = Clip(
                    frames=array[frames], times=clip_times, start=start, end=end, embeddings=embeddings
                )
                segments.append(Segment(start=start, end=end, captions=(), frames=frames))
                clips.append(clip)
            return replace(result, duration=duration, segments=tuple(segments), times=times), clips
        except Exception as cause:
            return result.failed(input_error(path, cause)), []

    def _caption_batch(self, batch: Sequence[tuple[CaptionResult, list[Clip]]]) -> Iterator[CaptionResult]:
        """Caption one batch; inputs that failed keep their place."""
        described = iter(self._generate([clips for result, clips in batch if result.error is None]))
        for result, clips in batch:
            if result.error is not None:
                yield result
                continue
            captioned = next(described)
            if self.reranker is not None:
                captioned = self.reranker.rank_video(clips, captioned)
            try:
                if isinstance(captioned, CapvidError):
                    captioned.message = f"{result.path}: {captioned.message}"
                if isinstance(captioned, Exception):
                    raise captioned
                yield self._result(result, captioned)
            except Exception as cause:
                yield result.failed(input_error(result.path, cause))

    def _generate(self, videos: Sequence[Sequence[Clip]]) -> Sequence[Sequence[Described] | Exception]:
        """Caption videos together, or one by one where that fails, so that only the one at fault has none."""
        try:
            return self.generator.describe(videos)
        except RunError:
            raise
        except Exception as cause:
            return [cause] if len(videos) == 1 else [self._generate([video])[0] for video in videos]

    def _result(self, result: CaptionResult, captioned: Sequence[Described]) -> CaptionResult:
        """Return the result of a video with the captions of its segments."""
        segments = [
            replace(segment, captions=captions, memory_change=memory_change)
            for segment, (captions, memory_change) in zip(result.segments, captioned, strict=True)
        ]
        captions = segments[0].captions
        if self.segments is not None:
            captions = (paragraph([segment.captions[0] for segment in segments]),)
        captions = tuple([replace(each, text=f"{self.prefix}{each.text}{self.suffix}") for each in captions])
        if self.segments is None:
            segments = [replace(segments[0], captions=captions)]
        return replace(result, captions=captions, segments=tuple(segments))

    def caption_features(self, videos: Sequence[Features | np.ndarray]) -> list[tuple[Caption, ...]]:
        """Caption features of videos together; return each one's captions, best first.

        Args:
            videos: :class:`~capvid.features.feature_file.Features`, or arrays (T, D), or (T, L, D) of maps.

        Raises:
            FeatureMismatchError: they are not what the captioner was trained on.
        """
        self._check_process()
        return self.generator.caption_features(videos)


def paragraph(captions: Sequence[Caption]) -> Caption:
    """Join the captions of a video's segments into one text, a sentence each."""
    sentences = (caption.text for caption in captions if caption.text)
    return Caption(
        text=" ".join(f"{text[0].upper()}{text[1:].removesuffix('.')}." for text in sentences),
        logprob=sum(caption.logprob for caption in captions),
        words=tuple(word for caption in captions for word in caption.words),
        sentences=len(captions),
    )
