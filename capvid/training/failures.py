"""What can go wrong in the midst of a run, on one line that says what is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from capvid.errors import TrainingError, TrainingMemoryError

_IO = re.compile(r"I/O error: (.*?)(?: \(os error \d+\))?$")  # as safetensors says it
_FULL = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "alloc_failed")


def is_out_of_memory(error: Exception) -> bool:
    """Whether it says that there is not enough memory, of the processor or an accelerator."""
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return full or any(said in str(error).lower() for said in _FULL)


@contextmanager
def memory_that_may_end(where: str, kept: str) -> Iterator[None]:
    """Turn a lack of memory into one line.

    Args:
        where: in the run.
        kept: what of the run is kept.

    Raises:
        TrainingMemoryError: there was not enough memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
        if not is_out_of_memory(error):
            raise
        raise TrainingMemoryError(
            f"out of memory in {where}; {kept}",
            remedy="take the batches in parts, with --set training.accumulate=2 or more, and --resume",
        ) from error


@contextmanager
def disk_that_may_fill(folder: Path, kept: str) -> Iterator[None]:
    """Turn a file that cannot be written into one line.

    Args:
        folder: of the run.
        kept: what of it is kept.

    Raises:
        TrainingError: a file could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or _said(str(error).splitlines()[0])
        raise TrainingError(
            f"{folder}: the run cannot be saved ({reason}); {kept}",
            remedy="make room, and go on with --resume",
        ) from error


def _said(text: str) -> str:
    """The system's reason in what safetensors says."""
    found = _IO.search(text)
    return found[1] if found else text
