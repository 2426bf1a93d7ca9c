"""Progress of a training run: epoch results, reporters, TensorBoard events and the plot."""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol

from capvid.errors import TrainingError, UsageError
from capvid.training.tasks import Prediction
from capvid.utils.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tensorboardX.proto.event_pb2 import Event


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
    """Receives the events of a training run."""

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
        """Training begins or resumes with ``epoch``, of whose ``batches`` the first ``batch`` are done."""

    def stepped(
        self, *, epoch: int, batch: int, loss: float, captions_per_second: float, learning_rate: float
    ) -> None:
        """One batch is done; ``loss`` is the mean of the epoch so far, the rate that of the next batch."""

    def finished_epoch(self, result: EpochResult) -> None:
        """One epoch is done and validated; the state to resume from is written after this."""

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Training is over; ``scores`` are fractions of the test split, none without one."""


class Reporters:
    """Several reporters as one, called in their order; or none, for processes that are not to be heard."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def _forward(self, event: str, *arguments: Any, **values: Any) -> None:
        for reporter in self.reporters:
            getattr(reporter, event)(*arguments, **values)

    def started(self, **values: int) -> None:
        """Forward to all."""
        self._forward("started", **values)

    def stepped(self, **values: Any) -> None:
        """Forward to all."""
        self._forward("stepped", **values)

    def finished_epoch(self, result: EpochResult) -> None:
        """Forward to all."""
        self._forward("finished_epoch", result)

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Forward to all."""
        self._forward("finished", best, scores)

    def started_trial(self, number: int, recipe: Any) -> None:
        """Forward to all; they follow a hyper-parameter search."""
        self._forward("started_trial", number, recipe)

    def finished_trial(self, trial: Any, *, best: bool) -> None:
        """Forward to all; they follow a hyper-parameter search."""
        self._forward("finished_trial", trial, best=best)


EVENTS = "events"
_NAME = "events.out.tfevents.{:06d}"  # TensorBoard reads them in the order of their names
_HEAD, _TAIL = 12, 4  # bytes of an event's length and its checksum, and of the checksum of its bytes


class Events:
    """Reporter that writes TensorBoard events; a context that closes the file.

    Tags are ``steps/...`` (the loss is the mean of the epoch so far), ``epochs/...`` and ``test/...``. A run
    that begins removes the events of the one before it; one that is resumed writes a further file.

    Args:
        folder: for the files; created if need be.
        every: least seconds between two points of steps; the last step of an epoch is always written.

    Raises:
        TrainingError: from all methods, where the events cannot be written.
    """

    def __init__(self, folder: Path, *, every: float = 1.0) -> None:
        self.folder, self.every = folder, every
        self._file: IO[bytes] | None = None
        self._batches = 0
        self._step = 0
        self._written = -every

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def started(self, *, batches: int, epoch: int, batch: int, **_: int) -> None:
        """Begin a file, and take back what older ones say of the steps to come."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._batches = batches
        self._step = (epoch - 1) * batches + batch
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            older = sorted(self.folder.glob("events.out.tfevents.*"))
            for path in older:
                if self._step:
                    _cut(path, self._step)
                else:
                    path.unlink()
            numbers = [int(path.suffix[1:]) for path in older if path.suffix[1:].isdecimal()]
            number = 1 + max(numbers, default=0) if self._step else 1
            self._file = (self.folder / _NAME.format(number)).open("xb", buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        self._write(Event(file_version="brain.Event:2"), step=0)
        self._write(Event(session_log=SessionLog(status=SessionLog.START)), step=self._step + 1)

    def stepped(
        self, *, epoch: int, batch: int, loss: float, captions_per_second: float, learning_rate: float
    ) -> None:
        """Write a point, if the last one is long enough ago."""
        self._step = (epoch - 1) * self._batches + batch
        now = time.monotonic()
        if now - self._written >= self.every or batch == self._batches:
            self._written = now
            rates = {"captions_per_second": captions_per_second, "learning_rate": learning_rate}
            self._scalars("steps", {"loss": loss, **rates}, self._step)

    def finished_epoch(self, result: EpochResult) -> None:
        """Write what the epoch gave, and what the captioner says."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import text

        values = {
            "loss": result.loss,
            "val_cider": result.cider,
            "seconds": result.seconds,
            "captions_per_second": result.captions_per_second,
        }
        self._scalars("epochs", values, self._step)
        # indented text is shown as it is, whatever signs are in it
        said = [
            f"    {video}: {caption if isinstance(caption, str) else '. '.join(caption)}"
            for video, caption in result.samples.items()
        ]
        self._write(Event(summary=text("epochs/samples", "\n".join(said))), step=self._step)

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Write the scores on the test split, a step beyond the last so that a resumed run replaces them."""
        if scores:
            self._scalars("test", scores, self._step + 1)

    def _scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=f"{group}/{name}", simple_value=float(value)) for name, value in values.items()
        ]
        self._write(Event(summary=Summary(value=points)), step=step)

    def _write(self, event: Event, *, step: int) -> None:
        """Append an event: its length and bytes, each followed by a checksum."""
        from tensorboardX.record_writer import masked_crc32c

        assert self._file is not None, "started comes first"
        event.wall_time, event.step = time.time(), step
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join(
            [length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))]
        )
        try:
            while record:  # a disk that is nearly full takes a part at first
                record = record[self._file.write(record) :]
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self.folder}: events cannot be written ({error.strerror})",
            remedy="make room or the folder writable, and go on with --resume",
        )


