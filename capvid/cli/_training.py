"""``capvid train`` for captioners: from data, features or videos to a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capvid.cli._options import RuntimeOptions
from capvid.cli._progress import Batch, check_writable_folder, training_bar
from capvid.cli._terminal import print_line
from capvid.cli.extract import ExtractionJob, extract_into, read_sampling
from capvid.errors import DataError, UsageError
from capvid.utils.escaping import terminal

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from rich.console import Console

    from capvid.datasets.dataset import CaptionedVideo
    from capvid.features.feature_store import FeatureStore
    from capvid.training.evaluation import Evaluation
    from capvid.training.hyperparameter_search import Trial
    from capvid.training.recipe import Recipe
    from capvid.training.reporters import EpochResult, Reporter
    from capvid.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a captioner is trained on, as the command line gives it.

    Attributes:
        data: specs of data sets.
        features: folders and files of features; either these or videos.
        values: features that are a key-value memory's values.
        videos: files and folders, whose features are extracted first.
        backbones: that make them.
        sampling: which frames of the videos.
        weights: of the backbones: a file, or the folder they are in.
        skip_bad: leave out rows of the data that cannot be used.
    """

    data: Sequence[str]
    features: Sequence[str] = ()
    values: Sequence[str] = ()
    videos: Sequence[Path] = ()
    backbones: Sequence[str] = ()
    sampling: str | None = None
    weights: Path | None = None
    skip_bad: bool = False


def train_captioner(
    recipe: Recipe,
    inputs: Inputs,
    *,
    folder: Path,
    device: str,
    self_critical: Path | None,
    search: int | None,
    resume: bool,
    overwrite: bool,
    plot: Path | None = None,
) -> None:
    """Train a captioner, or fine-tune that of the run ``self_critical``, and write the run's folder.

    With ``search``, so many are trained by values drawn from the recipe's ranges, and the best is the run.

    Raises:
        UsageError: options that do not go together, or a folder that holds a run.
        CapvidError: the data, features or videos cannot be used.
    """
    if bool(inputs.features) == bool(inputs.videos):
        raise UsageError(
            f"{recipe.name} trains a captioner: it needs --features or --videos, and not both",
            remedy="see capvid train --help",
        )
    if (inputs.backbones or inputs.sampling) and not inputs.videos:
        raise UsageError("--backbone and --sampling are for --videos", remedy="leave them out")
    from capvid.training.hyperparameter_search import check_search
    from capvid.training.optimization import accelerator_on, device_of
    from capvid.training.run_folder import check_free
    from capvid.utils.device import resolve_device

    check_free(folder, resume=resume, overwrite=overwrite)
    if plot is not None:
        _check_plot(plot)
    check_search(recipe, search, folder=folder, self_critical=self_critical is not None, resume=resume)

    place = resolve_device(device)
    accelerator = accelerator_on(place)
    with _heard(accelerator):
        _train(
            recipe,
            inputs,
            folder,
            device=device_of(accelerator, place),
            accelerator=accelerator,
            self_critical=self_critical,
            search=search,
            resume=resume,
            overwrite=overwrite,
            plot=plot,
        )
    if accelerator.num_processes > 1:
        accelerator.end_training()


@contextmanager
def _heard(accelerator: Accelerator) -> Iterator[None]:
    """Let only the first of several processes print; errors of all are."""
    with ExitStack() as stack:
        if not accelerator.is_main_process:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def _train(
    recipe: Recipe,
    inputs: Inputs,
    folder: Path,
    *,
    device: torch.device,
    accelerator: Accelerator,
    self_critical: Path | None,
    search: int | None,
    resume: bool,
    overwrite: bool,
    plot: Path | None,
) -> None:
    """Train, and print and draw what came out."""
    from capvid.features.feature_store import FeatureStore
    from capvid.training.hyperparameter_search import forget_search
    from capvid.training.reporters import EVENTS, Events, Reporters
    from capvid.training.run_folder import copy_weights

    videos, features = _prepared(inputs, folder, device, accelerator)
    store = FeatureStore([*features, *inputs.values])
    if store.incomplete and recipe.data.views:
        count = len(store.incomplete)
        views = "1 view lacks a stream and is" if count == 1 else f"{count} views lack a stream and are"
        print_line(f"note: {views} left out ({store.incomplete[0]})", err=True)
    if inputs.weights is not None and accelerator.is_main_process:
        copy_weights(inputs.weights, store.header, folder)
    make, epochs = _trainer(recipe, self_critical)
    width = FeatureStore(inputs.values).header.width if inputs.values else 0
    options: dict[str, Any] = {"videos": videos, "store": store, "folder": folder, "resume": resume}
    options |= {"device": device, "value_width": width}
    if search is not None:
        train_trials(recipe, search, **options)
        conclude(folder, title=recipe.name, plot=plot)
        return
    with TrainingProgress(epochs, folder) as terminal, Events(folder / EVENTS) as events:
        reporter = Reporters(terminal, events) if accelerator.is_main_process else Reporters()
        trainer = make(reporter=reporter, **options)
        if overwrite and accelerator.is_main_process:
            forget_search(folder)
        trainer.run()
    if accelerator.is_main_process:
        conclude(folder, title=recipe.name, plot=plot)


