"""Training examples, the frames of a video with its captions as tokens, and batches of them as tensors.

Notation for tensor shapes: B captions (or paragraphs) of a batch, S segments, T frames, L words of a
sentence, D feature width; feature maps have their locations before D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from capvid.captioners.checkpoint import limited
from capvid.captioners.layers import pad_frames, pad_segments
from capvid.datasets.annotation_files import first_ids
from capvid.datasets.dataset import CaptionedVideo, Segment
from capvid.errors import DataError, FeatureFileError
from capvid.features.feature_store import NO_VIEWS, FeatureStore, Views
from capvid.text.tokenization import TOKENIZERS
from capvid.text.vocabulary import BOS, EOS, PAD, Vocabulary


@dataclass(frozen=True)
class Example:
    """A video, or an augmented view of it, with the captions of the video as tokens."""

    id: str
    length: int  # T
    captions: tuple[list[int], ...]
    reader: Callable[[str], Tensor]
    key: str = ""  # of the augmented view; empty for the video itself

    @property
    def frames(self) -> Tensor:
        """The frames (T, D) or (T, L, D) float16, read on access."""
        return self.reader(self.key or self.id)


@dataclass(frozen=True)
class ParagraphExample:
    """The segments of a video, or of an augmented view, with its paragraphs as tokens."""

    id: str
    rows: tuple[Tensor, ...]  # frame indices (T,) of each segment; T may be 0
    paragraphs: tuple[tuple[list[int], ...], ...]
    reader: Callable[[str], Tensor]
    key: str = ""  # of the augmented view; empty for the video itself

    @property
    def frames(self) -> Tensor:
        """All frames (T, D) or (T, L, D) float16, read on access."""
        return self.reader(self.key or self.id)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """The frames of each segment."""
        frames = self.frames
        return tuple(frames[rows] for rows in self.rows)


@dataclass(frozen=True)
class Lengths:
    """Maximum length of sentences; longer ones are dropped, or cut with ``cut``."""

    max_words: int
    cut: bool = False
    tokenizer: str = "scorer"

    def words(self, text: str) -> list[str] | None:
        """Return the words of a sentence to train on; None if it is dropped."""
        tokens = TOKENIZERS[self.tokenizer](text)
        if len(tokens) <= self.max_words:
            return tokens or None
        return tokens[: self.max_words] if self.cut else None


def usable_captions(video: CaptionedVideo, lengths: Lengths) -> list[list[str]]:
    """Return the words of the captions to learn from."""
    return [tokens for caption in video.captions if (tokens := lengths.words(caption))]


def usable_paragraphs(video: CaptionedVideo, lengths: Lengths, max_segments: int) -> list[list[list[str]]]:
    """Return the words of each sentence of the paragraphs; a dropped sentence drops its paragraph."""
    paragraphs = ([lengths.words(text) for text in each[:max_segments]] for each in video.paragraphs)
    return [[tokens for tokens in each if tokens] for each in paragraphs if all(each)]


def check_features(videos: Sequence[CaptionedVideo], store: FeatureStore) -> None:
    """Raise DataError if a video has no features."""
    missing = [video.id for video in videos if video.id not in store]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(videos)} videos have no features ({first_ids(missing, 3)})",
            remedy="extract them with capvid extract, or give the features file that holds them",
        )


def make_examples(
    videos: Sequence[CaptionedVideo],
    reader: FrameReader,
    vocabulary: Vocabulary | None,
    lengths: Lengths,
    views: Views = NO_VIEWS,
    *,
    max_segments: int | None = None,
) -> list[Any]:
    """Return an :class:`Example` for each video with usable captions, followed by its ``views``.

    With ``max_segments``, return a :class:`ParagraphExample` for each video with usable paragraphs. Without a
    ``vocabulary``, as for evaluation, all videos are kept, without captions but with all segments, since
    captioning does not stop after ``max_segments`` either.

    Raises:
        DataError: a video has no features, or a segment lies beyond them.
    """
    check_features(videos, reader.store)
    examples: list[Any] = []
    count = None if vocabulary is None else max_segments
    for video in videos:
        captions: tuple[Any, ...] = ()
        if vocabulary is not None:
            encode = vocabulary.encode
            if max_segments is None:
                captions = tuple(map(encode, usable_captions(video, lengths)))
            else:
                paragraphs = usable_paragraphs(video, lengths, max_segments)
                captions = tuple(tuple(map(encode, sentences)) for sentences in paragraphs)
            if not captions:
                continue
        for key in ("", *views.get(video.id, ())):
            name = key or video.id
            if max_segments is None:
                examples.append(Example(video.id, reader.store.length(name), captions, reader, key))
            else:
                rows = segment_rows(name, video.segments[:count], reader.store)
                examples.append(ParagraphExample(video.id, rows, captions, reader, key))
    return examples


SHARE = 0.25  # of the free memory
_CGROUP = Path("/sys/fs/cgroup")


class FrameReader:
    """Thread-safe reader of features, with a cache.

    Args:
        store: the features.
        memory: size of the cache in bytes; None takes a quarter of the free memory.
    """

    def __init__(self, store: FeatureStore, *, memory: int | None = None) -> None:
        self.store = store
        self.memory = int(SHARE * free_memory()) if memory is None else memory
        self._cache: dict[str, Tensor] = {}

    def __call__(self, video: str) -> Tensor:
        """Return the frames of a video, (T, D) or (T, L, D) float16.

        Raises:
            FeatureFileError: they cannot be read, or have changed since the store was opened.
        """
        frames = self._cache.get(video)
        if frames is None:
            frames = torch.from_numpy(self.store.get(video).concatenated().astype(np.float16))
            if len(frames) != self.store.length(video):
                problem = f"{video}: {len(frames)} frames of features, {self.store.length(video)} when opened"
                raise FeatureFileError(problem, remedy="do not change features while they are in use")
            size = frames.numel() * frames.element_size()
            if size <= self.memory:  # concurrent reads may subtract it twice: harmless
                self.memory -= size
                self._cache[video] = frames
        return frames


def free_memory() -> int:
    """Return the free memory in bytes, of the machine or its container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return min(free, limit - used)
    except (OSError, ValueError):  # no container, or no limit
        return free