def _cut(path: Path, step: int) -> None:
    """Cut off a file what comes after ``step``, or is damaged."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    data, kept = path.read_bytes(), 0
    while kept + _HEAD <= len(data):
        (length,) = struct.unpack_from("<Q", data, kept)
        end = kept + _HEAD + length + _TAIL
        try:
            whole = end <= len(data) and Event.FromString(data[kept + _HEAD : end - _TAIL]).step <= step
        except DecodeError:
            whole = False
        if not whole:
            break
        kept = end
    os.truncate(path, kept)


SUFFIXES = (".eps", ".jpeg", ".jpg", ".pdf", ".png", ".ps", ".svg", ".tif", ".tiff", ".webp")
_SIZE, _DOTS = (8.0, 4.5), 150  # inches and dots per inch: 1200 x 675
_LOSS, _CIDER = "#0072B2", "#D55E00"  # of Okabe and Ito, told apart with any colour vision
_STEPS = [1, 2, 5, 10]  # between ticks, times a power of ten
_DOTTED = 40  # epochs up to which each has its dot


def check_plot(path: Path) -> None:
    """Raise UsageError unless an image can be drawn into such a file."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: no picture has the suffix {path.suffix!r}",
            remedy=f"choose {', '.join(SUFFIXES)}; .png, say",
        )
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", remedy="give the name of a file")


def save_plot(path: Path, rows: Sequence[Mapping[str, Any]], best: EpochResult, *, title: str) -> None:
    """Draw a run into a file, atomically.

    Args:
        path: image file; its suffix names the format.
        rows: records of the epochs, as in ``metrics.jsonl``.
        best: the best of them, or the score before fine-tuning.
        title: heading.

    Raises:
        UsageError: the file cannot be an image.
        OSError: it cannot be written.
    """
    check_plot(path)
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # on a first run it announces that it looks for fonts
    try:
        with atomic_path(path) as temporary:
            figure = draw(rows, best, title=title)
            figure.savefig(temporary, format=path.suffix[1:].lower())
    finally:
        log.setLevel(level)


def draw(rows: Sequence[Mapping[str, Any]], best: EpochResult, *, title: str) -> Figure:
    """Draw a run as a figure of two panels; CIDEr-D is times 100, as papers print it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    epochs = [row["epoch"] for row in rows]
    scored = [(best.epoch, best.cider)] if best.epoch == 0 else []  # before fine-tuning
    scored += [(row["epoch"], row["val_cider"]) for row in rows]
    figure = Figure(figsize=_SIZE, dpi=_DOTS, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    dot = "o" if len(scored) <= _DOTTED else ""
    upper.plot(epochs, [row["loss"] for row in rows], color=_LOSS, marker=dot, markersize=4)
    ciders = [100 * cider for _, cider in scored]
    lower.plot([epoch for epoch, _ in scored], ciders, color=_CIDER, marker=dot, markersize=4)
    star = {"marker": "*", "markersize": 15, "markerfacecolor": _CIDER, "markeredgecolor": "black"}
    label = f"best: epoch {best.epoch}, {100 * best.cider:.1f}"
    lower.plot([best.epoch], [100 * best.cider], linestyle="", label=label, **star)
    for panel in (upper, lower):
        panel.axvline(best.epoch, color="0.6", linestyle="--", linewidth=1, zorder=0)
        panel.grid(axis="y", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
        panel.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
        panel.margins(x=0.03, y=0.12)
    upper.set_ylabel("training loss", color=_LOSS)
    lower.set_ylabel("val CIDEr-D (times 100)", color=_CIDER)
    lower.set_xlabel("epoch")
    lower.xaxis.set_major_locator(MaxNLocator(12, steps=_STEPS, integer=True, min_n_ticks=1))
    if len(scored) == 1:
        lower.set_xlim(scored[0][0] - 0.5, scored[0][0] + 0.5)
    lower.legend(loc="best")
    upper.set_title(title)
    return figure
