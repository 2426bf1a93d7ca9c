"""The ``capvid`` command: parses, calls the library, prints. One short file per subcommand."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Every error is one line on stderr; ``--debug``, anywhere before ``--``, or ``CAPVID_DEBUG=1`` shows the
    traceback as well.

    Args:
        args: the arguments after the program's name; None takes those of this process.

    Returns:
        0 all done, 1 nothing could be done, 2 usage, 3 some inputs failed, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    arguments, debug = _take_debug(arguments)
    try:
        code = _run(arguments, debug=debug)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has gone: say nothing, here and at exit
        _silence_stdout()
        return 1
    return code


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

        run(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except CapvidError as error:
        _explain(f"error: {error}", debug=debug)
        return error.exit_code
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _explain(f"error: {place}{error.strerror or error}", debug=debug)
        return 1
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _explain(f"internal error: {' '.join(text.split())}; run with --debug for the traceback", debug=debug)
        return 1
    return 0


def _explain(line: str, *, debug: bool) -> None:
    """Print the line on stderr, after the traceback when debugging."""
    if debug:
        import traceback

        traceback.print_exc()
    print(line, file=sys.stderr)


def _silence_stdout() -> None:
    """Let the interpreter's last flush of stdout go nowhere instead of raising."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
