"""What each process learns from a batch, and how it comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from capvid.data.ahead import read_ahead
from capvid.data.batches import Batch
from capvid.text.vocabulary import PAD


@dataclass(frozen=True)
class Lessons:
    """What a process learns from its share of a batch.

    Attributes:
        parts: each with the weights of its words, if they have any.
        divisor: of the losses of all parts of all processes.
        count: words, or samples, of the whole batch: what the logged sum is divided by.
        shown: the sum that is logged, where it is not that of the losses.
    """

    parts: Sequence[tuple[Batch, Tensor | None]]
    divisor: float
    count: int
    shown: Tensor | None = None


@dataclass(frozen=True)
class Share:
    """A process's share of a batch.

    Attributes:
        number: of the batch in its epoch, from 1.
        captions: of the whole batch.
        words: of the whole batch, ends of sentences included.
        parts: of the share, one after another.
    """

    number: int
    captions: int
    words: int
    parts: Sequence[Any]


def spoken(parts: Sequence[Batch], accelerator: Accelerator) -> int:
    """The number of words, ends of sentences included, in the parts of all processes; at least 1."""
    mine = torch.stack([(part.targets != PAD).sum() for part in parts]).sum()
    return max(1, int(accelerator.reduce(mine)))


def shares_of(batches: Any, epoch: int, done: int, parts: int, accelerator: Accelerator) -> Iterator[Share]:
    """This process's shares of an epoch's batches, read ahead.

    Args:
        batches: of the whole data set.
        epoch: its number, from 1.
        done: batches of it that are left out.
        parts: in which a process takes its share.
        accelerator: how many processes there are, and which one this is.

    Raises:
        FeatureFileError: features cannot be read, when their turn comes.
    """
    count = accelerator.num_processes

    def job(number: int, plan: Any) -> Callable[[], Share]:
        most = min(parts, -(-len(plan) // count))  # further parts would all be empty
        mine = range(accelerator.process_index * most, (accelerator.process_index + 1) * most)
        readers = [plan.part(part, most * count) for part in mine]
        return lambda: Share(number, len(plan), plan.words, [read() for read in readers])

    plans = enumerate(batches.epoch(epoch), 1)
    return read_ahead(job(*item) for item in islice(plans, done, None))
