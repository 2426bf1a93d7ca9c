"""``capvid train``: train a captioner on features or videos with captions."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capvid.cli._batch import Batch, check_writable_folder, training_bar
from capvid.cli._options import (
    MAX_SEED,
    MAX_TRIALS,
    RuntimeOptions,
    complete_backbone,
    complete_device,
    complete_recipe,
)
from capvid.cli._terminal import column_lines, print_line, terminal_width
from capvid.datasets.dataset import known_specs
from capvid.errors import DataError, UsageError
from capvid.utils.escaping import terminal
from capvid.utils.output_check import check_outputs

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from optuna.trial import FrozenTrial
    from rich.console import Console

    from capvid.datasets.dataset import CaptionedVideo
    from capvid.training.recipe import Recipe
    from capvid.training.reporters import EpochResult, Reporter
    from capvid.training.runs import TrainingResult
else:
    Reporter = object  # importing it would slow down the start of every command

SPECS = known_specs()


def train(
    recipe: str | None = typer.Argument(
        None, help="Name of a recipe (see --list), or a .toml file.", autocompletion=complete_recipe
    ),
    data: list[str] | None = typer.Option(
        None, help=f"Captions: {SPECS} (see capvid data check --help). May be repeated."
    ),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Leave out unusable rows of the data."),
    features: list[str] | None = typer.Option(
        None,
        help="Folder of feature files, or a packed features file. May be repeated: streams of the same "
        "videos are concatenated, other videos added.",
    ),
    videos: list[Path] | None = typer.Option(
        None,
        help="Videos, or folders of them, instead of --features: features of those in the dataset are "
        "extracted first, into RUN/features. May be repeated.",
    ),
    backbone: list[str] | None = typer.Option(
        None,
        show_default="capvid-small",
        help="With --videos: name of a backbone; repeat it for further streams.",
        autocompletion=complete_backbone,
    ),
    sampling: str | None = typer.Option(
        None,
        show_default="the recipe's, or uniform:28",
        help="With --videos: frame sampling, as in capvid extract.",
    ),
    values: list[str] | None = typer.Option(
        None,
        help="Key-value memory only: features for the values (what a frame means), while --features are "
        "the keys (what it looks like). May be repeated.",
    ),
    output: Path | None = typer.Option(None, "-o", "--output", help="Run folder to write."),
    settings: list[str] | None = typer.Option(
        None, "--set", metavar="KEY=VALUE", help="Change an option of the recipe, such as training.epochs=20."
    ),
    weights: Path | None = typer.Option(
        None,
        help="Weights of the backbone that made the features; copied into the run, so that it captions "
        "videos.",
    ),
    resume: bool = typer.Option(
        False,
        "--resume",
        help="Continue the run in the folder, with more training.epochs where training.schedule is constant.",
    ),
    self_critical: Path | None = typer.Option(
        None,
        metavar="RUN",
        help="Fine-tune the captioner of this run on CIDEr-D, by the recipe's section self_critical.",
    ),
    search: int | None = typer.Option(
        None,
        min=1,
        max=MAX_TRIALS,
        metavar="N",
        help="Hyper-parameter search: train N trials in RUN/trials, with values drawn from the recipe's "
        "section search (or --set 'search.training.learning_rate=[1e-3,2e-3]'); the best on the val "
        "split becomes the run.",
    ),
    seed: int | None = typer.Option(
        None, min=0, max=MAX_SEED, help="Random seed of weights, batches, dropout and --search."
    ),
    device: str = typer.Option(
        "auto", help="Device: auto, cpu, cuda, cuda:N or mps.", autocompletion=complete_device
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the run in the folder."),
    plot: Path | None = typer.Option(
        None, metavar="FILE.png", help="Plot loss and val CIDEr-D over the epochs (.png, .svg, .pdf)."
    ),
    list_recipes: bool = typer.Option(False, "--list", help="Show the recipes and exit."),
) -> None:
    """Train a captioner on a local dataset; the best checkpoint on the val split is kept."""
    if list_recipes:
        from capvid.training.recipe import all_recipes

        rows = [(name, recipe["captioner"], recipe["description"]) for name, recipe in all_recipes().items()]
        for line in column_lines(("recipe", "model", "what for"), rows, terminal_width()):
            print_line(line)
        return
    if recipe is None or not data or output is None:
        problem = "capvid train needs a recipe, --data and -o"
        raise UsageError(problem, remedy="see capvid train --help, and capvid train --list for the recipes")
    from capvid.training.recipe import load_recipe

    chosen = load_recipe(
        recipe, [*(settings or []), *([f"training.seed={seed}"] if seed is not None else [])]
    )
    if bool(features) == bool(videos):
        problem = f"{chosen.name} trains a captioner: it needs --features or --videos, and not both"
        raise UsageError(problem, remedy="see capvid train --help")
    if (backbone or sampling) and not videos:
        raise UsageError("--backbone and --sampling are for --videos", remedy="leave them out")
    from capvid.training import reporters

    if plot is not None:
        reporters.check_plot(plot)
        check_writable_folder(plot.parent)
        named = [spec.partition(":")[2] or spec for spec in (*data, *(features or ()), *(values or ()))]
        named += [name.rpartition("#")[0] for name in named if "#" in name]
        check_outputs([("--plot", plot)], [recipe, *data, *named, *(videos or ())], kind="image")
    from capvid.training import runs  # slow: torch

    section = chosen.self_critical if self_critical else chosen.training
    progress = TrainingProgress(output, section.epochs, search)

    def extract(
        dataset: Sequence[CaptionedVideo], accelerator: Accelerator, device: torch.device
    ) -> tuple[list[CaptionedVideo], list[Path]]:
        """Extract missing features, shared among the processes; return the videos with features."""
        from capvid.backbones.backbone import load_backbone
        from capvid.cli.extract import ExtractionJob, extract_into, read_sampling
        from capvid.video.input_set import find_videos

        batch, folder = Batch(verb="extracted", many=True), output / "features"
        ids = {video.id for video in dataset}
        candidates = find_videos(list(map(str, videos or [])), on_error=batch.failed)
        named = [video for video in candidates if video.key in ids]
        if not named:
            example = f"; {candidates[0].path} would be {candidates[0].key!r}" if candidates else ""
            raise DataError(
                f"none of the {len(candidates)} videos is one of the data, such as {dataset[0].id!r}"
                f"{example}",
                remedy="let ids be the paths of videos in their folder, without suffix",
            )
        shard = named[accelerator.process_index :: accelerator.num_processes]
        extract_into(
            [ExtractionJob.of(video, folder) for video in shard],
            [load_backbone(name, weights=weights, device=device) for name in backbone or ["capvid-small"]],
            read_sampling(sampling or chosen.data.sampling or None, frames=None, clean=False),
            batch,
            RuntimeOptions(),
        )
        batch.summarise()
        accelerator.wait_for_everyone()
        kept = [video for video in dataset if (folder / f"{video.id}.safetensors").is_file()]
        if missing := sorted(ids - {video.id for video in kept}):
            names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            batch.say(
                f"warning: {len(missing)} of {len(ids)} videos of the data have no features and are left out"
                f" ({names})"
            )
        progress.start()
        return kept, [folder]

    first = int(os.environ.get("RANK", "0")) == 0
    with ExitStack() as stack:
        if not first:  # of the processes that accelerate launched, one prints; errors of all are printed
            null = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(null))
            stack.enter_context(redirect_stderr(null))
        stack.enter_context(progress)
        if features:
            progress.start()
        result = runs.train(
            chosen,
            data,
            features or extract,
            output,
            values=values or [],
            weights=weights,
            device=device,
            self_critical=self_critical,
            search=search,
            resume=resume,
            overwrite=overwrite,
            skip_bad=skip_bad,
            reporter=progress,
            note=lambda line: print_line(f"note: {line}", err=True),
        )
    if not first:
        return
    if result.trials:
        ranked = sorted(result.trials, key=lambda t: (t.value is None, -(t.value or 0.0), t.number))
        print_trials(ranked)
        progress.print_saved(f"best: trial {ranked[0].number + 1}; ")
    if plot is not None:
        reporters.save_plot(plot, result.epochs, (result.epoch, result.val_cider), title=chosen.name)
    print_summary(result)


class TrainingProgress(Reporter):
    """Training on stderr: a bar on a terminal, and a line for every epoch and trial."""

    def __init__(self, folder: Path, epochs: int, trials: int | None) -> None:
        from rich.console import Console

        self.folder, self.epochs, self.trials = folder, epochs, trials
        self.prefix, self.batches, self.begun = "", 0, 0.0
        self.console = Console(stderr=True, highlight=False)
        self.bar = training_bar(self.console, "loss {task.fields[loss]}  {task.fields[speed]} captions/s")
        self.task = self.bar.add_task("reading", total=None, loss="-", speed="-")

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        if kind is KeyboardInterrupt and self.begun:  # earlier, there is nothing to resume
            resumable = (self.folder / "last").is_dir() or self.trials
            kept = f"--resume goes on with what {self.folder} keeps" if resumable else "no epoch was finished"
            self.print(f"interrupted; {kept}")

    def start(self) -> None:
        """Start the bar and the clock."""
        self.begun = time.monotonic()
        self.bar.start()

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(terminal(line), markup=False, soft_wrap=True)

    def print_saved(self, prefix: str = "") -> None:
        """Print where the captioner is, and how long training took."""
        minutes = (time.monotonic() - self.begun) / 60
        self.print(f"{prefix}saved in {self.folder / 'best'}, after {minutes:.1f} min in all")

    def started(self, *, batches: int, epoch: int, batch: int, **counts: int) -> None:
        """Print the size of the dataset, once, and scale the bar."""
        first, self.batches = not self.batches, batches
        self.bar.update(self.task, total=batches * self.epochs)
        if not first:
            return
        if 1 < epoch <= self.epochs:
            self.print(f"goes on with epoch {epoch}")
        if counts["videos"] < FEW_VIDEOS:
            self.print(
                f"warning: {counts['videos']} training videos are few: below {FEW_VIDEOS}, captioners "
                "memorize them; add videos, or use a trained model"
            )
        often = "once" if counts["min_count"] == 1 else f"{counts['min_count']} times"
        views = f" and {counts['views']} views of them" if counts["views"] else ""
        self.print(
            f"{counts['videos']} videos{views}, {counts['captions']} captions an epoch, "
            f"{counts['words']} words that occur at least {often}; "
            f"{counts['validation']} videos to validate on"
        )

    def stepped(self, *, epoch: int, batch: int, loss: float, captions_per_second: float, **_: float) -> None:
        """Move the bar."""
        self.bar.update(
            self.task,
            completed=(epoch - 1) * self.batches + batch,
            description=f"{self.prefix}epoch {epoch}/{self.epochs}",
            loss=f"{loss:.3f}",
            speed=f"{captions_per_second:.0f}",
        )

    def finished_epoch(self, result: EpochResult) -> None:
        """Print the epoch's line; in a search, the line of its trial follows."""
        self.print(
            f"{'  ' if self.trials else ''}epoch {result.epoch:3d}  loss {result.loss:.3f}  "
            f"val CIDEr-D {100 * result.cider:.1f}{' *' if result.best else '  '}  {result.seconds:.0f} s  "
            f"{result.captions_per_second:.0f} captions/s"
        )

    def finished(self, best: EpochResult, scores: Mapping[str, float]) -> None:
        """Print where the captioner is."""
        if not self.trials:
            self.print_saved()

    def started_search(self, finished: Sequence[FrozenTrial]) -> None:
        """Print the number of trials that are finished already."""
        if finished:
            self.print(f"{len(finished)} trials are finished already")

    def started_trial(self, number: int, recipe: Recipe) -> None:
        """Reset the bar."""
        self.prefix, self.epochs = f"trial {number}/{self.trials}  ", recipe.training.epochs
        self.bar.reset(self.task, total=None, loss="-", speed="-", description=f"{self.prefix}reading")

    def finished_trial(self, trial: FrozenTrial, *, best: bool) -> None:
        """Print the trial's line."""
        score = f"failed ({trial.user_attrs['cause']})"
        if trial.value is not None:
            score = f"val CIDEr-D {100 * trial.value:.1f}{' *' if best else '  '}"
        values = "  ".join(f"{name.partition('.')[2]} {_short(v)}" for name, v in trial.params.items())
        self.print(f"{self.prefix}{score}  {values}")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def print_trials(trials: Sequence[FrozenTrial]) -> None:
    """Print a table of trials on stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    options = list(trials[0].params)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in ("trial", "val CIDEr-D", "epoch", "seconds", *(o.partition(".")[2] for o in options)):
        table.add_column(name.replace("_", "\n").replace("val ", "val\n"), justify="right", overflow="fold")
    for trial in trials:
        score = "failed" if trial.value is None else f"{100 * trial.value:.1f}"
        values = [_short(trial.params[option]) for option in options]
        epoch, seconds = trial.user_attrs["epoch"] or "-", trial.user_attrs["seconds"]
        table.add_row(str(trial.number + 1), score, str(epoch), f"{seconds:.0f}", *values)
    width = None if Console().is_terminal else 10_000  # files and pipes have no width
    console = Console(highlight=False, width=width)
    console.print(table)
    console.print()


FEW_VIDEOS = 200
ROWS = 20  # epochs at most
WIDTH = 72  # minimum columns, so that no number is truncated on a narrow terminal
_CELLS = 30  # of the curve at most
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"


def print_summary(result: TrainingResult, console: Console | None = None) -> None:
    """Print the epochs and test scores of a run on stdout; scores are times 100, as in papers."""
    from rich.console import Console
    from rich.table import Table

    out, rows, best = console or Console(highlight=False), result.epochs, result.epoch
    out.width = max(out.width, WIDTH)

    def table_of(*names: str) -> Table:
        table = Table(box=None, pad_edge=False, header_style="")
        for name in names:
            table.add_column(name, justify="right")
        return table

    table = table_of("epoch", "loss", "val CIDEr-D", "", "captions/s", "seconds")
    if best == 0:  # before fine-tuning
        table.add_row("0", "", f"{100 * result.val_cider:.1f}", "*", "", "")
    kept = kept_rows(rows, best)
    for row in kept:
        cider, mark = f"{100 * row['val_cider']:.1f}", "*" if row["epoch"] == best else ""
        speed, seconds = f"{row['captions_per_second']:.0f}", f"{row['seconds']:.1f}"
        table.add_row(str(row["epoch"]), f"{row['loss']:.3f}", cider, mark, speed, seconds)
    out.print(table)
    if len(kept) < len(rows):
        out.print(f"{len(rows) - len(kept)} of {len(rows)} epochs are not shown")
    values = [100 * row["val_cider"] for row in rows]
    if len(values) > 1:
        curve = sparkline(values, _BLOCKS if out.encoding.startswith("utf") else _ASCII)
        out.print(f"val CIDEr-D {curve} {min(values):.1f} to {max(values):.1f}", soft_wrap=True)
    out.print(f"* best: epoch {best}; scores are times 100")
    if not result.scores:
        return
    out.print("\ntest split")
    repetition = [name for name in result.scores if name.startswith("R@")]
    for names in filter(None, ([name for name in result.scores if name not in repetition], repetition)):
        table = table_of(*names)
        digits = 2 if repetition else 1
        table.add_row(*(f"{100 * result.scores[name]:.{digits}f}" for name in names))
        out.print(table)
    distinct = len({str(caption) for caption in result.captions.values()})
    out.print(f"{distinct} distinct among {len(result.captions)} captions")


def kept_rows(rows: Sequence[Mapping[str, Any]], best: int) -> list[Mapping[str, Any]]:
    """Return at most :data:`ROWS` epochs, evenly spread, the first, the last and the best among them."""
    if len(rows) <= ROWS:
        return list(rows)
    kept = {round(n * (len(rows) - 1) / (ROWS - 2)) for n in range(ROWS - 1)}
    return [row for number, row in enumerate(rows) if number in kept or row["epoch"] == best]


def sparkline(values: Sequence[float], levels: str) -> str:
    """Return a bar chart of one line; each of at most 30 characters shows the maximum of its values."""
    count = min(len(values), _CELLS)
    bounds = [n * len(values) // count for n in range(count + 1)]
    peaks = [max(values[low:high]) for low, high in pairwise(bounds)]
    least, span = min(peaks), max(peaks) - min(peaks)
    top = len(levels) - 1
    return "".join(levels[round(top * (peak - least) / span) if span else top // 2] for peak in peaks)
