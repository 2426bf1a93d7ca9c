"""``capvid train``: learn a captioner from features and captions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capvid.cli import _completion as completion
from capvid.cli._options import MAX_SEED, MAX_TRIALS
from capvid.cli._terminal import print_line
from capvid.datasets.dataset import known_specs
from capvid.errors import UsageError


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Name of a recipe (see --list) or a .toml file.",
            show_default=False,
            autocompletion=completion.recipes,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help=f"Captions: {known_specs()} (see capvid data check --help). May be repeated.",
            show_default=False,
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out rows of the data that cannot be used.")
    ] = False,
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
            show_default="capvid-small",
            help="With --videos: name of a backbone; again for further streams.",
            autocompletion=completion.backbones,
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
            "videos by itself.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder where it was broken off.")
    ] = False,
    self_critical: Annotated[
        Path | None,
        typer.Option(
            "--self-critical",
            metavar="RUN",
            help="Fine-tune the captioner of this run on CIDEr-D, by the recipe's section self_critical.",
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        int | None,
        typer.Option(
            "--search",
            min=1,
            max=MAX_TRIALS,
            metavar="N",
            help="Random search: train N times by values drawn from the recipe's section search (or --set "
            "'search.training.learning_rate=[1e-3,2e-3]'), into RUN/trials; the best on the val split is the "
            "run.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_SEED,
            help="Seed of weights, batches and dropout, and of what --search draws.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.", autocompletion=completion.devices)
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Draw loss and val CIDEr-D over the epochs (.png, .svg, .pdf).",
            show_default=False,
        ),
    ] = None,
    list_recipes: Annotated[bool, typer.Option("--list", help="Show the recipes and exit.")] = False,
) -> None:
    """Train a captioner on a local data set; the best checkpoint on the val split is kept."""
    if list_recipes:
        _print_recipes()
        return
    if recipe is None or not data or output is None:
        raise UsageError(
            "capvid train needs a recipe, --data and -o",
            remedy="see capvid train --help, and capvid train --list for the recipes",
        )

    from capvid.training.recipe import load_recipe
    from capvid.training.run_folder import locked_run

    overrides = [*(settings or []), *([f"training.seed={seed}"] if seed is not None else [])]
    chosen = load_recipe(recipe, overrides)
    from capvid.cli._training import Inputs, train_captioner

    inputs = Inputs(
        data=data,
        features=features or [],
        values=values or [],
        videos=videos or [],
        backbones=backbone or [],
        sampling=sampling,
        weights=weights,
        skip_bad=skip_bad,
    )
    with locked_run(output):
        train_captioner(
            chosen,
            inputs,
            folder=output,
            device=device,
            self_critical=self_critical,
            search=search,
            resume=resume,
            overwrite=overwrite,
            plot=plot,
        )


def _print_recipes() -> None:
    from capvid.cli._terminal import column_lines, terminal_width
    from capvid.training.recipe_files import all_recipes

    rows = [(name, recipe["captioner"], recipe["description"]) for name, recipe in all_recipes().items()]
    for line in column_lines(("recipe", "model", "what for"), rows, terminal_width()):
        print_line(line)
