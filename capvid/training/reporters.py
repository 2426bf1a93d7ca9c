"""Reports of a training run: the events a reporter receives, TensorBoard files and the plot."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capvid.errors import TrainingError, UsageError
from capvid.utils.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna.trial import FrozenTrial
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

    from capvid.training.recipe import Recipe


@dataclass(frozen=True)
class EpochResult:
    """Result of one epoch."""

    epoch: int  # from 1; 0 is a captioner before fine-tuning
    loss: float  # mean per word
    val_loss: float | None  # the same on the validation captions, without dropout and smoothing
    cider: float  # CIDEr-D on the validation split
    best: bool  # so far
    seconds: float  # of training and validation
    captions_per_second: float  # in training
    samples: dict[str, Any]  # a few validation captions by video id
    waited: float = 0.0  # seconds, for input

    def record(self) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``."""
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            "val_loss": self.val_loss,
            "val_cider": self.cider,
            "best": self.best,
            "seconds": round(self.seconds, 3),
            "captions_per_second": round(self.captions_per_second, 1),
            "seconds_waiting": round(self.waited, 3),
            "samples": self.samples,
        }


class Reporter:
    """Receives the events of a training run; the methods of this class ignore them."""

    def started(self, *, batches: int, epoch: int, batch: int, **counts: int) -> None:
        """Receive the start of training, in ``epoch`` after ``batch`` of its ``batches``.

        ``counts`` are ``captions`` per epoch, ``videos``, ``views``, ``validation`` videos and ``words``.
        """

    def stepped(
        self, *, epoch: int, batch: int, loss: float, captions_per_second: float, learning_rate: float
    ) -> None:
        """Receive a batch; ``loss`` is the mean of the epoch so far, the rate that of the next batch."""

    def finished_epoch(self, result: EpochResult) -> None:
        """Receive a trained and validated epoch; its state is saved afterwards."""

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Receive the end of training; ``scores`` are fractions on the test split, empty without one."""

    def started_search(self, finished: Sequence[FrozenTrial]) -> None:
        """Receive the start of a hyper-parameter search, after the ``finished`` trials."""

    def started_trial(self, number: int, recipe: Recipe) -> None:
        """Receive the start of a trial, whose values are in ``recipe``."""

    def finished_trial(self, trial: FrozenTrial, *, best: bool) -> None:
        """Receive a recorded trial; ``best`` if it is the best so far."""


class Reporters(Reporter):
    """Several reporters as one, called in order."""

    def __init__(self, *reporters: Reporter) -> None:
        def forward(event: str, *arguments: Any, **values: Any) -> None:
            for reporter in reporters:
                getattr(reporter, event)(*arguments, **values)

        for event in [name for name in vars(Reporter) if not name.startswith("_")]:
            setattr(self, event, partial(forward, event))


EVENTS = "events"
_NAME = "events.out.tfevents.{:06d}"  # TensorBoard reads files in the order of their names


class Events(Reporter):
    """Reporter that writes TensorBoard events.

    Tags are ``steps/...`` (the loss is the mean of the epoch so far), ``epochs/...`` and ``test/...``. A new
    run removes the events of an older one; a resumed run adds a file, whose start makes TensorBoard discard
    the later steps of older files.

    Records are written at once. ``tensorboardX.SummaryWriter`` writes them in a thread: on a full disk that
    thread dies, and training waits forever for its queue.

    Args:
        folder: folder of the files; created if needed.
        every: minimum seconds between two points of steps; an epoch's last step is always written.
    """

    def __init__(self, folder: Path, *, every: float = 1.0) -> None:
        self.folder, self.every = folder, every
        self._writer: RecordWriter | None = None
        self._batches = self._step = 0
        self._last_write = -every

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def started(self, *, batches: int, epoch: int, batch: int, **counts: int) -> None:
        """Begin a file, and remove the files of an older run."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter

        self._batches = batches
        self._step = (epoch - 1) * batches + batch
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            older = sorted(self.folder.glob("events.out.tfevents.*"))
            if not self._step:
                for path in older:
                    path.unlink()
                older = []
            numbers = [int(path.suffix[1:]) for path in older if path.suffix[1:].isdecimal()]
            self._writer = RecordWriter(str(self.folder / _NAME.format(1 + max(numbers, default=0))))
        except OSError as error:
            raise self._failure(error) from error
        version = Event(file_version="brain.Event:2")
        self._write(version, Event(session_log=SessionLog(status=SessionLog.START)), step=self._step + 1)

    def stepped(
        self, *, epoch: int, batch: int, loss: float, captions_per_second: float, learning_rate: float
    ) -> None:
        """Write a point, unless the last one was written less than ``every`` seconds ago."""
        self._step = (epoch - 1) * self._batches + batch
        now = time.monotonic()
        if now - self._last_write >= self.every or batch == self._batches:
            self._last_write = now
            rates = {"captions_per_second": captions_per_second, "learning_rate": learning_rate}
            self._scalars("steps", {"loss": loss, **rates}, self._step)

    def finished_epoch(self, result: EpochResult) -> None:
        """Write the metrics of the epoch and its sample captions."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import text

        values = {"loss": result.loss, "val_cider": result.cider, "seconds": result.seconds}
        values |= {} if result.val_loss is None else {"val_loss": result.val_loss}
        speed = {"captions_per_second": result.captions_per_second}
        self._scalars("epochs", {**values, **speed}, self._step)
        # TensorBoard renders Markdown; indented lines are shown verbatim
        lines = [
            f"    {video}: {caption if isinstance(caption, str) else '. '.join(caption)}"
            for video, caption in result.samples.items()
        ]
        self._write(Event(summary=text("epochs/samples", "\n".join(lines))), step=self._step)

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Write the scores on the test split, one step after the last so that a resumed run replaces them."""
        if scores:
            self._scalars("test", scores, self._step + 1)
        self.close()

    def _scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=f"{group}/{name}", simple_value=float(value)) for name, value in values.items()
        ]
        self._write(Event(summary=Summary(value=points)), step=step)

    def _write(self, *events: Event, step: int) -> None:
        assert self._writer is not None, "started comes first"
        try:
            for event in events:
                event.wall_time, event.step = time.time(), step
                self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self.folder}: events cannot be written ({error.strerror})",
            remedy="free disk space or make the folder writable, then continue with --resume",
        )