def _prepared(
    inputs: Inputs, folder: Path, device: torch.device, accelerator: Accelerator
) -> tuple[list[CaptionedVideo], Sequence[str]]:
    """Read the data and, of videos, extract the features; gives the data and where their features are."""
    data = _load(inputs.data, skip_bad=inputs.skip_bad)
    if not inputs.videos:
        return data, inputs.features

    made = folder / "features"
    kept = extract_features_of(
        data,
        inputs.videos,
        made,
        backbones=inputs.backbones or ["capvid-small"],
        sampling=inputs.sampling,
        weights=inputs.weights,
        device=device,
        accelerator=accelerator,
    )
    return kept, [str(made)]


def _trainer(recipe: Recipe, self_critical: Path | None) -> tuple[Callable[..., Trainer], int]:
    """What makes the trainer of data and features, and how many epochs there are at most."""
    if self_critical is None:
        from capvid.training.trainer import Trainer

        return partial(Trainer, recipe), recipe.training.epochs
    from capvid.captioners.checkpoint import load_checkpoint
    from capvid.training.self_critical import SelfCriticalTrainer

    start = load_checkpoint(self_critical)
    return partial(SelfCriticalTrainer, recipe, start=start), recipe.self_critical.epochs


def _load(specs: Sequence[str], *, skip_bad: bool) -> list[CaptionedVideo]:
    """Read the data sets; rows that are skipped, and what else is worth knowing, are said on stderr."""
    from capvid.datasets.loading import load_data

    loaded = load_data(specs, skip_bad=skip_bad)
    for note in loaded.notes:
        print_line(f"note: {note}", err=True)
    if loaded.skipped:
        rows = "1 row was" if len(loaded.skipped) == 1 else f"{len(loaded.skipped)} rows were"
        print_line(f"warning: {rows} left out ({loaded.skipped[0]}); see capvid data check", err=True)
    return loaded.videos


def _check_plot(path: Path) -> None:
    """See before training that the picture can be drawn at its end.

    Raises:
        UsageError: it cannot.
    """
    from capvid.training.reporters import check_plot

    check_plot(path)
    check_writable_folder(path.parent)


