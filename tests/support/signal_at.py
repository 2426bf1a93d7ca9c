"""Commands that signal themselves at a defined point, so that no test has to be quick enough to hit it.

The points are audit events: those of Python, such as ``os.rename`` just before a file is put in its place,
and ``stdout`` after each text that is written there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


def signal_at(number: int, event: str, text: str, count: int, *, delay: float = 0) -> None:
    """Send this process a signal at the ``count``-th event with ``text`` in one of its arguments.

    Args:
        delay: seconds that the process goes on before.
    """

    def send(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if name == event and any(text in str(argument) for argument in arguments):
            count -= 1
            if not count and delay:
                threading.Timer(delay, os.kill, (os.getpid(), number)).start()
            elif not count:
                os.kill(os.getpid(), number)

    sys.addaudithook(send)


def command(number: int, event: str, text: str, count: int, *arguments: object) -> list[str]:
    """Return a ``capvid`` command with ``arguments`` that calls :func:`signal_at` first."""
    return [sys.executable, __file__, str(int(number)), event, text, str(count), *map(str, arguments)]


def wait_until_stopped(process: subprocess.Popen[Any]) -> None:
    """Wait until a process has sent itself SIGSTOP."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.communicate()


def interrupt_stopped(process: subprocess.Popen[Any]) -> None:
    """Let a stopped process go on, with an interrupt."""
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)


def _main(number: str, event: str, text: str, count: str, *arguments: str) -> int:
    sys.path[0] = str(Path(__file__).parents[2])
    sys.argv[1:] = arguments
    from capvid.cli.app import main

    write = sys.stdout.write

    def audited(text: str) -> int:
        written = write(text)
        sys.stdout.flush()
        sys.audit("stdout", text)
        return written

    sys.stdout.write = audited  # type: ignore[method-assign]
    signal_at(int(number), event, text, int(count))
    return main()


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
