"""The commands and the options that stand before them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from capvid.cli import caption, convert, data, extract, info, models, push, score, train

# Plain help: rendering it with rich would double the time of `capvid --help`.
app = typer.Typer(name="capvid", no_args_is_help=True, rich_markup_mode=None)
app.command("caption")(caption.caption)
app.command("extract")(extract.extract)
app.command("train")(train.train)
app.command("score")(score.score)
app.command("models")(models.models)
app.command("convert")(convert.convert)
app.command("push")(push.push)
app.command("info")(info.info)
app.add_typer(data.app, name="data")


def _show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        from capvid import __version__

        typer.echo(f"capvid {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (also CAPVID_DEBUG=1, and after any command).")
    ] = False,
) -> None:
    """Videos into sentences: memory-augmented video captioning."""


def run(arguments: list[str]) -> None:
    """Run one command line; what the commands raise comes through, SystemExit carries the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file name that is not valid text must not end a batch
            stream.reconfigure(errors="backslashreplace")
    typer.main.get_command(app).main(args=arguments, prog_name="capvid")
