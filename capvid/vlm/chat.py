"""Video-language chat models: any model of transformers that turns images or videos and a prompt into text.

Models whose processor takes videos get the sampled frames as a video with their times; the others get them as
images, in order. No code from a model's repository is run.

Notation for shapes: T frames, h and w their height and width, B videos, K captions of each, L generated
tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from capvid.backbones.catalog import Preprocess
from capvid.decoding.caption_generator import Caption, Clip, Described
from capvid.decoding.decoding_options import ChatOptions, DecodingOptions
from capvid.errors import (
    AnswerError,
    CapvidError,
    CheckpointError,
    FeatureMismatchError,
    RunError,
    UsageError,
    input_error,
)
from capvid.features.extraction import ExtractionResult, merge_chunks
from capvid.features.feature_file import FeatureHeader, Features
from capvid.features.prefetch import Video, View
from capvid.utils.device import has_fast_path, resolve_device
from capvid.utils.validation import MIB, limits
from capvid.version import __version__
from capvid.video.frame_sampling import Sampling, spread
from capvid.vlm.answers import Reply, captions_of, is_tag, ranked
from capvid.vlm.chat_folder import (
    CONFIG,
    LOCAL,
    TOKENIZER,
    blaming,
    chat_template,
    generation_settings,
    load_processor,
)
from capvid.vlm.git import LARGEST_RATIO, PROCESSOR, check_files, first_line, quiet, read_json
from capvid.vlm.prompt_rendering import render_prompts, start_renderer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OPTIONAL = (  # files of a repository that are used if they exist
    "generation_config.json",
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
FRAMES_PER_CLIP = 16
SAMPLING = f"uniform:{FRAMES_PER_CLIP}"
DEFAULTS: dict[str, Any] = {"beam_size": 1, "max_length": 64}  # decoding options of chat models
QUANTIZED = ("8bit", "4bit")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_DAMAGE = (SafetensorError, ValueError, KeyError, TypeError, AttributeError)  # errors for a damaged index
_BLANK = Clip(frames=np.zeros((2, 64, 96, 3), np.uint8), times=np.arange(2) / 25, start=0.0, end=2 / 25)
_MAX_FRAME = 64 * MIB  # bytes of a processed frame
_TICKS = 1000  # per second; processors get frame times as multiples
_PLACEHOLDER = re.compile(r"\{(start|end|duration|previous)\}")
_PREVIOUS = "\nThe video so far: {previous}\nDo not repeat this; continue it."


class LanguageModel(Protocol):
    """A chat model, here or at a server; ``settings`` are those that its captions depend on."""

    device: torch.device
    settings: Mapping[str, Any]

    def generate(
        self, clips: Sequence[Clip], prompts: Sequence[str], options: DecodingOptions, *, system: str = ""
    ) -> Sequence[tuple[Caption, ...] | Exception]:
        """Return the captions of each clip, best first, or its error."""

    def check(self, options: DecodingOptions) -> None:
        """Raise UsageError for an option that the model does not have."""

    def on(self, device: torch.device | str) -> LanguageModel:
        """Return the model on another device."""


@dataclass(eq=False)
class ChatCaptionGenerator:
    """Captions frames with a chat model, each segment with the captions of the segments before it.

    Args:
        model: the chat model.
        options: decoding options; ``max_length`` and ``min_length`` count tokens.
        chat: prompt, context and size of the frames.
        batch_size: maximum number of videos captioned together; halved when memory runs out.
        max_frames: maximum number of frames of a video or segment; None for no maximum.

    Raises:
        UsageError: an option that chat models do not have.
    """

    model: LanguageModel
    _: KW_ONLY
    options: DecodingOptions = field(default_factory=lambda: DecodingOptions(**DEFAULTS))
    chat: ChatOptions = field(default_factory=ChatOptions)
    batch_size: int = 8
    max_frames: int | None = None
    files_per_video: int = 1

    def __post_init__(self) -> None:
        for name in ("specificity", "no_repeat_words"):
            if getattr(self.options, name):
                raise UsageError(f"chat models do not support {name}", remedy="leave it out")
        self.model.check(self.options)
        self.device = self.model.device
        # those of the next batch, while the model captions one
        self.prefetched_frames = FRAMES_PER_CLIP * self.batch_size
        self._batch = self.batch_size  # number of clips that fit into memory

    def on(self, device: torch.device | str) -> ChatCaptionGenerator:
        """Return the same on another device; it takes the model with it."""
        return replace(self, model=self.model.on(device))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything besides the model that a caption depends on."""
        frames = {} if self.max_frames is None else {"max_frames": self.max_frames}
        return {**asdict(self.options), **asdict(self.chat), **frames, **self.model.settings}

    @property
    def views(self) -> tuple[View, ...]:
        """Complete frames, shrunk to ``max_pixels``."""
        none, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        preprocess = Preprocess(order="RGB", scale=1, mean=none, std=one, max_pixels=self.chat.max_pixels)
        return (View(preprocess=preprocess),)

    def features_of(self, videos: Iterable[Video], sampling: Sampling) -> Iterator[ExtractionResult]:
        """Yield the frames of each decoded video, in order, or an error if they take too much memory."""
        chunks: list[ExtractionResult] = []
        size = 0  # of a video's frames in bytes
        for video in videos:
            chunk = _frames_of(video, sampling)
            size += 0 if chunk.features is None else chunk.features.streams[0].nbytes
            if size > limits().feature_bytes:
                problem = f"{video.path}: its frames take more memory than the limit feature-bytes"
                remedy = "use fewer frames (--sampling, --max-frames) or smaller ones (--max-pixels)"
                chunk = chunk.failed(FeatureMismatchError(problem, remedy=remedy))
                chunks = [chunk] * len(chunks)  # frees their frames
            chunks.append(chunk)
            if len(chunks) == video.num_chunks:
                yield merge_chunks(chunks)
                chunks, size = [], 0

    def accept(self, header: FeatureHeader) -> None:
        """Accept frames; raise FeatureMismatchError for features."""
        if header.streams:
            raise FeatureMismatchError("a chat model takes videos, not features", remedy="give the video")

    def frames(self, count: int) -> np.ndarray:
        """Return the indices (T,) of the frames that the model is shown, of ``count``."""
        return spread(count, self.max_frames)

    def caption_features(self, videos: Sequence[Features | np.ndarray]) -> list[tuple[Caption, ...]]:
        """Raise FeatureMismatchError: a chat model takes no features."""
        raise FeatureMismatchError("a chat model takes videos, not features", remedy="give the video")

    def describe(self, videos: Sequence[Sequence[Clip]]) -> Sequence[list[Described] | Exception]:
        """Caption each segment of each video; with context, in the order of the segments.

        Raises:
            RunError: the device runs out of memory with a single clip.
        """
        described: list[list[Described]] = [[] for _ in videos]
        errors: dict[int, Exception] = {}
        steps = [[(row, clip) for row, video in enumerate(videos) for clip in video]]
        if self.chat.context:
            longest = max(map(len, videos), default=0)
            steps = [[(row, v[n]) for row, v in enumerate(videos) if n < len(v)] for n in range(longest)]
        for step in steps:
            step = [(row, clip) for row, clip in step if row not in errors]
            prompts = [self._prompt(clip, described[row]) for row, clip in step]
            start = 0
            while start < len(step):
                batch = slice(start, start + self._batch)
                clips = [clip for _, clip in step[batch]]
                try:
                    captions = self.model.generate(
                        clips, prompts[batch], self.options, system=self.chat.system
                    )
                except torch.OutOfMemoryError as error:
                    self._reduce_batch(len(clips), error)
                    continue
                for (row, _), group in zip(step[batch], captions, strict=True):
                    if isinstance(group, Exception):
                        errors.setdefault(row, group)
                    else:
                        described[row].append((group, ()))
                start += len(clips)
        return [errors.get(row, segments) for row, segments in enumerate(described)]

    def _reduce_batch(self, size: int, error: Exception) -> None:
        """Halve the batch, or raise RunError if it was a single clip."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if size == 1:
            remedy = "use fewer frames (--max-frames), smaller ones (--max-pixels) or --precision bf16"
            raise RunError(f"{self.device} has not enough memory for one clip", remedy=remedy) from error
        self._batch = size // 2
        message = "note: not enough memory on %s for %d clips at once, continuing with %d"
        logging.getLogger("capvid").warning(message, self.device, size, self._batch)

    def _prompt(self, clip: Clip, before: Sequence[Described]) -> str:
        """Return the prompt of a clip after the segments ``before`` it."""
        previous = [captions[0].text for captions, _ in before[max(0, len(before) - self.chat.context) :]]
        end = clip.start if clip.end is None else clip.end
        seconds = {"start": clip.start, "end": end, "duration": end - clip.start}
        values = {name: f"{value:.1f}" for name, value in seconds.items()}
        values["previous"] = " ".join(previous) if self.chat.context else ""
        prompt = self.chat.prompt
        if values["previous"] and "{previous}" not in prompt:
            prompt += _PREVIOUS
        return _PLACEHOLDER.sub(lambda match: values[match[1]], prompt)


class Frames(Features):
    """Frames (T, h, w, 3) uint8 as the only stream, for captioners that compute no features in between."""

    def __post_init__(self) -> None:
        pass

    def concatenated(self) -> np.ndarray:
        """Return the frames."""
        return self.streams[0]


def _frames_of(video: Video, sampling: Sampling) -> ExtractionResult:
    """Return the frames of a decoded video, or its error."""
    result = ExtractionResult(path=video.path, features=None, error=video.error, name=video.name)
    decoded = video.decoded
    if decoded is None:
        return result
    try:
        header = FeatureHeader(
            streams=(),
            sampling=sampling.spec(),
            reader=decoded.reader,
            dtype="uint8",
            capvid_version=__version__,
        )
        frames = Frames(
            header=header,
            streams=(decoded.crops[0],),
            times=decoded.times,
            video=video.name,
            duration=decoded.duration,
        )
    except Exception as cause:
        return result.failed(input_error(video.path, cause))
    return replace(result, features=frames, lost=decoded.lost, thumbnails=decoded.thumbnails)


class ChatModel:
    """A chat model of transformers.

    Args:
        model: the model, in evaluation mode.
        processor: its processor.
        folder: its folder, for errors.
        settings: how it was loaded, for records.

    Raises:
        CheckpointError: the processor has no chat template.
    """

    def __init__(
        self, model: Any, processor: Any, folder: Path, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.model, self.processor, self.folder, self.settings = model, processor, folder, settings or {}
        self._template_file, self._template = chat_template(folder, processor)
        self.device = torch.device(model.device)
        self.takes_videos = getattr(processor, "video_processor", None) is not None
        processor.tokenizer.padding_side = "left"  # captions continue the prompts of a batch at one position
        ends = model.generation_config.eos_token_id
        ends = processor.tokenizer.eos_token_id if ends is None else ends
        self._ends = set(ends) if isinstance(ends, Sequence) else {ends}
        added = processor.tokenizer.added_tokens_decoder.items()
        self._hidden = {number for number, token in added if token.special and not is_tag(token.content)}

    def check(self, options: DecodingOptions) -> None:
        """Accept all options."""

    def on(self, device: torch.device | str) -> ChatModel:
        """Move the model to another device."""
        return ChatModel(self.model.to(device), self.processor, self.folder, self.settings)

    def generate(
        self, clips: Sequence[Clip], prompts: Sequence[str], options: DecodingOptions, *, system: str = ""
    ) -> list[tuple[Caption, ...] | Exception]:
        """Return the captions of each clip, best first, or its error.

        Args:
            clips: clips; those with equally many frames are captioned together, except when sampling.
            prompts: user message for each clip.
            options: decoding options.
            system: system message; empty for none.

        Raises:
            FeatureMismatchError: the model's processor refuses the frames.
        """
        captions: dict[int, tuple[Caption, ...] | Exception] = {}
        groups: dict[int, list[int]] = {}
        for index, clip in enumerate(clips):  # some processors cannot batch clips of different lengths
            key = index if options.temperature else -len(clip.frames)  # samples depend on the seed alone
            groups.setdefault(key, []).append(index)
        for rows in groups.values():
            torch.manual_seed(options.seed)
            with quiet():
                try:
                    inputs = self.inputs([clips[row] for row in rows], [prompts[row] for row in rows], system)
                except (CapvidError, MemoryError):
                    raise
                except Exception as error:
                    problem = f"the model's processor refuses these frames ({error})"
                    raise FeatureMismatchError(problem, remedy="choose another model for them") from error
                try:
                    generated = self._generate(inputs, options)
                except Exception as error:
                    raise self._failure(error) from error
            captions |= dict(zip(rows, generated, strict=True))
        return [captions[index] for index in range(len(clips))]

    def _failure(self, error: Exception) -> Exception:
        """Return a RunError if the model fails for any frames, an error of these frames if not."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError | CapvidError):
            return error
        try:
            self._generate(self.inputs([_BLANK], [""]), DecodingOptions(beam_size=1, max_length=1))
        except Exception as cause:
            files = [name for name in (CONFIG, *PROCESSOR) if (self.folder / name).is_file()]
            problem = f"{self.folder}: {' and '.join(files)} do not fit together ({first_line(cause)})"
            return RunError(problem, remedy="download the model again")
        problem = f"the model refuses these frames ({first_line(error)})"
        return FeatureMismatchError(problem, remedy="choose another model for them")

    def inputs(self, clips: Sequence[Clip], prompts: Sequence[str], system: str = "") -> Any:
        """Return the model's inputs for clips and their prompts.

        Raises:
            CheckpointError: the chat template fails.
        """
        tokens = self.processor.tokenizer.special_tokens_map
        chats = [self._messages(*each, system) for each in zip(clips, prompts, strict=True)]
        texts = render_prompts(self._template_file, self._template, chats, tokens)
        frames = [torch.from_numpy(clip.frames).permute(0, 3, 1, 2) for clip in clips]  # (T, 3, h, w)
        common: dict[str, Any] = {"text": texts, "padding": True, "return_tensors": "pt"}
        if "bos_token" in tokens and texts[0].startswith(tokens["bos_token"]):
            common["add_special_tokens"] = False  # the template has begun the text already
        if not self.takes_videos:
            inputs = self.processor(images=[list(clip) for clip in frames], **common)
            return self._checked(inputs)
        # some video processors refuse a single frame
        videos = [clip if len(clip) > 1 else clip.repeat(2, 1, 1, 1) for clip in frames]
        metadata = [_metadata(clip) for clip in clips]
        inputs = self.processor(videos=videos, video_metadata=metadata, do_sample_frames=False, **common)
        return self._checked(inputs)

    def _checked(self, inputs: Any) -> Any:
        """Return the inputs if the model has all of their tokens; on a GPU, another one ends the process."""
        config, highest = self.model.config, int(inputs["input_ids"].max())
        placeholders = [getattr(config, f"{name}_token_id", None) for name in ("image", "video")]
        if highest >= (count := config.get_text_config().vocab_size) and highest not in placeholders:
            problem = f"{self.folder / TOKENIZER[0]}: has token {highest}, and {CONFIG} has {count} tokens"
            raise CheckpointError(problem, remedy="download the model again")
        return inputs

    def check_inputs(self) -> None:
        """Process two blank frames.

        Raises:
            CheckpointError: the chat template or the processor fails, or makes the frames too large.
        """
        with blaming(self.folder, *PROCESSOR):
            inputs = self.inputs([_BLANK], [""])
            tensors = [value for value in inputs.values() if torch.is_tensor(value)]
            size = sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point()) // 2
            if size > _MAX_FRAME:
                raise ValueError(f"it makes {size} bytes of a frame")

    def _messages(self, clip: Clip, prompt: str, system: str) -> list[dict[str, Any]]:
        media = [{"type": "video"}] if self.takes_videos else [{"type": "image"}] * len(clip.frames)
        messages = [{"role": "user", "content": [*media, {"type": "text", "text": prompt}]}]
        if system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        return messages

    @torch.inference_mode()
    def _generate(self, inputs: Any, options: DecodingOptions) -> list[tuple[Caption, ...] | Exception]:
        """Return K captions for each clip of a batch, or the error of a clip without any."""
        inputs = inputs.to(self.device)
        if self.model.dtype != torch.float32:
            inputs = inputs.to(self.model.dtype)  # floating-point tensors only
        settings: dict[str, Any] = {
            "max_new_tokens": options.max_length,
            "min_new_tokens": options.min_length,
            "num_return_sequences": options.num_captions,
            "no_repeat_ngram_size": options.no_repeat_ngram,
            "do_sample": options.temperature > 0,
            "num_beams": 1 if options.temperature else options.beam_size,
        }
        if options.temperature:
            settings |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
        elif options.beam_size > 1:
            settings["length_penalty"] = options.length_penalty
        result = self.model.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)
        tokens = result.sequences[:, inputs["input_ids"].shape[1] :]  # (B K, L)
        logprobs = _token_logprobs(tokens, result.logits, getattr(result, "beam_indices", None))
        replies = [self._reply(*row) for row in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
        count = options.num_captions
        captions: list[tuple[Caption, ...] | Exception] = []
        for first in range(0, len(replies), count):
            try:
                group = captions_of(replies[first : first + count], max_length=options.max_length)
                captions.append(ranked(group) if options.temperature else group)
            except AnswerError as error:
                captions.append(error)
        return captions

    def _reply(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Reply:
        """Return the reply in generated tokens, which goes on to the first end token."""
        decode = self.processor.tokenizer.decode
        length = next((n for n, token in enumerate(tokens) if token in self._ends), len(tokens))
        shown: list[int] = []
        ends = []
        for token in tokens[:length]:
            if token not in self._hidden:
                shown.append(token)
            ends.append(len(decode(shown)))
        finish = "stop" if length < len(tokens) else "length"
        return Reply(text=decode(shown), finish=finish, ends=ends, logprobs=logprobs[: length + 1])


def _token_logprobs(tokens: Tensor, logits: Sequence[Tensor], beams: Tensor | None) -> Tensor:
    """Return the log-probability (B K, L) of each generated token, by the model itself.

    ``logits`` are (rows, V) for each step; ``beams`` (B K, L) the row of each token, negative after the end.
    """
    rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1).expand_as(tokens)
    rows = rows if beams is None else beams[:, : tokens.shape[1]].clamp_min(0)
    steps = [
        step[row, token].float() - step.float().logsumexp(-1)[row]
        for step, row, token in zip(logits, rows.unbind(1), tokens.unbind(1), strict=False)
    ]
    return torch.stack(steps, 1)


def _metadata(clip: Clip) -> Any:
    """Return the metadata from which processors compute the times of frames, relative to the clip's start."""
    from transformers.video_utils import VideoMetadata

    times = np.arange(len(clip.frames)) / 25 if clip.times is None else clip.times - clip.start
    duration = float(times[-1] + times[-1] / len(times)) if clip.end is None else clip.end - clip.start
    if len(times) == 1:  # which is shown twice
        times = np.array([times[0], max(duration, times[0] + 1 / 25)])
    height, width = clip.frames.shape[1:3]
    return VideoMetadata(
        total_num_frames=max(1, round(duration * _TICKS)),
        fps=float(_TICKS),
        duration=duration,
        width=width,
        height=height,
        frames_indices=[max(0, round(time * _TICKS)) for time in times.tolist()],
    )


def is_chat_type(kind: str | None) -> bool:
    """Return whether transformers has chat models of this type."""
    if kind is None:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def load_chat_model(
    folder: Path, *, device: str = "auto", precision: str = "auto", quantize: str | None = None
) -> ChatModel:
    """Load a chat model from a folder of the files that transformers saves.

    Args:
        folder: the folder.
        device: device on which to run; ``auto`` distributes the model over all GPUs.
        precision: ``fp32``, ``fp16``, ``bf16``, or ``auto`` for bf16 where that is fast, else fp32.
        quantize: ``8bit`` or ``4bit`` weights by bitsandbytes, on CUDA; None for none.

    Raises:
        UsageError: there is no such device or precision, or it cannot be quantized here.
        CheckpointError: a file is missing or damaged, or the model is not instruction-tuned.
        RunError: the device has not enough memory.
    """
    if precision != "auto" and precision not in PRECISIONS:
        raise UsageError(f"{precision}: no such precision", remedy=f"use auto, {', '.join(PRECISIONS)}")
    target = resolve_device(device)
    fast = target.type in ("cuda", "cpu") and has_fast_path(torch.bfloat16, target)
    dtype = PRECISIONS[precision] if precision != "auto" else torch.bfloat16 if fast else torch.float32
    if quantize is not None and quantize not in QUANTIZED:
        raise UsageError(f"{quantize}: no such quantization", remedy=f"use {' or '.join(QUANTIZED)}")
    if quantize is not None and (target.type != "cuda" or find_spec("bitsandbytes") is None):
        remedy = "leave out --quantize, or pip install bitsandbytes where there is a CUDA GPU"
        raise UsageError("quantization needs bitsandbytes and a CUDA GPU", remedy=remedy)
    check_files(folder)
    weights = chat_weights(folder)
    start_renderer()
    import transformers

    loader: Any = transformers.AutoModelForImageTextToText
    settings: dict[str, Any] = {"dtype": dtype, "device_map": target}
    if device == "auto" and torch.cuda.device_count() > 1:
        settings["device_map"] = "auto"
    if quantize is not None:
        bits: Any = {"load_in_8bit": True}
        if quantize == "4bit":
            bits = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype}
        settings["quantization_config"] = transformers.BitsAndBytesConfig(**bits)
    try:
        with quiet():
            with torch.device("meta"), blaming(folder, CONFIG):
                empty = loader.from_config(transformers.AutoConfig.from_pretrained(folder, **LOCAL))
            processor = load_processor(folder)
            generation = generation_settings(folder, empty)
            empty.generation_config = generation
            ChatModel(empty, processor, folder).check_inputs()
            with blaming(folder, *[path.name for path in weights]):
                if empty.get_memory_footprint() > LARGEST_RATIO * sum(
                    path.stat().st_size for path in weights
                ):
                    raise ValueError("the network is much larger than its weights")
                settings |= {"use_safetensors": True, "output_loading_info": True}
                model, info = loader.from_pretrained(
                    folder, generation_config=generation, **settings, **LOCAL
                )
                if missing := sorted(info["missing_keys"]):
                    raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")
    except ImportError as error:
        raise CheckpointError(f"{folder}: {first_line(error)}", remedy="pip install 'capvid[vlm]'") from error
    except torch.OutOfMemoryError as error:
        remedy = "use a smaller model, --precision bf16 or --quantize 4bit"
        raise RunError(f"{target} has not enough memory for {folder}", remedy=remedy) from error
    chosen = {"precision": precision} if precision != "auto" else {}
    chosen |= {"quantize": quantize} if quantize is not None else {}
    return ChatModel(model.eval().requires_grad_(False), processor, folder, chosen)


def chat_weights(folder: Path) -> list[Path]:
    """Return the weights files of a chat model: one, or the shards of its index.

    Raises:
        CheckpointError: the index is damaged, or names files outside the folder.
    """
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    try:
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        if not names or not all(re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII) for name in names):
            raise ValueError("a shard has no valid name")
    except (*_DAMAGE, OSError) as error:
        raise CheckpointError(f"{folder / INDEX}: damaged ({error})", remedy="download it again") from error
    return [folder / name for name in names]
