"""Where a training run stands, and those who are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from capvid.training.tasks import Prediction


@dataclass(frozen=True)
class EpochResult:
    """What one epoch gave.

    Attributes:
        epoch: its number, from 1.
        loss: mean training loss per word.
        cider: CIDEr-D on the validation split.
        best: whether that is the best so far.
        seconds: of training and validation together.
        captions_per_second: in training.
        samples: a few validation captions, by video id.
        waited: seconds for which training waited for its input.
    """

    epoch: int
    loss: float
    cider: float
    best: bool
    seconds: float
    captions_per_second: float
    samples: dict[str, Prediction]
    waited: float = 0.0


@dataclass(kw_only=True)
class Progress:
    """Where a run stands.

    Attributes:
        epoch: that is trained now, from 1.
        batch: how many batches of it are done.
        loss: sum over their words.
        words: number of these.
        best: the best epoch so far.
        log: the lines of ``metrics.jsonl``.
    """

    epoch: int = 1
    batch: int = 0
    loss: float = 0.0
    words: int = 0
    best: EpochResult | None = None
    log: list[str] = field(default_factory=list)

    def next_epoch(self, result: EpochResult) -> None:
        """Note the epoch that is done and go on to the next."""
        self.best = result if result.best else self.best
        self.epoch, self.batch, self.loss, self.words = self.epoch + 1, 0, 0.0, 0

    def begin(self, cider: float, samples: dict[str, Prediction]) -> None:
        """Note what a captioner that is trained already scores."""
        self.best = EpochResult(0, 0.0, cider, True, 0.0, 0.0, samples)

    def is_over(self, patience: int) -> bool:
        """Whether so many epochs have gone by without a better one."""
        return self.best is not None and self.epoch - 1 - self.best.epoch >= patience


class Reporter(Protocol):
    """Is told how training goes on."""

    def started(
        self, *, captions: int, videos: int, validation: int, words: int, batches: int, epoch: int
    ) -> None:
        """Training begins, or goes on, with ``epoch``: ``batches`` in each."""

    def stepped(self, *, epoch: int, batch: int, loss: float, captions_per_second: float) -> None:
        """One batch is done."""

    def finished_epoch(self, result: EpochResult) -> None:
        """One epoch is done, validated and saved."""


class NoReporter:
    """Tells nobody: for the processes beside the first one."""

    def started(self, **_: int) -> None:
        """Training begins."""

    def stepped(self, **_: float) -> None:
        """One batch is done."""

    def finished_epoch(self, result: EpochResult) -> None:
        """One epoch is done."""
