"""``capvid train`` for captioners: from data, features or videos to a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capvid.cli.common import check_writable_folder, training_bar
from capvid.cli.streams import print_line
from capvid.errors import UsageError
from capvid.escaping import terminal

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from capvid.data.captions import CaptionedVideo
    from capvid.training.loop import Trainer
    from capvid.training.progress import EpochResult
    from capvid.training.recipe import Recipe


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
    _check_folder(folder, resume=resume, overwrite=overwrite)
    if plot is not None:
        _check_plot(plot)
    from capvid.cli.search import check_search

    check_search(recipe, search, folder=folder, self_critical=self_critical, resume=resume)

    from capvid.device import resolve_device
    from capvid.training.parallel import accelerator_on, device_of

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
    from capvid.cli.search import train_trials
    from capvid.cli.table import conclude
    from capvid.features.store import FeatureStore
    from capvid.training.events import EVENTS, Events
    from capvid.training.progress import Reporters
    from capvid.training.search import forget_search

    videos, features = _prepared(inputs, folder, device, accelerator)
    store = FeatureStore([*features, *inputs.values])
    if store.incomplete and recipe.data.views:
        count = len(store.incomplete)
        views = "1 view lacks a stream and is" if count == 1 else f"{count} views lack a stream and are"
        print_line(f"note: {views} left out ({store.incomplete[0]})", err=True)
    if inputs.weights is not None and accelerator.is_main_process:
        _keep_weights(inputs.weights, store.header, folder)
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
    from capvid.cli.prepare import extract_features_of

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
        from capvid.training.loop import Trainer

        return partial(Trainer, recipe), recipe.training.epochs
    from capvid.captioners.checkpoint import load_checkpoint
    from capvid.training.self_critical import SelfCriticalTrainer

    start = load_checkpoint(self_critical)
    return partial(SelfCriticalTrainer, recipe, start=start), recipe.self_critical.epochs


def _load(specs: Sequence[str], *, skip_bad: bool) -> list[CaptionedVideo]:
    """Read the data sets; rows that are skipped, and what else is worth knowing, are said on stderr."""
    from capvid.data.specs import load_data

    loaded = load_data(specs, skip_bad=skip_bad)
    for note in loaded.notes:
        print_line(f"note: {note}", err=True)
    if loaded.skipped:
        rows = "1 row was" if len(loaded.skipped) == 1 else f"{len(loaded.skipped)} rows were"
        print_line(f"warning: {rows} left out ({loaded.skipped[0]}); see capvid data check", err=True)
    return loaded.videos


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """See that no run is lost.

    Raises:
        UsageError: the folder holds a run, and nothing says what becomes of it.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", remedy="give one of them")
    if not (resume or overwrite) and any((folder / name).exists() for name in ("best", "last", "trials/001")):
        raise UsageError(
            f"{folder}: holds a training run already", remedy="choose another -o, --resume or --overwrite"
        )


def _check_plot(path: Path) -> None:
    """See before training that the picture can be drawn at its end.

    Raises:
        UsageError: it cannot.
    """
    from capvid.training.plot import check_plot

    check_plot(path)
    check_writable_folder(path.parent)


def _keep_weights(weights: Path, header: Any, folder: Path) -> None:
    """Copy the backbones' verified weights, of which ``weights`` is the file or the folder, into the run.

    Raises:
        WeightsError: they are not there.
    """
    from capvid.errors import WeightsError
    from capvid.features.registry import backbones
    from capvid.features.weights import local_weights, own_file_name
    from capvid.files import atomic_path, file_digest

    if not weights.exists():
        raise WeightsError(f"{weights}: no such weights file")
    needed = {s.backbone: s for s in header.streams if s.backbone in backbones()}
    copied = 0
    for name, stream in needed.items():
        entry = backbones()[name]
        path = None if entry.source == "none" else local_weights(name, weights=weights)
        if path is not None and file_digest(path) in (entry.sha256, stream.weights_sha256):
            target = folder / "weights" / own_file_name(entry)
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(target) as temporary:
                temporary.write_bytes(path.read_bytes())
            copied += 1
    if not copied:
        names = ", ".join(needed) or "unknown to capvid"
        raise WeightsError(
            f"{weights}: not the weights of the features' backbone ({names})",
            remedy="give the file that the features were made with",
        )


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
