"""Command line of the distillation: ``python -m distillation RECIPE --pictures ... --data ... -o RUN``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from capvid.cli._batch import training_bar
from capvid.datasets.dataset import load_data
from capvid.errors import CapvidError, UsageError
from capvid.features.feature_store import FeatureStore
from capvid.training.run_folder import locked_run
from capvid.utils.device import resolve_device
from capvid.utils.escaping import terminal
from distillation.distiller import STATE, DistilInputs, make_distiller
from distillation.recipe import load_distil_recipe


def distil(
    recipe: Annotated[str, typer.Argument(help="capvid-small-backbone, or a .toml file.")],
    data: Annotated[list[str], typer.Option(help="Captions, as for capvid train. May be repeated.")],
    images: Annotated[
        list[Path],
        typer.Option(
            "--pictures",
            help="Folder or zip file of images; a folder in it holds the frames of a video. May be repeated.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Run folder to write.")],
    features: Annotated[
        list[str] | None,
        typer.Option(help="Precomputed features of the teachers. May be repeated."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value, such as training.epochs=20."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Folder with the weights of the teachers.")] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
) -> None:
    """Train a compact backbone to predict the features of larger ones."""
    try:
        chosen = load_distil_recipe(recipe, settings or [])
        if (output / STATE).exists() and not (resume or overwrite):
            raise UsageError(
                f"{output}: holds a training run already",
                remedy="--resume it, choose another -o or --overwrite",
            )
        with locked_run(output), _Progress(chosen.training.epochs) as reporter:
            inputs = DistilInputs(
                images=images,
                videos=load_data(data).videos,
                features=[FeatureStore([source]) for source in features or []],
                weights=weights,
            )
            distiller = make_distiller(
                chosen,
                inputs,
                folder=output,
                device=resolve_device(device),
                reporter=reporter,
                progress=reporter.preparing,
                resume=resume,
            )
            distiller.run()
            reporter.print(terminal(f"saved as {output / distiller.entry.file}"))
    except CapvidError as error:
        sys.stderr.write(f"error: {terminal(str(error))}\n")
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error


class _Progress:
    """Progress of a distillation: a bar on a terminal, and a line per epoch, on stderr."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.batches, self.begun = epochs, 0, time.monotonic()
        self.console = Console(stderr=True, highlight=False)
        self.bar = training_bar(self.console, "{task.fields[note]}")
        self.task = self.bar.add_task("reading", total=None, note="")

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(line, markup=False, soft_wrap=True)

    def preparing(self, what: str, done: int, total: int) -> None:
        """Show how many images are decoded, or have passed a teacher."""
        self.bar.update(self.task, description=f"preparing {what}", completed=done, total=total)
        if done == total:
            seconds = time.monotonic() - self.begun
            self.print(f"{what}: {total} images, {seconds:.0f} s since the start")

    def started(self, *, images: int, validation: int, batches: int, epoch: int) -> None:
        """Print the sizes of both splits."""
        self.batches = batches
        self.bar.reset(self.task, total=batches * self.epochs, completed=(epoch - 1) * batches)
        self.print(f"{images} training images, {validation} validation images; starting at epoch {epoch}")

    def stepped(self, *, epoch: int, batch: int, loss: float, images_per_second: float) -> None:
        """Move the bar."""
        self.bar.update(
            self.task,
            completed=(epoch - 1) * self.batches + batch,
            description=f"epoch {epoch}/{self.epochs}",
            note=f"loss {loss:.3f}  {images_per_second:.0f} images/s",
        )

    def finished_epoch(self, record: Mapping[str, Any]) -> None:
        """Print the losses of an epoch; an error of 1 is that of always predicting the mean."""
        parts = "  ".join(f"{name} {value:.3f}" for name, value in record.items() if name.startswith("val_"))
        self.print(
            f"epoch {record['epoch']:3d}  loss {record['loss']:.3f}  {parts}  {record['seconds']:.0f} s"
        )


if __name__ == "__main__":
    typer.run(distil)
