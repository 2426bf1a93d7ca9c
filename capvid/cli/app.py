"""The ``capvid`` command: parses, calls the library, prints. One short file per subcommand."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.completion import completion_init
from typer.core import TyperGroup

from capvid.cli import _completion as completion
from capvid.cli._config import config_first, name_variables, read_config
from capvid.cli._terminal import debugging
from capvid.utils.escaping import terminal
from capvid.utils.limits import limits

BROKEN_PIPE = 141  # as a shell shows programs that SIGPIPE ends
INTERRUPTED = 130
COMMANDS = ("caption", "extract", "train", "score", "models", "convert", "push", "info", "doctor", "data")
GRACE = 3.0  # seconds for an interrupted process to end


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Every error is one line on stderr; ``--debug``, anywhere before ``--``, or ``CAPVID_DEBUG=1`` shows the
    traceback as well. A first Ctrl-C ends the command in order, a second one at once.

    Args:
        args: the arguments after the program's name; None takes those of this process, which then ends soon
            after an interrupt, whatever its threads do.

    Returns:
        0 all done, 1 nothing could be done, 2 usage, 3 some inputs failed, 130 interrupted, 141 nobody reads
        stdout any more.
    """
    from capvid.cli import _terminal as streams
    from capvid.utils.device import keep_freed_memory

    keep_freed_memory()
    arguments = list(sys.argv[1:] if args is None else args)
    arguments, debug = _take_debug(arguments)
    streams.prepare()
    token = debugging.set(debug)
    try:
        with _interrupts():
            code = _run(arguments, debug=debug)
    finally:
        debugging.reset(token)
        streams.silence()
    if code == INTERRUPTED and args is None:
        threading.Thread(target=_end_at_last, daemon=True).start()
    return code


def _end_at_last() -> None:
    """End an interrupted process whose other threads do not.

    Python waits for them, and the interrupt may have come where the main thread held a lock that they need.
    """
    time.sleep(GRACE)
    os._exit(INTERRUPTED)


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let a second Ctrl-C end the process at once, also while it cleans up after the first."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Give the arguments without ``--debug``, and whether tracebacks are wanted."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    wanted = len(kept) < end or os.environ.get("CAPVID_DEBUG", "") not in {"", "0"}
    return kept + arguments[end:], wanted


def _run(arguments: list[str], *, debug: bool) -> int:
    """Run the command, turning what it raises into a line on stderr and an exit code."""
    from capvid.errors import CapvidError

    try:
        _check_working_directory()
        run(arguments)
        sys.stdout.flush()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer and rich take that for a failure
            return BROKEN_PIPE
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except CapvidError as error:
        _explain(f"error: {error}", debug=debug)
        return error.exit_code
    except OSError as error:
        _explain(f"error: {_place(error)}{error.strerror or error}", debug=debug)
        return 1
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _explain(f"internal error: {' '.join(text.split())}; run with --debug for the traceback", debug=debug)
        return 1
    return 0


def _check_working_directory() -> None:
    """Raise CapvidError if the working directory was deleted: no relative path would mean anything."""
    from capvid.errors import CapvidError

    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        raise CapvidError(
            f"the working directory cannot be used ({error.strerror})", remedy="change to another one"
        ) from error


def _place(error: OSError) -> str:
    """Where the error is, for before the message."""
    from capvid.cli._terminal import stdout_error

    if error.filename:
        return f"{error.filename}: "
    return "stdout: " if stdout_error() else ""


def _explain(line: str, *, debug: bool) -> None:
    """Print the line on stderr, after the traceback when debugging."""
    from capvid.utils.escaping import terminal

    with suppress(OSError):
        if debug:
            import traceback

            traceback.print_exc()
        print(terminal(line), file=sys.stderr)


class _LazyCommands(Mapping[str, Any]):
    """The commands by name; the module of a command is imported when it is needed."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        module = import_module(f"capvid.cli.{name}")
        command: Any
        if hasattr(module, "app"):  # a group of subcommands
            command = typer.main.get_group(module.app)
        else:
            single = typer.Typer(rich_markup_mode=None, add_completion=False)
            single.command(name)(getattr(module, name))
            command = typer.main.get_command(single)
        command.name = name
        name_variables(command, name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


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


def _show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        from capvid.version import __version__

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


def root_command() -> Any:
    """Return the command with all commands below it, which are imported when they are needed."""
    command: Any = typer.main.get_command(app)
    command.commands = _LazyCommands()
    return command


def run(arguments: list[str]) -> None:
    """Run one command line; what the commands raise comes through, SystemExit carries the exit code."""
    completion_init()
    command = root_command()
    command.main(args=config_first(arguments), prog_name="capvid")
