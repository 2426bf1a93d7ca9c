"""Keeping what Ray says about itself from the terminal; it has log files for that."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RAYS = re.compile(r"(\x1b\[\d+m)*\((raylet|autoscaler|gcs_server)[^)]*\)")  # what its lines begin with


class _Others(io.TextIOWrapper):
    """A stream that passes over Ray's own lines."""

    _passed_over = False

    def write(self, text: str) -> int:
        """Write what is not Ray's."""
        if _RAYS.match(text):
            self._passed_over = not text.endswith("\n")
            return len(text)
        if self._passed_over and text == "\n":
            self._passed_over = False
            return 1
        return super().write(text)


@contextmanager
def without_chatter() -> Iterator[None]:
    """Let neither Ray's core, which writes to the file of stderr, nor its news of workers be seen.

    What Python writes to stdout and stderr otherwise goes on. With ``CAPVID_DEBUG`` everything is seen.
    """
    if os.environ.get("CAPVID_DEBUG"):
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept, stdout, stderr = os.dup(2), sys.stdout, sys.stderr
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stdout, sys.stderr = _filtered(stdout, 1), _filtered(stderr, 2)
        os.dup2(null, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = stdout, stderr
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _filtered(stream: Any, number: int) -> Any:
    """The same stream without Ray's lines, if it writes to the file of that number."""
    if not _is_file(stream, number):
        return stream
    how: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors}
    return _Others(os.fdopen(os.dup(number), "wb", buffering=0), write_through=True, **how)


def _is_file(stream: Any, number: int) -> bool:
    try:
        return bool(stream.fileno() == number)
    except (OSError, ValueError, AttributeError):
        return False
