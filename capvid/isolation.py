"""The boundary around one input: which exceptions cost that input, and which end the run."""

from __future__ import annotations

import errno
import os

from capvid.errors import CapvidError, InternalError, RunError

_DISK_FULL = {errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}


def input_error(path: str | os.PathLike[str], cause: Exception) -> CapvidError:
    """Return the error of an input by what was raised while it was handled.

    Args:
        path: path or address of the input.
        cause: the exception, which was just caught.

    Raises:
        Exception: ``cause`` itself if it concerns every input: a closed stdout, a full disk, a RunError.
    """
    if is_disk_full(cause) or isinstance(cause, BrokenPipeError | RunError):
        raise cause
    if isinstance(cause, CapvidError):
        return cause
    if isinstance(cause, MemoryError) or str(cause).startswith("MemoryError"):  # the latter of a worker
        return CapvidError(
            f"{path}: too little memory for this input", remedy="try it alone with --workers 1"
        )
    return InternalError(path, cause)


def is_disk_full(error: Exception) -> bool:
    """Whether nothing can be written to a disk any more."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL
