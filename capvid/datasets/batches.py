"""From examples to batches of tensors.

Notation for tensor shapes: B captions (or paragraphs) of a batch, S segments, T frames, L words of a
sentence, D feature width; feature maps have their locations before D.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from capvid.captioners.layers import pad_frames, pad_segments
from capvid.datasets.examples import Example, ParagraphExample
from capvid.text.vocabulary import BOS, EOS, PAD


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
        soft: words and probabilities (N, k) to learn at the N real targets, row by row; None without any.
    """

    features: Tensor
    mask: Tensor
    inputs: Tensor
    targets: Tensor
    paragraphs: Sequence[Sequence[Sequence[list[int]]]] = ()
    remembered: Tensor | None = None
    soft: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Batch:
        """Move the batch to ``device``; features become float32, except feature maps, for their size."""
        features = self.features.to(device, non_blocking=True)
        maps = features.dim() == 3 + self.inputs.dim() - 1
        rest: dict[str, Any] = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("mask", "inputs", "targets")
        }
        if self.soft is not None:
            rest["soft"] = tuple(tensor.to(device, non_blocking=True) for tensor in self.soft)
        return replace(self, features=features if maps else features.float(), **rest)


def sample_frames(length: int, count: int, dropout: float, generator: torch.Generator) -> Tensor:
    """Return the sorted indices of at most ``count`` random frames of ``length``.

    Each is dropped at the rate ``dropout``, but never all.
    """
    if not length:
        return torch.empty(0, dtype=torch.long)
    frames = torch.randperm(length, generator=generator)[:count]
    kept = torch.rand(len(frames), generator=generator) >= dropout
    kept[0] = True
    return frames[kept].sort().values


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
        return partial(self.make, rows) if rows else partial(self._wordless, self.rows[:1])

    def _wordless(self, rows: Sequence[Row[_Example]]) -> Batch:
        batch = self.make(rows)
        return replace(batch, targets=torch.full_like(batch.targets, PAD), soft=None)


