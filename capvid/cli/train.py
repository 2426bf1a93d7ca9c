"""``capvid train``: learn a captioner from features and captions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capvid.cli.common import training_bar
from capvid.errors import UsageError

if TYPE_CHECKING:
    from capvid.training.evaluate import Evaluation
    from capvid.training.loop import EpochResult


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Name of a recipe (see --list) or a .toml file.", show_default=False),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help='Captions: jsonl:FILE with {"id", "split", "captions"} on each line, or "segments" and '
            '"paragraphs" for captioners of paragraphs; or tsv:FILE with an id, a tabulator and a caption on '
            "each line. May be repeated.",
            show_default=False,
        ),
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option(
            "--features",
            help="Folder of feature files, or a packed features file. May be repeated: streams of the same "
            "videos are concatenated, other videos added.",
            show_default=False,
        ),
    ] = None,
    videos: Annotated[
        list[Path] | None,
        typer.Option(
            help="In place of --features: videos, or folders of them; the features are extracted first, into "
            "RUN/features, those of the videos that the data name. May be repeated.",
            show_default=False,
        ),
    ] = None,
    backbone: Annotated[
        list[str] | None,
        typer.Option(
            show_default="capvid-small", help="With --videos: name of a backbone; again for further streams."
        ),
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            show_default="uniform:28", help="With --videos: which frames, as capvid extract has it."
        ),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--values",
            help="Key-value memory only: features whose numbers are the values (what a frame means), while "
            "--features are the keys (what it looks like). May be repeated.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Run folder to write.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change the recipe: training.epochs=20, say.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights of the backbone that made the features; copied into the run, so that it captions "
            "videos by itself. For a backbone recipe: folder with the teachers' weights.",
            show_default=False,
        ),
    ] = None,
    pictures: Annotated[
        list[Path] | None,
        typer.Option(
            help="Backbone recipes only: folder or zip file of pictures, the frames of videos in a folder "
            "each. May be repeated.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder where it was broken off.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, batches and dropout.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="Show the recipes and exit.")] = False,
) -> None:
    """Train a captioner on a local data set, or a backbone on pictures.

    Of a captioner the best checkpoint on the val split is kept.
    """
    if list_recipes:
        _print_recipes()
        return
    if recipe is None or not data or output is None:
        raise UsageError(
            "capvid train needs a recipe, --data and -o",
            remedy="see capvid train --help, and capvid train --list for the recipes",
        )

    from capvid.training.recipe import DistilRecipe, load_recipe

    overrides = [*(settings or []), *([f"training.seed={seed}"] if seed is not None else [])]
    chosen = load_recipe(recipe, overrides)
    if isinstance(chosen, DistilRecipe):
        from capvid.cli.distil import distil

        distil(
            chosen,
            pictures=pictures or [],
            data=data,
            features=features or [],
            folder=output,
            weights=weights,
            device=device,
            resume=resume,
            overwrite=overwrite,
        )
        return
    if bool(features) == bool(videos) or pictures:
        raise UsageError(
            f"{recipe} trains a captioner: it needs --features or --videos, and does not know --pictures",
            remedy="see capvid train --help",
        )
    if (backbone or sampling) and not videos:
        raise UsageError("--backbone and --sampling are for --videos", remedy="leave them out")
    _check_folder(output, resume=resume, overwrite=overwrite)

    from capvid.data.captions import load_captions
    from capvid.device import resolve_device
    from capvid.features.store import FeatureStore
    from capvid.training.loop import Trainer

    captioned, place = load_captions(data), resolve_device(device)
    if videos:
        from capvid.cli.prepare import extract_features_of

        features = [str(output / "features")]
        captioned = extract_features_of(
            captioned,
            videos,
            output / "features",
            backbones=backbone or ["capvid-small"],
            sampling=sampling,
            weights=weights,
            device=place,
        )
    store = FeatureStore([*(features or []), *(values or [])])
    if weights is not None:
        _keep_weights(weights, store.header, output)
    with _Progress(chosen.training.epochs) as reporter:
        trainer = Trainer(
            chosen,
            videos=captioned,
            store=store,
            folder=output,
            device=place,
            reporter=reporter,
            value_width=FeatureStore(values).header.width if values else 0,
            resume=resume,
        )
        best, test = trainer.run()
    reporter.conclude(best, test, output)


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """See that no run is lost.

    Raises:
        UsageError: the folder holds a run, and nothing says what becomes of it.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", remedy="give one of them")
    if not (resume or overwrite) and any((folder / name).exists() for name in ("best", "last")):
        raise UsageError(
            f"{folder}: holds a training run already", remedy="choose another -o, --resume or --overwrite"
        )


def _print_recipes() -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from capvid.training.recipe import DistilRecipe, load_recipe, recipe_names

    table = Table(Column("recipe", no_wrap=True), Column("model", no_wrap=True), "what for", box=None)
    for name in recipe_names():
        recipe = load_recipe(name)
        trained = recipe.backbone if isinstance(recipe, DistilRecipe) else recipe.captioner
        table.add_row(name, trained, recipe.description)
    Console().print(table)


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


class _Progress:
    """Training on the terminal: a bar on a terminal, one line per epoch anywhere, all on stderr."""

    def __init__(self, epochs: int) -> None:
        from rich.console import Console

        self.epochs = epochs
        self.begun = time.monotonic()
        self.console = Console(stderr=True, highlight=False)
        self.bar = training_bar(self.console, "loss {task.fields[loss]}  {task.fields[speed]} captions/s")
        self.task = self.bar.add_task("reading", total=None, loss="-", speed="-")

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def started(
        self, *, captions: int, videos: int, validation: int, words: int, batches: int, epoch: int
    ) -> None:
        """Say what there is to learn from."""
        self.begun = time.monotonic()
        self.batches = batches
        self.bar.update(self.task, total=batches * self.epochs, description=f"epoch {epoch}/{self.epochs}")
        if 1 < epoch <= self.epochs:
            self.console.print(f"goes on with epoch {epoch}")
        self.console.print(
            f"{videos} videos, {captions} captions an epoch, {words} words; "
            f"{validation} videos to validate on"
        )

    def stepped(self, *, epoch: int, batch: int, loss: float, captions_per_second: float) -> None:
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
            f"{result.captions_per_second:.0f} captions/s"
        )

    def conclude(self, best: EpochResult, test: Evaluation | None, folder: Path) -> None:
        """Say which epoch was kept, where, and what it scores on the test split."""
        minutes = (time.monotonic() - self.begun) / 60
        self.console.print(
            f"best: epoch {best.epoch}, val CIDEr-D {best.cider:.3f}, after {minutes:.1f} min in all; "
            f"saved in {folder / 'best'}",
            soft_wrap=True,
        )
        if test:
            names = [name for name in ("CIDEr-D", "BLEU-4", "ROUGE_L", "R@4") if name in test.scores]
            shown = ", ".join(f"{name} {test.scores[name]:.3f}" for name in names)
            distinct = len({str(caption) for caption in test.captions.values()})
            self.console.print(f"test: {shown}; {distinct} distinct captions of {len(test.captions)} videos")