class TrainingProgress:
    """Training on the terminal: a bar on a terminal, one line per epoch anywhere, all on stderr."""

    def __init__(self, epochs: int, folder: Path) -> None:
        from rich.console import Console

        self.epochs, self.folder = epochs, folder
        self.begun = time.monotonic()
        self.console = Console(stderr=True, highlight=False)
        self.bar = training_bar(self.console, "loss {task.fields[loss]}  {task.fields[speed]} captions/s")
        self.task = self.bar.add_task("reading", total=None, loss="-", speed="-")

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        if kind is KeyboardInterrupt:
            line = f"interrupted; --resume goes on with what {self.folder} keeps"
            self.console.print(terminal(line), markup=False, soft_wrap=True)

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
        """Say what there is to learn from."""
        self.begun = time.monotonic()
        self.batches = batches
        self.bar.update(self.task, total=batches * self.epochs, description=f"epoch {epoch}/{self.epochs}")
        if 1 < epoch <= self.epochs:
            self.console.print(f"goes on with epoch {epoch}", soft_wrap=True)
        self.console.print(
            f"{videos} videos{f' and {views} views of them' if views else ''}, "
            f"{captions} captions an epoch, {words} words; "
            f"{validation} videos to validate on",
            soft_wrap=True,
        )

    def stepped(
        self, *, epoch: int, batch: int, loss: float, captions_per_second: float, learning_rate: float
    ) -> None:
        """Move the bar."""
        self.bar.update(
            self.task,
            completed=(epoch - 1) * self.batches + batch,
            description=f"epoch {epoch}/{self.epochs}",
            loss=f"{loss:.3f}",
            speed=f"{captions_per_second:.0f}",
        )

    def finished_epoch(self, result: EpochResult) -> None:
        """Print the epoch's line."""
        self.console.print(
            f"epoch {result.epoch:3d}  loss {result.loss:.3f}  val CIDEr-D {result.cider:.3f}"
            f"{' *' if result.best else '  '}  {result.seconds:.0f} s  "
            f"{result.captions_per_second:.0f} captions/s",
            soft_wrap=True,
        )

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Say where the captioner is, and how long it took."""
        minutes = (time.monotonic() - self.begun) / 60
        line = f"saved in {self.folder / 'best'}, after {minutes:.1f} min in all"
        self.console.print(terminal(line), markup=False, soft_wrap=True)


NAMED = 5  # videos that a message names


def extract_features_of(
    data: Sequence[CaptionedVideo],
    videos: Sequence[Path],
    folder: Path,
    *,
    backbones: Sequence[str],
    sampling: str | None,
    weights: Path | None,
    device: torch.device,
    accelerator: Accelerator,
) -> list[CaptionedVideo]:
    """Extract the features of a data set's videos into a folder; what is there is not made again.

    Args:
        data: the data set, whose ids are the videos' paths in their folder without suffix.
        videos: files and folders.
        folder: for the files of features.
        backbones: names, a stream each.
        sampling: which frames; None takes 28 of each video.
        weights: the backbones' weights: a file, or the folder they are in.
        device: where the backbones compute.
        accelerator: the processes that share the videos among them.

    Returns:
        those of the data that have features now; how many have none is said on stderr.

    Raises:
        DataError: there are no videos of the data.
    """
    from capvid.backbones.backbone import load_backbone
    from capvid.video.input_set import find_videos

    batch = Batch(verb="extracted", many=True)
    wanted = {video.id for video in data}
    found = find_videos(list(map(str, videos)), failed=batch.failed)
    named = [video for video in found if video.key in wanted]
    if not named:
        example = f"; {found[0].path} would be {found[0].key!r}" if found else ""
        raise DataError(
            f"none of the {len(found)} videos is one of the data, such as {data[0].id!r}{example}",
            remedy="let ids be the paths of videos in their folder, without suffix",
        )
    loaded = [load_backbone(name, weights=weights, device=device) for name in backbones]
    extract_into(
        [
            ExtractionJob.of(video, folder)
            for video in named[accelerator.process_index :: accelerator.num_processes]
        ],
        loaded,
        read_sampling(sampling, frames=None, clean=False),
        batch,
        RuntimeOptions(),
    )
    batch.summarise()
    accelerator.wait_for_everyone()
    kept = [video for video in data if (folder / f"{video.id}.safetensors").is_file()]
    missing = sorted(wanted - {video.id for video in kept})
    if missing:
        shown = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
        batch.say(
            f"warning: {len(missing)} of {len(wanted)} videos of the data have no features and are left out"
            f" ({shown})"
        )
    return kept


UNBOUNDED = 10_000  # columns, where stdout is no terminal


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
    from capvid.training.hyperparameter_search import Search

    reporter = _Progress(trials, folder)
    search = Search(
        recipe,
        trials=trials,
        videos=videos,
        store=store,
        folder=folder,
        make=partial(_trial_trainer, device=device, value_width=value_width),
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


def _trial_trainer(recipe: Recipe, *, folder: Path, reporter: Reporter, **options: Any) -> Trainer:
    """The trainer of a trial, which leaves events as any other does."""
    from capvid.training.reporters import EVENTS, Events, Reporters
    from capvid.training.trainer import Trainer

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


ROWS = 20  # of epochs at most
WIDTH = 72  # columns at least, so that no number is cut off on a narrow terminal
_CELLS = 30  # of the curve at most
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"


def conclude(folder: Path, *, title: str, plot: Path | None) -> None:
    """Write the model card of the run in ``folder``, draw the run into ``plot``, and print what it gave."""
    from capvid.checkpoints.publishing import CARD, load_run, model_card
    from capvid.training.evaluation import Evaluation
    from capvid.training.reporters import EpochResult, save_plot
    from capvid.utils.files import atomic_write_text

    run = load_run(folder)
    atomic_write_text(folder / CARD, model_card(run))
    info = run.checkpoint.info
    best = EpochResult(info["epoch"], 0.0, info["val_cider"], True, 0.0, 0.0, {})
    if plot is not None:
        save_plot(plot, run.epochs, best, title=title)
    print_summary(run.epochs, best, Evaluation(**run.test) if run.test else None)


def print_summary(
    rows: Sequence[Mapping[str, Any]],
    best: EpochResult,
    test: Evaluation | None,
    console: Console | None = None,
) -> None:
    """Print what a run gave; scores are times 100, as papers print them.

    Args:
        rows: what ``metrics.jsonl`` says of each epoch.
        best: the best of them, or what a captioner scored before it was fine-tuned.
        test: of the test split, if there is one.
        console: where to; ``None`` is stdout.
    """
    from rich.console import Console
    from rich.table import Table

    out = console or Console(highlight=False)
    out.width = max(out.width, WIDTH)
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("epoch", "loss", "val CIDEr-D", "", "captions/s", "seconds"):
        table.add_column(name, justify="right")
    if best.epoch == 0:  # before fine-tuning
        table.add_row("0", "", f"{100 * best.cider:.1f}", "*", "", "")
    shown = kept_rows(rows, best.epoch)
    for row in shown:
        table.add_row(
            str(row["epoch"]),
            f"{row['loss']:.3f}",
            f"{100 * row['val_cider']:.1f}",
            "*" if row["epoch"] == best.epoch else "",
            f"{row['captions_per_second']:.0f}",
            f"{row['seconds']:.1f}",
        )
    out.print(table)
    if len(shown) < len(rows):
        out.print(f"{len(rows) - len(shown)} of {len(rows)} epochs are not shown")
    values = [100 * row["val_cider"] for row in rows]
    if len(values) > 1:
        curve = sparkline(values, _BLOCKS if out.encoding.startswith("utf") else _ASCII)
        out.print(f"val CIDEr-D {curve} {min(values):.1f} to {max(values):.1f}", soft_wrap=True)
    out.print(f"* best: epoch {best.epoch}; scores are times 100")
    if test is not None:
        _print_test(out, test)


def kept_rows(rows: Sequence[Mapping[str, Any]], best: int) -> list[Mapping[str, Any]]:
    """At most :data:`ROWS` of the epochs, evenly spread; the first, the last and the best are among them."""
    if len(rows) <= ROWS:
        return list(rows)
    places = {round(n * (len(rows) - 1) / (ROWS - 2)) for n in range(ROWS - 1)}
    return [row for place, row in enumerate(rows) if place in places or row["epoch"] == best]


def sparkline(values: Sequence[float], levels: str) -> str:
    """Values as signs of growing height; of many, the greatest of neighbours stands for them."""
    count = min(len(values), _CELLS)
    bounds = [n * len(values) // count for n in range(count + 1)]
    peaks = [max(values[low:high]) for low, high in pairwise(bounds)]
    least, span = min(peaks), max(peaks) - min(peaks)
    top = len(levels) - 1
    return "".join(levels[round(top * (peak - least) / span) if span else top // 2] for peak in peaks)


def _print_test(out: Console, test: Evaluation) -> None:
    """Print the scores on the test split, those of repetition below the others."""
    from rich.table import Table

    repeated = [name for name in test.scores if name.startswith("R@")]
    others = [name for name in test.scores if name not in repeated]
    out.print("\ntest split")
    for names in filter(None, (others, repeated)):
        table = Table(box=None, pad_edge=False, header_style="")
        for name in names:
            table.add_column(name, justify="right")
        table.add_row(*(f"{100 * test.scores[name]:.{2 if repeated else 1}f}" for name in names))
        out.print(table)
    distinct = len({str(caption) for caption in test.captions.values()})
    out.print(f"{distinct} distinct among {len(test.captions)} captions")
