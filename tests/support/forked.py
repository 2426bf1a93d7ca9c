"""Run Python code or the command in forked processes that start with the slow modules imported.

Each test process has a server that imports them once and forks for each run; a run has its own arguments,
environment, working folder and output. Modules that read the environment on import, such as the Hub's client,
are not imported in advance.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock

SERVE = """
import atexit, gc, importlib.util, json, os, runpy, sys, traceback
import torch, torchvision
import capvid.captioners.checkpoint, capvid.cli.app, capvid.backbones.backbone, capvid.features.extraction
import capvid.checkpoints.publishing

for name in ("httpx", "requests", "torchvision.models", "yaml"):
    if importlib.util.find_spec(name):
        importlib.import_module(name)
assert not any(name.partition(".")[0] in ("huggingface_hub", "transformers") for name in sys.modules)
gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
command = json.loads(line)
os.environ.clear()
os.environ.update(command["environment"])
os.chdir(command["folder"])
flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
files = os.open(os.devnull, os.O_RDONLY), os.open(command["out"], flags), os.open(command["err"], flags)
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
sys.argv = ["-c", *command["arguments"]]
code = 0
try:
    if command["code"] is None:
        runpy.run_module("capvid", run_name="__main__", alter_sys=True)
    else:
        exec(compile(command["code"], "<string>", "exec"), {"__name__": "__main__"})
except SystemExit as end:
    code = int(end.code or 0)
except BaseException:
    traceback.print_exc()
    code = 1
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # skips interpreter shutdown, which would take longer than the run
"""
_LOCK = Lock()


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    return server


def run(
    code: str | None, arguments: Sequence[object], *, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``code``, or capvid's command where it is None, with ``arguments``."""
    argv = [str(argument) for argument in arguments]
    if sys.platform != "linux":  # forking after these imports is safe only on Linux
        options = ["-m", "capvid"] if code is None else ["-c", code]
        command = [sys.executable, *options, *argv]
        return subprocess.run(command, capture_output=True, text=True, env=dict(env), cwd=cwd, timeout=200)
    with tempfile.TemporaryDirectory() as name, _LOCK:
        out, err = Path(name, "out"), Path(name, "err")
        request = {"code": code, "arguments": argv, "environment": dict(env)}
        request |= {"folder": str(cwd or Path.cwd()), "out": str(out), "err": str(err)}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        returncode = int(server.stdout.readline())
        return subprocess.CompletedProcess(argv, returncode, out.read_text(), err.read_text())
