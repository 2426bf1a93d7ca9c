"""The ``capvid`` command: parses, calls the library, prints. One short file per subcommand."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType

__all__ = ["debugging", "main"]

debugging = ContextVar("debugging", default=False)  # whether tracebacks are wanted

BROKEN_PIPE = 141  # as a shell shows programs that SIGPIPE ends
INTERRUPTED = 130
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
    from capvid.cli import streams
    from capvid.heap import keep_freed_memory

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
        from capvid.cli.app import run

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
    from capvid.cli.streams import stdout_error

    if error.filename:
        return f"{error.filename}: "
    return "stdout: " if stdout_error() else ""


def _explain(line: str, *, debug: bool) -> None:
    """Print the line on stderr, after the traceback when debugging."""
    from capvid.escaping import terminal

    with suppress(OSError):
        if debug:
            import traceback

            traceback.print_exc()
        print(terminal(line), file=sys.stderr)
