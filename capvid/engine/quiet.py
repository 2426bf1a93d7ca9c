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
    """A stderr that passes over Ray's own lines."""

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

    What Python writes to stderr otherwise goes on. With ``CAPVID_DEBUG`` everything is seen.
    """
    if os.environ.get("CAPVID_DEBUG"):
        yield
        return
    sys.stderr.flush()
    kept, stderr = os.dup(2), sys.stderr
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        if _is_file(stderr, 2):
            how: dict[str, Any] = {"encoding": stderr.encoding, "errors": stderr.errors}
            sys.stderr = _Others(os.fdopen(os.dup(2), "wb", buffering=0), write_through=True, **how)
        os.dup2(null, 2)
        yield
    finally:
        sys.stderr.flush()
        sys.stderr = stderr
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _is_file(stream: Any, number: int) -> bool:
    try:
        return bool(stream.fileno() == number)
    except (OSError, ValueError, AttributeError):
        return False
