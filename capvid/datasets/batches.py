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
    """Captions with the frames of their videos; for paragraphs there are S segments after B.

    Attributes:
        features: (B, T, D) or (B, S, T, D), zero beyond a video's frames, in half precision.
        mask: (B, T) or (B, S, T), True at frames.
        inputs: (B, L) or (B, S, L) the words, from the start token on.
        targets: of the same shape, the words after them, up to the end token; padding after that.
        soft: words and probabilities (N, k) to learn at the N real targets, row by row; None without any.
        paragraphs: of paragraphs, all of each video in numbers, the one above first.
        remembered: (B, S - 1, L) sentences, from the start token on, that the segments after them remember;
            None: those of ``inputs``.
    """

    features: Tensor
    mask: Tensor
    inputs: Tensor
    targets: Tensor
    soft: tuple[Tensor, Tensor] | None = None
    paragraphs: Sequence[Sequence[Sequence[list[int]]]] = ()
    remembered: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Batch:
        """Move the batch to ``device``, and its features into single precision; maps stay, for their size."""
        features = self.features.to(device, non_blocking=True)
        maps = features.dim() == 3 + self.inputs.dim() - 1
        rest: dict[str, Any] = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("mask", "inputs", "targets")
        }
        if self.soft is not None:
            rest["soft"] = tuple(tensor.to(device, non_blocking=True) for tensor in self.soft)
        return replace(self, features=features if maps else features.float(), **rest)


def thinned(length: int, count: int, dropout: float, generator: torch.Generator) -> Tensor:
    """Draw the indices of at most ``count`` of ``length`` frames, in order.

    Each is left out at rate ``dropout``, but never all.
    """
    if not length:
        return torch.empty(0, dtype=torch.long)
    kept = torch.randperm(length, generator=generator)[:count]
    stay = torch.rand(len(kept), generator=generator) >= dropout
    stay[0] = True
    return kept[stay].sort().values


_Example = TypeVar("_Example")
_Drawn = Any  # the frames that are seen this time: numbers (T,), or those of each segment


@dataclass(frozen=True)
class Row(Generic[_Example]):
    """One of a batch's captions: whose, which, and the frames that go with it."""

    example: _Example
    choice: int
    drawn: _Drawn


@dataclass(frozen=True)
class Plan(Generic[_Example]):
    """What a batch is made of, drawn but not read yet.

    Attributes:
        rows: its captions, or paragraphs; none of a batch that has no share for a process.
        words: of the whole batch, ends of sentences included.
        make: reads the frames and puts the batch together.
    """

    rows: Sequence[Row[_Example]]
    words: int
    make: Callable[[Sequence[Row[_Example]]], Batch]

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, number: int, parts: int) -> Callable[[], Batch]:
        """Return a function that reads part ``number`` of ``parts``; an empty part gets an empty caption."""
        rows = self.rows[number::parts]
        return partial(self.make, rows) if rows else partial(self._silent, self.rows[:1])

    def _silent(self, rows: Sequence[Row[_Example]]) -> Batch:
        batch = self.make(rows)
        return replace(batch, targets=torch.full_like(batch.targets, PAD), soft=None)


class _Batches(ABC, Generic[_Example]):
    """Batches of one epoch after another; the same seed and epoch always give the same batches.

    Args:
        examples: the videos, and views of them, to learn from.
        batch_size: captions, or paragraphs, per batch.
        captions_per_video: how many are drawn for each example in an epoch, without repetition.
        max_frames: frames drawn from videos, or segments, that have more.
        first: take the first ones instead of drawing.
        frame_dropout: rate at which frames are left out besides; one at least stays.
        seed: of all the drawing.
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
        """Batches per epoch."""
        return -(-self.captions // self.batch_size)

    @abstractmethod
    def sizes(self, example: _Example) -> Sequence[int]:
        """Return the length of each caption or paragraph of an example, by which batches are sorted."""

    @abstractmethod
    def words(self, example: _Example, choice: int) -> int:
        """Return the number of words of a caption or paragraph, ends of sentences included."""

    @abstractmethod
    def drawn(self, example: _Example, generator: torch.Generator) -> _Drawn:
        """Draw frames of a video or of its segments."""

    @abstractmethod
    def batch(self, rows: Sequence[Row[_Example]]) -> Batch:
        """Read the frames and put everything into one batch."""

    def epoch(self, number: int) -> Iterator[Plan[_Example]]:
        """Batches of epoch ``number``: captions of like length together, in random order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        drawn = [
            (index, choice, sizes[choice])
            for index, sizes in enumerate(map(self.sizes, self.examples))
            for choice in torch.randperm(len(sizes), generator=generator)[: self.captions_per_video].tolist()
        ]
        lengths = torch.tensor([length for *_, length in drawn])
        # Sorted by length with noise of two words: little padding, and no batch of one length only.
        noise = torch.rand(len(drawn), generator=generator) * 2
        order = (lengths + noise).argsort().split(self.batch_size)
        for batch in torch.randperm(len(order), generator=generator).tolist():
            chosen = [drawn[row] for row in order[batch].tolist()]
            rows = [
                Row(self.examples[index], choice, self.drawn(self.examples[index], generator))
                for index, choice, _ in chosen
            ]
            words = sum(self.words(row.example, row.choice) for row in rows)
            yield Plan(rows, words, self.batch)

    def thinned(self, length: int, generator: torch.Generator) -> Tensor:
        """Draw the indices (T,) of frames of a video or segment."""
        length = min(length, self.max_frames) if self.first else length
        return thinned(length, self.max_frames, self.frame_dropout, generator)


