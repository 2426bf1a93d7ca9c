"""``capvid train --search``: random search, a line per trial and a table of all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capvid.cli.captioner import TrainingProgress
from capvid.errors import UsageError
from capvid.escaping import terminal

if TYPE_CHECKING:
    import torch

    from capvid.data.captions import CaptionedVideo
    from capvid.features.store import FeatureStore
    from capvid.training.loop import Trainer
    from capvid.training.progress import EpochResult, Reporter
    from capvid.training.recipe import Recipe
    from capvid.training.search import Trial

UNBOUNDED = 10_000  # columns, where stdout is no terminal


def check_search(
    recipe: Recipe, trials: int | None, *, folder: Path, self_critical: Path | None, resume: bool
) -> None:
    """See that what is asked for goes together, and with what is in the folder.

    Raises:
        UsageError: it does not.
    """
    from capvid.training.search import SEARCH, check_ranges

    searched = (folder / SEARCH).exists()
    if trials is None:
        if resume and searched:
            raise UsageError(f"{folder}: holds a search", remedy="give --search N to go on with it")
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--search trains in one process", remedy="start it without accelerate launch")
    if self_critical is not None:
        raise UsageError("--search and --self-critical exclude each other", remedy="give one of them")
    check_ranges(recipe)
    if resume and not searched and any((folder / name).exists() for name in ("best", "last")):
        raise UsageError(
            f"{folder}: holds a training run that is no search",
            remedy="leave out --search, or choose another -o",
        )


def train_trials(
    recipe: Recipe,
    trials: int,
    *,
    videos: Sequence[CaptionedVideo],
    store: FeatureStore,
    folder: Path,
    resume: bool,
    device: torch.device,
    value_width: int,
) -> None:
    """Train by values drawn from the recipe's ranges, ``trials`` times, and make the best the folder's run.

    Raises:
        CapvidError: the search in the folder is another one, the data cannot be used, or all trials failed.
    """
    from capvid.training.search import Search

    reporter = _Progress(trials, folder)
    search = Search(
        recipe,
        trials=trials,
        videos=videos,
        store=store,
        folder=folder,
        make=partial(_trainer, device=device, value_width=value_width),
        reporter=reporter,
        resume=resume,
    )
    with reporter:
        reporter.goes_on(search.finished)
        best, _ = search.run()
    print_trials(search.finished)
    minutes = (time.monotonic() - reporter.begun) / 60
    reporter.console.print(
        terminal(f"best: trial {best.number}, after {minutes:.1f} min in all; saved in {folder / 'best'}"),
        markup=False,
        soft_wrap=True,
    )


def _trainer(recipe: Recipe, *, folder: Path, reporter: Reporter, **options: Any) -> Trainer:
    """The trainer of a trial, which leaves events as any other does."""
    from capvid.training.events import EVENTS, Events
    from capvid.training.loop import Trainer
    from capvid.training.progress import Reporters

    told = Reporters(reporter, Events(folder / EVENTS))
    return Trainer(recipe, folder=folder, reporter=told, **options)


def print_trials(trials: Sequence[Trial]) -> None:
    """Print the table of all trials on stdout, the best first and those that failed last."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    options = list(trials[0].values)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in ("trial", "val CIDEr-D", "epoch", "seconds", *(o.partition(".")[2] for o in options)):
        table.add_column(name.replace("_", "\n").replace("val ", "val\n"), justify="right", overflow="fold")
    ranked = sorted(trials, key=lambda t: (t.val_cider is None, -(t.val_cider or 0.0), t.number))
    for trial in ranked:
        score = "failed" if trial.val_cider is None else f"{100 * trial.val_cider:.1f}"
        drawn = [_short(trial.values[option]) for option in options]
        table.add_row(str(trial.number), score, str(trial.epoch or "-"), f"{trial.seconds:.0f}", *drawn)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=UNBOUNDED)
    console.print(table)
    console.print()


class _Progress(TrainingProgress):
    """A search on the terminal: each trial's epochs, a line when it is over, a table at the end."""

    def __init__(self, trials: int, folder: Path) -> None:
        super().__init__(epochs=0, folder=folder)
        self.trials, self.number = trials, 0
        self.told = False  # what there is to learn from

    def goes_on(self, finished: Sequence[Trial]) -> None:
        """Say how many trials are finished already, if there are any."""
        if finished:
            self.console.print(f"{len(finished)} trials are finished already")

    def started_trial(self, number: int, recipe: Recipe) -> None:
        """Set the bar back."""
        self.number, self.epochs = number, recipe.training.epochs
        self.bar.reset(self.task, total=None, loss="-", speed="-", description=self._place("reading"))

    def started(self, *, batches: int, epoch: int, **counts: int) -> None:
        """Say what there is to learn from, at the first trial only."""
        begun = self.begun
        if self.told:
            self.batches = batches
            self.bar.update(self.task, total=batches * self.epochs)
        else:
            super().started(batches=batches, epoch=epoch, **counts)
        self.told, self.begun = True, begun

    def stepped(self, *, epoch: int, **values: Any) -> None:
        """Move the bar."""
        super().stepped(epoch=epoch, **values)
        self.bar.update(self.task, description=self._place(f"epoch {epoch}/{self.epochs}"))

    def finished_epoch(self, result: EpochResult) -> None:
        """Print the epoch's line, below which its trial's follows."""
        self.console.print(
            f"  epoch {result.epoch:3d}  loss {result.loss:.3f}  val CIDEr-D {result.cider:.3f}  "
            f"{result.seconds:.0f} s"
        )

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Say nothing: the trial's line follows."""

    def finished_trial(self, trial: Trial, *, best: bool) -> None:
        """Print the trial's line."""
        score = (
            f"failed ({trial.cause})"
            if trial.val_cider is None
            else f"val CIDEr-D {trial.val_cider:.3f}{' *' if best else '  '}"
        )
        line = f"trial {trial.number}/{self.trials}  {score}  {_said(trial.values)}"
        self.console.print(terminal(line), markup=False, soft_wrap=True)

    def _place(self, what: str) -> str:
        return f"trial {self.number}/{self.trials}  {what}"


def _said(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{name.partition('.')[2]} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