def segment_rows(video: str, segments: Sequence[Segment], store: FeatureStore) -> tuple[Tensor, ...]:
    """Return the frame indices (T,) of each segment; T is 0 for a segment between two frames.

    Raises:
        DataError: a segment ends after the last frame, or is in seconds and the features have no times.
    """
    times = store.times(video) if any(segment.unit == "seconds" for segment in segments) else None
    length = store.length(video)
    rows = []
    for segment in segments:
        if segment.unit == "seconds":
            if times is None:
                raise DataError(
                    f"{video}: segments in seconds, and features without times",
                    remedy="extract the features with capvid, or give segments in frames",
                )
            rows.append(torch.from_numpy(np.flatnonzero((times >= segment.start) & (times < segment.end))))
        elif segment.end > length:
            problem = f"{video}: a segment ends at frame {segment.end:g}, the features at {length}"
            raise DataError(problem, remedy="extract the frames that the segments refer to")
        else:
            rows.append(torch.arange(int(segment.start), int(segment.end)))
    return tuple(rows)


@dataclass(frozen=True)
class Batch:
    """Captions with the frames of their videos; paragraphs have the dimension S after B.

    Attributes:
        features: frame features (B, T, D) or (B, S, T, D) in half precision, zero where there is no frame.
        mask: (B, T) or (B, S, T), True at frames.
        inputs: input words (B, L) or (B, S, L), from the start token on.
        targets: next words in the same shape, up to the end token, then padding.
        paragraphs: all paragraphs of each video as tokens, the one in ``inputs`` first.
        remembered: sentences (B, S - 1, L), from the start token on, for the memory of later segments; None
            uses those of ``inputs``.
    """

    features: Tensor
    mask: Tensor
    inputs: Tensor
    targets: Tensor
    paragraphs: Sequence[Sequence[Sequence[list[int]]]] = ()
    remembered: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Batch:
        """Move the batch to ``device``; features become float32, except feature maps, for their size."""
        features = self.features.to(device, non_blocking=True)
        maps = features.dim() == 3 + self.inputs.dim() - 1
        rest: dict[str, Any] = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("mask", "inputs", "targets")
        }
        return replace(self, features=features if maps else features.float(), **rest)