class TrainingBatches(_Batches[Example]):
    """Batches of captions."""

    def sizes(self, example: Example) -> Sequence[int]:
        """Return the number of words of each caption."""
        return [len(caption) for caption in example.captions]

    def words(self, example: Example, choice: int) -> int:
        """Return the number of words of a caption and its end."""
        return len(example.captions[choice]) + 1

    def drawn(self, example: Example, generator: torch.Generator) -> Tensor:
        """Draw frames of the video."""
        return self.thinned(example.length, generator)

    def batch(self, rows: Sequence[Row[Example]]) -> Batch:
        """Return a batch of captions with their videos."""
        features, mask = pad_frames([row.example.frames[row.drawn] for row in rows])
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
        """Return the number of words of all sentences of a paragraph and their ends."""
        return sum(len(sentence) + 1 for sentence in example.paragraphs[choice])

    def drawn(self, example: ParagraphExample, generator: torch.Generator) -> list[Tensor]:
        """Draw frames of each segment."""
        return [rows[self.thinned(len(rows), generator)] for rows in example.rows]

    def batch(self, rows: Sequence[Row[ParagraphExample]]) -> Batch:
        """Return a batch of paragraphs with their segments; missing segments have no frames and no words."""
        clips = []
        for row in rows:
            frames = row.example.frames
            clips.append([frames[indices] for indices in row.drawn])
        features, mask, _ = pad_segments(clips)  # (B, S, T, D), (B, S, T)
        segments = mask.shape[1]
        paragraphs = [_first(row.choice, row.example.paragraphs) for row in rows]
        taught = in_segments([drawn for drawn, *_ in paragraphs], segments)
        return Batch(features, mask, *taught, paragraphs=paragraphs)


_Item = TypeVar("_Item")


def _first(choice: int, items: Sequence[_Item]) -> list[_Item]:
    """Return the items with number ``choice`` before the others."""
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
        jobs: drawn from in a thread of their own, one after another.
        threads: that do them.
        ahead: results that wait at most.

    Raises:
        Exception: whatever a job raises, when its turn comes.
    """
    futures: queue.Queue[Future[_T] | None] = queue.Queue(ahead)
    stopped = threading.Event()
    drawing: Future[None] = Future()

    def draw() -> None:
        try:
            for job in jobs:
                _put(futures, pool.submit(job), stopped)
                if stopped.is_set():
                    break
            drawing.set_result(None)
        except BaseException as error:
            drawing.set_exception(error)
        _put(futures, None, stopped)

    # One thread to a job: the processor's others belong to the step that goes on meanwhile. At the first
    # question a thread takes over the number that was set last, so this one settles its own before.
    torch.set_num_threads(torch.get_num_threads())
    pool = ThreadPoolExecutor(threads, "read-ahead", initializer=torch.set_num_threads, initargs=(1,))
    drawer = threading.Thread(target=draw, name="draw-ahead", daemon=True)
    drawer.start()
    try:
        while (future := futures.get()) is not None:
            yield future.result()
        drawing.result()
    finally:
        stopped.set()
        drawer.join()
        pool.shutdown(cancel_futures=True)


def _put(futures: queue.Queue[_T], item: _T, stopped: threading.Event) -> None:
    """Wait for room, unless nobody takes anything any more."""
    while not stopped.is_set():
        try:
            futures.put(item, timeout=0.05)
        except queue.Full:
            continue
        return