SUFFIXES = (".eps", ".jpeg", ".jpg", ".pdf", ".png", ".ps", ".svg", ".tif", ".tiff", ".webp")
_SIZE, _DPI = (8.0, 4.5), 150  # inches and dots per inch: 1200 x 675
_LOSS, _CIDER = "#0072B2", "#D55E00"  # of Okabe and Ito, for every color vision
_STEPS = [1, 2, 5, 10]  # between ticks, times a power of ten
_MAX_DOTS = 40  # epochs; longer curves have no dots


def check_plot(path: Path) -> None:
    """Raise UsageError unless an image can be drawn into such a file."""
    if path.suffix.lower() not in SUFFIXES:
        problem = f"{path}: no image format has the suffix {path.suffix!r}"
        raise UsageError(problem, remedy=f"choose {', '.join(SUFFIXES)}; .png, say")
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", remedy="give the name of a file")


def save_plot(path: Path, rows: Sequence[Mapping[str, Any]], best: tuple[int, float], *, title: str) -> None:
    """Draw a run into an image file, atomically; the other arguments are those of :func:`draw`."""
    check_plot(path)
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # the first run logs that it builds the font cache
    try:
        with atomic_path(path) as temporary:
            figure = draw(rows, best, title=title)
            figure.savefig(temporary, format=path.suffix[1:].lower())
    finally:
        log.setLevel(level)


def draw(rows: Sequence[Mapping[str, Any]], best: tuple[int, float], *, title: str) -> Figure:
    """Draw the epochs ``rows`` of a run, and the best epoch with its CIDEr-D, as a figure of two panels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    epoch, cider = best[0], 100 * best[1]
    epochs = [row["epoch"] for row in rows]
    scored = [(0, cider)] if epoch == 0 else []  # before fine-tuning
    scored += [(row["epoch"], 100 * row["val_cider"]) for row in rows]
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    dot = "o" if len(scored) <= _MAX_DOTS else ""
    upper.plot(epochs, [row["loss"] for row in rows], color=_LOSS, marker=dot, markersize=4)
    lower.plot(*zip(*scored, strict=True), color=_CIDER, marker=dot, markersize=4)
    star = {"marker": "*", "markersize": 15, "markerfacecolor": _CIDER, "markeredgecolor": "black"}
    lower.plot([epoch], [cider], linestyle="", label=f"best: epoch {epoch}, {cider:.1f}", **star)
    for panel in (upper, lower):
        panel.axvline(epoch, color="0.6", linestyle="--", linewidth=1, zorder=0)
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
