"""stdin, stdout and stderr, in whatever state the process was given them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from capvid.escaping import terminal


def prepare() -> None:
    """Make the streams such that anything can be written, and that no file takes the place of a closed one.

    A path that is no valid text is written with backslashes. What does not go to a terminal is UTF-8, as
    files are, unless ``PYTHONIOENCODING`` says otherwise.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            data = stream is sys.stdout and not stream.isatty() and "PYTHONIOENCODING" not in os.environ
            encoding = "utf-8" if data else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _open_closed() -> None:
    """Open streams that were closed: stderr takes what nobody reads, writing to stdout stays an error."""
    with suppress(OSError):
        for number, (name, flags) in enumerate(
            [("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)]
        ):
            if getattr(sys, name) is None:
                _fill(number, flags)
                mode = "r" if name == "stdin" else "w"
                setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _fill(number: int, flags: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, flags)
        if null == number:
            os.set_inheritable(null, True)  # nor may it be closed in processes that we start
        else:
            os.dup2(null, number)
            os.close(null)


def print_line(text: str | os.PathLike[str] = "", *, err: bool = False) -> None:
    """Print one line on stdout or stderr, with control characters escaped."""
    print(terminal(text), file=sys.stderr if err else sys.stdout, flush=True)


def stdout_error() -> OSError | None:
    """Say what is wrong with stdout, if what was written cannot get there."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def silence() -> None:
    """Let the interpreter's last flush of a stream that is broken go nowhere instead of raising."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        if stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
