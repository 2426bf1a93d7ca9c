"""Runs of the command line that start at once, for tests that kill them repeatedly.

A server process imports the slow modules and forks a child for each command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

SERVE = """
import gc, importlib, json, os, sys, torch
import capvid.cli.app, capvid.backbones.backbone, capvid.features.extraction, capvid.backbones.capvid_small
import capvid.checkpoints.publishing, capvid.training.reporters, capvid.training.trainer
import tensorboardX

sys.path.append(sys.argv[1])
from signal_at import signal_at

for name in sys.argv[2:]:
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
        if command["signal_at"]:
            signal_at(**command["signal_at"])
        code = 70
        try:
            code = capvid.cli.app.main(command["arguments"])
        finally:
            os._exit(code)
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
        command = [sys.executable, "-c", SERVE, Path(__file__).parent, *self._modules]
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

    def start(
        self, arguments: Sequence[object], *, stderr: object = "", signal_at: Mapping[str, Any] | None = None
    ) -> None:
        """Start a command; :meth:`wait` must follow.

        Args:
            stderr: path that takes the command's errors.
            signal_at: arguments of :func:`signal_at.signal_at`, which the command calls first.
        """
        assert self._server.stdin is not None
        command = {"arguments": list(map(str, arguments)), "stderr": str(stderr), "signal_at": signal_at}
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()

    def wait(self) -> int:
        """Wait for the command; return its exit code, or minus the signal that ended it."""
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())
