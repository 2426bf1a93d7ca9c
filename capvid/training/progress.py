"""Where a training run stands, and those who are told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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

    def record(self) -> dict[str, Any]:
        """The line of ``metrics.jsonl``."""
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            "val_cider": self.cider,
            "best": self.best,
            "seconds": round(self.seconds, 3),
            "captions_per_second": round(self.captions_per_second, 1),
            "seconds_waiting": round(self.waited, 3),
            "samples": self.samples,
        }


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Restore what was written of a run.

        Raises:
            ValueError, TypeError, KeyError: it is not the progress of a run.
        """
        best = None if values["best"] is None else EpochResult(**values["best"])
        progress = cls(**{**values, "best": best})
        whole = (progress.epoch, progress.batch, progress.words)
        if not all(type(number) is int and number >= 0 for number in whole) or progress.epoch < 1:
            raise ValueError("epoch, batch and words are not whole numbers")
        for line in progress.log:
            json.loads(line)
        return progress

    def next_epoch(self, result: EpochResult) -> None:
        """Note the epoch that is done and go on to the next."""
        self.best = result if result.best else self.best
        self.epoch, self.batch, self.loss, self.words = self.epoch + 1, 0, 0.0, 0

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """What ``metrics.jsonl`` says of each epoch."""
        return [json.loads(line) for line in self.log]

    def begin(self, cider: float, samples: dict[str, Prediction]) -> None:
        """Note what a captioner that is trained already scores."""
        self.best = EpochResult(0, 0.0, cider, True, 0.0, 0.0, samples)

    def is_over(self, patience: int) -> bool:
        """Whether so many epochs have gone by without a better one."""
        return self.best is not None and self.epoch - 1 - self.best.epoch >= patience


class Reporter(Protocol):
    """Is told how training goes on."""

    def started(
        self,
        *,
        captions: int,
        videos: int,
        views: int,
        validation: int,
        words: int,
        batches: int,
        epoch: int,
        batch: int,
    ) -> None:
        """Training begins, or goes on, with ``epoch``, of whose ``batches`` the first ``batch`` are done.

        It is on so many ``videos``, and ``views`` of them.
        """

    def stepped(
        self, *, epoch: int, batch: int, loss: float, captions_per_second: float, learning_rate: float
    ) -> None:
        """One batch is done; ``loss`` is the mean of the epoch so far, the rate that of the next batch."""

    def finished_epoch(self, result: EpochResult) -> None:
        """One epoch is done and validated; the state to resume from is written after this."""

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Training is over; ``scores`` are the test split's, none without one, as fractions."""


class Reporters:
    """Several reporters as one, told in their order; or none, for processes that need not be heard."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def started(self, **values: int) -> None:
        """Tell all of them."""
        for reporter in self.reporters:
            reporter.started(**values)

    def stepped(self, **values: Any) -> None:
        """Tell all of them."""
        for reporter in self.reporters:
            reporter.stepped(**values)

    def finished_epoch(self, result: EpochResult) -> None:
        """Tell all of them."""
        for reporter in self.reporters:
            reporter.finished_epoch(result)

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Tell all of them."""
        for reporter in self.reporters:
            reporter.finished(best, scores)
