"""The commands and the options that stand before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.completion import completion_init
from typer.core import TyperGroup

from capvid.cli import caption, completion, convert, data, doctor, extract, info, models, push, score, train
from capvid.cli.config import config_first, name_variables, read_config
from capvid.escaping import terminal
from capvid.limits import limits


class _Commands(TyperGroup):
    """Group of commands whose usage errors cannot control the terminal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        with _escaped_usage_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parse the command's arguments and run it."""
        with _escaped_usage_errors():
            return super().invoke(ctx)


@contextmanager
def _escaped_usage_errors() -> Iterator[None]:
    """Escape the messages of click's usage errors, which quote arguments as they are."""
    try:
        yield
    except Exception as error:
        usage: Any = error
        if hasattr(usage, "format_message"):  # click's exceptions, wherever typer has them from
            usage.message = terminal(usage.message)
        raise


# Plain help: rendering it with rich would double the time of `capvid --help`.
app = typer.Typer(
    name="capvid", cls=_Commands, no_args_is_help=True, rich_markup_mode=None, add_completion=False
)
app.command("caption")(caption.caption)
app.command("extract")(extract.extract)
app.command("train")(train.train)
app.command("score")(score.score)
app.command("models")(models.models)
app.command("convert")(convert.convert)
app.command("push")(push.push)
app.command("info")(info.info)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")


def _show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        from capvid import __version__

        typer.echo(f"capvid {__version__}")
        raise typer.Exit


def _take_config(context: typer.Context, path: Path | None) -> None:
    """Let the commands take their defaults from the file."""
    if path is not None:
        context.default_map = read_config(path, context.command)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=_take_config,
            is_eager=True,
            envvar="CAPVID_CONFIG",
            show_envvar=False,
            show_default=False,
            help="TOML file with values of options, a table for each command (also CAPVID_CONFIG); an "
            "environment variable such as CAPVID_CAPTION_BEAM comes before it, the command line before both.",
        ),
    ] = None,
    show_completion: Annotated[
        completion.Shell | None,
        typer.Option(
            callback=completion.show,
            is_eager=True,
            show_default=False,
            help="Print a shell's script for completing names with Tab, and exit.",
        ),
    ] = None,
    install_completion: Annotated[
        completion.Shell | None,
        typer.Option(
            callback=completion.install,
            is_eager=True,
            show_default=False,
            help="Put that script where the shell reads it when it starts, and exit.",
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (also CAPVID_DEBUG=1, and after any command).")
    ] = False,
) -> None:
    """Videos into sentences: memory-augmented video captioning."""
    limits()  # a wrong limit in the environment concerns the command, not each of its inputs


def run(arguments: list[str]) -> None:
    """Run one command line; what the commands raise comes through, SystemExit carries the exit code."""
    completion_init()
    command = typer.main.get_command(app)
    name_variables(command)
    command.main(args=config_first(arguments), prog_name="capvid")
