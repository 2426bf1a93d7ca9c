"""Runs of the command line that start at once, for tests that kill them repeatedly.

A server process imports the slow modules and forks a child for each command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

SERVE = """
import gc, importlib, json, os, sys, torch
import capvid.cli.app, capvid.backbones.backbone, capvid.features.extraction, capvid.backbones.capvid_small
import capvid.checkpoints.publishing, capvid.training.reporters, capvid.training.trainer
import tensorboardX

for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if not child:
        command = json.loads(line)
        null = os.open(os.devnull, os.O_RDWR)
        error = os.open(command["stderr"] or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, file in enumerate((null, null, error)):
            os.dup2(file, number)
        code = 70
        try:
            code = capvid.cli.app.main(command["arguments"])
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class CommandServer:
    """Starts commands one after the other.

    Args:
        modules: further modules to import in the server.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self) -> CommandServer:
        command = [sys.executable, "-c", SERVE, *self._modules]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.kill()
        self._server.communicate()

    def start(self, arguments: Sequence[object], *, stderr: object = "") -> int:
        """Start a command and return its process id; :meth:`wait` must follow."""
        assert self._server.stdin is not None
        command = {"arguments": [str(argument) for argument in arguments], "stderr": str(stderr)}
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """Wait for the command; return its exit code, or minus the signal that ended it."""
        return int(self._line())

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline()
