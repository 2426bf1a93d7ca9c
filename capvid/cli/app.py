"""The ``capvid`` command: parses, calls the library, prints. One short file per subcommand."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.completion import completion_init

from capvid.cli._options import PanelCommand, config_first, name_variables, read_config
from capvid.cli._terminal import debugging, prepare_streams, print_line, silence_streams
from capvid.utils.escaping import terminal
from capvid.utils.registry import did_you_mean
from capvid.utils.validation import limits

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
    from capvid.utils.device import keep_freed_memory

    keep_freed_memory()
    arguments = list(sys.argv[1:] if args is None else args)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    before = [argument for argument in arguments[:end] if argument != "--debug"]
    debug = len(before) < end or os.environ.get("CAPVID_DEBUG", "") not in {"", "0"}
    prepare_streams()
    token = debugging.set(debug)
    try:
        with _interrupts():
            code = _run(before + arguments[end:])
    finally:
        debugging.reset(token)
        silence_streams()
    if code == INTERRUPTED and args is None:

        def end_process() -> None:
            time.sleep(GRACE)
            os._exit(INTERRUPTED)

        # Python waits for other threads, and one may wait for a lock that the main thread held.
        threading.Thread(target=end_process, daemon=True).start()
    if args is None and os.environ.get("WORLD_SIZE", "") not in ("", "1"):
        # Threads of Gloo outlive the process group, and abort an interpreter that ends before them.
        os._exit(code)
    return code


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let a second Ctrl-C end the process at once, also while it cleans up after the first."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
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


def _run(arguments: list[str]) -> int:
    """Run the command, turning exceptions into a line on stderr and an exit code."""
    from capvid.errors import CapvidError

    try:
        try:
            os.getcwd()  # noqa: PTH109
        except OSError as error:  # deleted: no relative path would mean anything
            raise CapvidError(
                f"the working directory cannot be used ({error.strerror})", remedy="change to another one"
            ) from error
        code = run(arguments)
        sys.stdout.flush()
        return code or 0
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer and rich take that for a failure
            return BROKEN_PIPE
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print an error on stderr, after its traceback when debugging, and return its exit code."""
    from capvid.errors import CapvidError, shortage

    code, usage = 1, cast("Any", error)
    if hasattr(usage, "format_message"):  # an error of click, wherever typer has it from
        if type(error).__name__ != "NoArgsIsHelpError":
            usage.message = terminal(_suggest(usage.message))  # it quotes arguments as they are
        usage.show()
        return int(usage.exit_code)
    if isinstance(error, CapvidError):
        line, code = f"error: {error}", error.exit_code
    elif shortage(error):
        line = f"error: {shortage(error)}"
    elif isinstance(error, OSError):
        where = error.filename
        if not where:
            try:
                sys.stdout.flush()
            except OSError:  # so the error is that of stdout
                where = "stdout"
        line = f"error: {f'{where}: ' if where else ''}{error.strerror or error}"
    else:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        line = f"internal error: {' '.join(text.split())}; run with --debug for the traceback"
    with suppress(OSError):
        if debugging.get():
            import traceback

            traceback.print_exception(error)
        print_line(line, err=True)
    return code


def _suggest(message: str) -> str:
    """Return a message about a word that is none of an option's choices with the closest of them."""
    match = re.search(r"(?:Value error, )?('(.*)' is not one of (.+)\.)$", message, re.DOTALL)
    if match is None:
        return message
    meant = did_you_mean(match[2], re.findall(r"'([^']+)'", match[3]))
    return f"{message[: match.start()]}{match[1]}{f' {meant[0].upper()}{meant[1:]}' if meant else ''}"


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
            single.command(name, cls=PanelCommand)(getattr(module, name))
            command = typer.main.get_command(single)
        command.name = name
        name_variables(command, name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


# Plain help: rendering it with rich would double the time of `capvid --help`.
app = typer.Typer(
    name="capvid",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
if TYPE_CHECKING:
    Shell = Enum
else:
    Shell = Enum("Shell", [(name, name) for name in SHELLS], type=str)


def _act(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> None:
    """Act on an option that precedes the command; all but ``--config`` exit."""
    if not value:
        return
    if parameter.name == "config":
        context.default_map = read_config(value, context.command)
        return
    if parameter.name == "version":
        from capvid.version import __version__

        typer.echo(f"capvid {__version__}")
    else:
        from typer import completion

        names = {"prog_name": "capvid", "complete_var": "_CAPVID_COMPLETE"}
        if parameter.name == "show_completion":
            typer.echo(completion.get_completion_script(shell=value.value, **names))
        else:
            _, path = completion.install(shell=value.value, **names)
            print_line(f"written to {path}; it works in shells that are opened from now on", err=True)
    raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_act, is_eager=True, help="Show the version."),
    config: Path | None = typer.Option(
        None,
        callback=_act,
        is_eager=True,
        envvar="CAPVID_CONFIG",
        show_envvar=False,
        metavar="PATH",
        help="TOML file with option values, one table per command (also CAPVID_CONFIG). Environment "
        "variables such as CAPVID_CAPTION_BEAM override it, the command line overrides both.",
    ),
    show_completion: Shell | None = typer.Option(
        None,
        callback=_act,
        is_eager=True,
        help="Print a shell's script for completing names with Tab, and exit.",
    ),
    install_completion: Shell | None = typer.Option(
        None,
        callback=_act,
        is_eager=True,
        help="Put that script where the shell reads it when it starts, and exit.",
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show tracebacks (also CAPVID_DEBUG=1, and after any command)."
    ),
) -> None:
    """Turn videos into sentences: memory-augmented video captioning."""
    limits()  # a wrong limit in the environment concerns the command, not each of its inputs


def root_command() -> Any:
    """Return the command with all commands below it, which are imported when they are needed."""
    command: Any = typer.main.get_command(app)
    command.commands = _LazyCommands()
    return command


def run(arguments: list[str]) -> int | None:
    """Run one command line and return its exit code; what the commands raise comes through."""
    completion_init()
    names: dict[str, Any] = {"prog_name": "capvid", "standalone_mode": False}
    code: int | None = root_command().main(args=config_first(arguments), **names)
    return code