class _Batches(ABC, Generic[_Example]):
    """Batches of each epoch; the same seed and epoch always give the same batches.

    Args:
        examples: training videos and their views.
        batch_size: captions, or paragraphs, per batch.
        captions_per_video: captions sampled per example and epoch, without repetition.
        max_frames: maximum number of frames sampled per video or segment.
        first: take the first frames instead of sampling.
        frame_dropout: rate of dropped frames; at least one is kept.
        seed: random seed.
    """

    def __init__(
        self,
        examples: Sequence[_Example],
        *,
        batch_size: int,
        captions_per_video: int,
        max_frames: int,
        first: bool = False,
        frame_dropout: float = 0.0,
        seed: int,
    ) -> None:
        self.examples = examples
        self.batch_size = batch_size
        self.captions_per_video = captions_per_video
        self.max_frames = max_frames
        self.first = first
        self.frame_dropout = frame_dropout
        self.seed = seed
        self.captions = sum(min(captions_per_video, len(self.sizes(example))) for example in examples)

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return -(-self.captions // self.batch_size)

    @abstractmethod
    def sizes(self, example: _Example) -> Sequence[int]:
        """Return the length of each caption or paragraph of an example; batches have similar lengths."""

    @abstractmethod
    def words(self, example: _Example, choice: int) -> int:
        """Return the number of words of a caption or paragraph, end tokens included."""

    @abstractmethod
    def sample(self, example: _Example, generator: torch.Generator) -> _Frames:
        """Sample frames of a video or of its segments."""

    @abstractmethod
    def batch(self, rows: Sequence[Row[_Example]]) -> Batch:
        """Read the frames of rows and return their batch."""

    def epoch(self, number: int) -> Iterator[Plan[_Example]]:
        """Yield the batches of epoch ``number``, captions of similar length together, in random order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        sampled = [
            (index, choice, sizes[choice])
            for index, sizes in enumerate(map(self.sizes, self.examples))
            for choice in torch.randperm(len(sizes), generator=generator)[: self.captions_per_video].tolist()
        ]
        lengths = torch.tensor([length for *_, length in sampled])
        # Sorted by length plus noise of up to two words: little padding, but mixed lengths.
        noise = torch.rand(len(sampled), generator=generator) * 2
        order = (lengths + noise).argsort().split(self.batch_size)
        for batch in torch.randperm(len(order), generator=generator).tolist():
            chosen = [sampled[row] for row in order[batch].tolist()]
            rows = [
                Row(self.examples[index], choice, self.sample(self.examples[index], generator))
                for index, choice, _ in chosen
            ]
            words = sum(self.words(row.example, row.choice) for row in rows)
            yield Plan(rows, words, self.batch)

    def sample_frames(self, length: int, generator: torch.Generator) -> Tensor:
        """Return the indices (T,) of the sampled frames of a video or segment."""
        length = min(length, self.max_frames) if self.first else length
        return sample_frames(length, self.max_frames, self.frame_dropout, generator)


class TrainingBatches(_Batches[Example]):
    """Batches of captions."""

    def sizes(self, example: Example) -> Sequence[int]:
        """Return the number of words of each caption."""
        return [len(caption) for caption in example.captions]

    def words(self, example: Example, choice: int) -> int:
        """Return the number of words of a caption, end token included."""
        return len(example.captions[choice]) + 1

    def sample(self, example: Example, generator: torch.Generator) -> Tensor:
        """Sample frames of the video."""
        return self.sample_frames(example.length, generator)

    def batch(self, rows: Sequence[Row[Example]]) -> Batch:
        """Return a batch of captions with their videos."""
        features, mask = pad_frames([row.example.frames[row.frames] for row in rows])
        taught = teacher_tokens([row.example.captions[row.choice] for row in rows])
        soft = [row.example.soft[row.choice] for row in rows if row.example.soft]
        if not soft:
            return Batch(features, mask, *taught)
        words, probabilities = (torch.cat(parts) for parts in zip(*soft, strict=True))
        return Batch(features, mask, *taught, soft=(words.long(), probabilities.float()))


class ParagraphBatches(_Batches[ParagraphExample]):
    """Batches of paragraphs."""

    def sizes(self, example: ParagraphExample) -> Sequence[int]:
        """Return the number of words of the longest sentence of each paragraph."""
        return [max(map(len, paragraph)) for paragraph in example.paragraphs]

    def words(self, example: ParagraphExample, choice: int) -> int:
        """Return the number of words of a paragraph, end tokens included."""
        return sum(len(sentence) + 1 for sentence in example.paragraphs[choice])

    def sample(self, example: ParagraphExample, generator: torch.Generator) -> list[Tensor]:
        """Sample frames of each segment."""
        return [rows[self.sample_frames(len(rows), generator)] for rows in example.rows]

    def batch(self, rows: Sequence[Row[ParagraphExample]]) -> Batch:
        """Return a batch of paragraphs with their segments; missing segments have no frames and no words."""
        clips = []
        for row in rows:
            frames = row.example.frames
            clips.append([frames[indices] for indices in row.frames])
        features, mask, _ = pad_segments(clips)  # (B, S, T, D), (B, S, T)
        segments = mask.shape[1]
        paragraphs = [_first(row.choice, row.example.paragraphs) for row in rows]
        taught = in_segments([first for first, *_ in paragraphs], segments)
        return Batch(features, mask, *taught, paragraphs=paragraphs)


_Item = TypeVar("_Item")


def _first(choice: int, items: Sequence[_Item]) -> list[_Item]:
    """Return the items with item ``choice`` moved to the front."""
    return [items[choice], *items[:choice], *items[choice + 1 :]]


def in_segments(paragraphs: Sequence[Sequence[list[int]]], segments: int) -> tuple[Tensor, Tensor]:
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


THREADS = 2
AHEAD = 4

_T = TypeVar("_T")


def read_ahead(
    jobs: Iterable[Callable[[], _T]], *, threads: int = THREADS, ahead: int = AHEAD
) -> Iterator[_T]:
    """Yield the results of jobs in order, computing up to ``ahead`` of them in advance.

    Args:
        jobs: functions to call; a thread of its own iterates over them.
        threads: number of threads that call them.
        ahead: maximum number of results kept waiting.

    Raises:
        Exception: the exception of a job, in its turn.
    """
    futures: queue.Queue[Future[_T] | None] = queue.Queue(ahead)
    stopped = threading.Event()
    submission: Future[None] = Future()

    def submit_all() -> None:
        try:
            for job in jobs:
                _put(futures, pool.submit(job), stopped)
                if stopped.is_set():
                    break
            submission.set_result(None)
        except BaseException as error:
            submission.set_exception(error)
        _put(futures, None, stopped)

    # Jobs use one thread each: the training step runs on the other cores. A thread adopts the number set last
    # when it first asks for it, so this thread asks before the pool sets 1.
    torch.set_num_threads(torch.get_num_threads())
    pool = ThreadPoolExecutor(threads, "read-ahead", initializer=torch.set_num_threads, initargs=(1,))
    submitter = threading.Thread(target=submit_all, name="submit-ahead", daemon=True)
    submitter.start()
    try:
        while (future := futures.get()) is not None:
            yield future.result()
        submission.result()
    finally:
        stopped.set()
        submitter.join()
        pool.shutdown(cancel_futures=True)


def _put(futures: queue.Queue[_T], item: _T, stopped: threading.Event) -> None:
    """Put an item into a queue, waiting for room, unless ``stopped`` is set."""
    while not stopped.is_set():
        try:
            futures.put(item, timeout=0.05)
        except queue.Full:
            continue
        return
