"""Read mutants in a separate process, with a deadline and a memory limit for each.

``python tests/support/sandbox.py ARTEFACT FILE`` reads a single file, to reproduce a failure.
"""

from __future__ import annotations

import resource
import shutil
import sys
import traceback
from pathlib import Path

from artefacts import ARTEFACTS

from capvid.errors import CapvidError
from capvid.video.worker_pool import Worker, WorkerDiedError

SECONDS = 10.0
EXTRA_BYTES = 1 << 30
UNPREPARED = "unprepared"

_prepared: set[str] = set()  # artefacts whose imports and limits are set up in this process


def prepare(name: str, original: Path) -> None:
    """Read a valid file, so that everything is imported, then limit the address space to 1 GiB more."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    ARTEFACTS[name].read(original)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bytes_allowed = pages * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bytes_allowed, limit))
    _prepared.add(name)


def read_mutant(name: str, path: Path) -> str:
    """Read a file; return an empty string, or the traceback of an error that is not meant for users."""
    if name not in _prepared:
        return UNPREPARED
    try:
        ARTEFACTS[name].read(path)
    except CapvidError as error:
        str(error)
        if error.kind == "internal":
            return traceback.format_exc()
    except OSError as error:
        if not error.strerror:
            return traceback.format_exc()
    except BaseException:
        return traceback.format_exc()
    return ""


class Sandbox:
    """A worker process that reads mutants and is replaced when one of them kills it."""

    def __init__(self) -> None:
        self._worker = Worker()

    def read(self, name: str, original: Path, path: Path) -> str:
        """Read a mutant; return an empty string or what is wrong: a traceback, a crash or a timeout."""
        try:
            answer = self._worker.call(read_mutant, name, path, timeout=SECONDS)
            if answer == UNPREPARED:
                self.prepare(name, original)
                answer = self._worker.call(read_mutant, name, path, timeout=SECONDS)
            return answer
        except WorkerDiedError as error:
            return f"the process died: {error}"
        except TimeoutError:
            return f"no result after {SECONDS:g} s"

    def prepare(self, name: str, original: Path) -> None:
        """Read a copy of a valid folder; this must succeed."""
        copy = original.parent.with_name("valid copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original.parent, copy)
        self._worker.call(prepare, name, copy / original.name)

    def close(self) -> None:
        self._worker.close()


if __name__ == "__main__":
    ARTEFACTS[sys.argv[1]].read(Path(sys.argv[2]))
