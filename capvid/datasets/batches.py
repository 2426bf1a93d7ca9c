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
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from capvid.captioners.checkpoint import limited
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
            return replace(batch, targets=torch.full_like(batch.targets, PAD), soft=None)

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
        tokens = teacher_tokens([row.example.captions[row.choice] for row in rows])
        soft = [row.example.soft[row.choice] for row in rows if row.example.soft]
        if not soft:
            return Batch(features, mask, *tokens)
        words, probabilities = (torch.cat(parts) for parts in zip(*soft, strict=True))
        return Batch(features, mask, *tokens, soft=(words.long(), probabilities.float()))


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
    futures: queue.Queue[Future[_T] | None] = queue.Queue(depth)
    stopped = threading.Event()

    def put(future: Future[_T] | None) -> None:
        """Wait for room in the queue, unless the consumer has stopped."""
        while not stopped.is_set():
            try:
                return futures.put(future, timeout=0.05)
            except queue.Full:
                continue

    def submit_all() -> None:
        try:
            for job in jobs:
                put(pool.submit(job))
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:
            failure: Future[_T] = Future()
            failure.set_exception(error)
            put(failure)

    # Jobs use one thread each: the training step runs on the other cores. A thread adopts the number set last
    # when it first asks for it, so this thread asks before the pool sets 1.
    torch.set_num_threads(torch.get_num_threads())
    pool = ThreadPoolExecutor(threads, "prefetch", initializer=torch.set_num_threads, initargs=(1,))
    submitter = threading.Thread(target=submit_all, name="prefetch-submit", daemon=True)
    submitter.start()
    try:
        while (future := futures.get()) is not None:
            yield future.result()
    finally:
        stopped.set()
        submitter.join()
        pool.shutdown(cancel_futures=True)