_Example = TypeVar("_Example")
_Frames = Any  # indices (T,) of the sampled frames, or a list with those of each segment


@dataclass(frozen=True)
class Row(Generic[_Example]):
    """A caption of a batch: its example, its index there, and the sampled frames."""

    example: _Example
    choice: int
    frames: _Frames


@dataclass(frozen=True)
class Plan(Generic[_Example]):
    """Contents of a batch whose frames are not read yet.

    Attributes:
        rows: captions or paragraphs of the batch.
        words: number of words in the batch, end tokens included.
        make: function that reads the frames of rows and returns their batch.
    """

    rows: Sequence[Row[_Example]]
    words: int
    make: Callable[[Sequence[Row[_Example]]], Batch]

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, number: int, parts: int) -> Callable[[], Batch]:
        """Return a reader of part ``number`` of ``parts``; an empty part becomes a caption without words."""
        rows = self.rows[number::parts]
        if rows:
            return partial(self.make, rows)

        def read_without_words() -> Batch:
            batch = self.make(self.rows[:1])
            return replace(batch, targets=torch.full_like(batch.targets, PAD))

        return read_without_words


@dataclass(eq=False)
class _Batches(ABC, Generic[_Example]):
    """Batches of each epoch; the same seed and epoch always give the same batches.

    Attributes:
        examples: training videos and their views.
        batch_size: captions, or paragraphs, per batch.
        captions_per_video: captions sampled per example and epoch, without repetition.
        max_frames: maximum number of frames per video or segment.
        frames: which ones: ``spread``, a random subset; ``even`` and ``first`` as in
            :func:`~capvid.captioners.checkpoint.limited`.
        frame_dropout: rate of dropped frames; at least one is kept.
        seed: random seed.
    """

    examples: Sequence[_Example]
    _: KW_ONLY
    batch_size: int
    captions_per_video: int
    max_frames: int
    frames: str = "spread"
    frame_dropout: float = 0.0
    seed: int

    def __post_init__(self) -> None:
        counts = [len(self._sentence_lengths(example)) for example in self.examples]
        self.captions = sum(min(self.captions_per_video, count) for count in counts)

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return -(-self.captions // self.batch_size)

    @abstractmethod
    def _sentence_lengths(self, example: _Example) -> Sequence[Sequence[int]]:
        """Return the number of words of each sentence of each caption or paragraph of an example."""

    @abstractmethod
    def _sample(self, example: _Example, generator: torch.Generator) -> _Frames:
        """Sample frames of a video or of its segments."""

    @abstractmethod
    def _make_batch(self, rows: Sequence[Row[_Example]]) -> Batch:
        """Read the frames of rows and return their batch."""

    def epoch(self, number: int) -> Iterator[Plan[_Example]]:
        """Yield the batches of epoch ``number``, captions of similar length together, in random order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        sampled = [
            (index, choice, lengths[choice])
            for index, lengths in enumerate(map(self._sentence_lengths, self.examples))
            for choice in torch.randperm(len(lengths), generator=generator)[
                : self.captions_per_video
            ].tolist()
        ]
        longest = torch.tensor([max(lengths) for *_, lengths in sampled])
        # Sorted by length plus noise of up to two words: little padding, but mixed lengths.
        noise = torch.rand(len(sampled), generator=generator) * 2
        order = (longest + noise).argsort().split(self.batch_size)
        for batch in torch.randperm(len(order), generator=generator).tolist():
            chosen = [sampled[row] for row in order[batch].tolist()]
            rows = [
                Row(self.examples[index], choice, self._sample(self.examples[index], generator))
                for index, choice, _ in chosen
            ]
            words = sum(sum(lengths) + len(lengths) for *_, lengths in chosen)  # and an end token each
            yield Plan(rows, words, self._make_batch)

    def _sample_frames(self, length: int, generator: torch.Generator) -> Tensor:
        """Return the sorted indices (T,) of sampled frames of a video or segment of ``length`` frames."""
        eligible = torch.arange(length)
        if self.frames != "spread":
            eligible = limited(eligible, self.max_frames, self.frames)
        frames = eligible[torch.randperm(len(eligible), generator=generator)[: self.max_frames]]
        kept = torch.rand(len(frames), generator=generator) >= self.frame_dropout
        kept[:1] = True
        return frames[kept].sort().values


class TrainingBatches(_Batches[Example]):
    """Batches of captions."""

    def _sentence_lengths(self, example: Example) -> Sequence[Sequence[int]]:
        return [[len(caption)] for caption in example.captions]

    def _sample(self, example: Example, generator: torch.Generator) -> Tensor:
        return self._sample_frames(example.length, generator)

    def _make_batch(self, rows: Sequence[Row[Example]]) -> Batch:
        features, mask = pad_frames([row.example.frames[row.frames] for row in rows])
        return Batch(features, mask, *teacher_tokens([row.example.captions[row.choice] for row in rows]))


class ParagraphBatches(_Batches[ParagraphExample]):
    """Batches of paragraphs; missing segments have no frames and no words."""

    def _sentence_lengths(self, example: ParagraphExample) -> Sequence[Sequence[int]]:
        return [list(map(len, paragraph)) for paragraph in example.paragraphs]

    def _sample(self, example: ParagraphExample, generator: torch.Generator) -> list[Tensor]:
        return [rows[self._sample_frames(len(rows), generator)] for rows in example.rows]

    def _make_batch(self, rows: Sequence[Row[ParagraphExample]]) -> Batch:
        clips, paragraphs = [], []
        for row in rows:
            frames = row.example.frames
            clips.append([frames[indices] for indices in row.frames])
            others = [text for n, text in enumerate(row.example.paragraphs) if n != row.choice]
            paragraphs.append([row.example.paragraphs[row.choice], *others])
        features, mask, _ = pad_segments(clips)  # (B, S, T, D), (B, S, T)
        tokens = paragraph_teacher_tokens([first for first, *_ in paragraphs], mask.shape[1])
        return Batch(features, mask, *tokens, paragraphs=paragraphs)


def paragraph_teacher_tokens(
    paragraphs: Sequence[Sequence[list[int]]], segments: int
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B, S, L) of teacher forcing; only padding where there is no sentence."""
    sentences: list[list[int] | None] = []
    for paragraph in paragraphs:
        sentences += [*paragraph, *[None] * (segments - len(paragraph))]
    inputs, targets = teacher_tokens(sentences)
    shape = (len(paragraphs), segments)
    return inputs.unflatten(0, shape), targets.unflatten(0, shape)


def teacher_tokens(sentences: Sequence[list[int] | None]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (N, L) of teacher forcing; only padding for None."""
    length = max(len(sentence) for sentence in sentences if sentence is not None) + 1
    none = [PAD] * length
    inputs = [none if s is None else [BOS, *s] + [PAD] * (length - 1 - len(s)) for s in sentences]
    targets = [none if s is None else [*s, EOS] + [PAD] * (length - 1 - len(s)) for s in sentences]
    return torch.tensor(inputs), torch.tensor(targets)


_T = TypeVar("_T")


def prefetch(jobs: Iterable[Callable[[], _T]], *, threads: int = 2, depth: int = 4) -> Iterator[_T]:
    """Yield the results of jobs in order, computing up to ``depth`` of them in advance.

    Args:
        jobs: functions to call; a thread of its own iterates over them.
        threads: number of threads that call them.
        depth: maximum number of results kept waiting.

    Raises:
        Exception: the exception of a job, or of the iteration over them, in its turn.
    """

    def call(upcoming: Future[Callable[[], _T] | None]) -> tuple[_T] | None:
        job = upcoming.result()
        return None if job is None else (job(),)

    # Jobs use one thread each: the training step runs on the other cores. A thread adopts the number set last
    # when it first asks for it, so this thread asks before the pool sets 1.
    torch.set_num_threads(torch.get_num_threads())
    iterator, waiting = iter(jobs), deque[Future[tuple[_T] | None]]()
    reader = ThreadPoolExecutor(1, "prefetch-jobs")
    pool = ThreadPoolExecutor(threads, "prefetch", initializer=torch.set_num_threads, initargs=(1,))
    try:
        while True:
            while len(waiting) <= depth:
                waiting.append(pool.submit(call, reader.submit(next, iterator, None)))
            result = waiting.popleft().result()
            if result is None:
                return
            yield result[0]
    finally:
        pool.shutdown(cancel_futures=True)
        reader.shutdown(cancel_futures=True)
