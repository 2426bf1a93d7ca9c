"""Memory that was freed stays with the process, for the next tensor of its size.

By default the C library gives large blocks back to the system at once and, when the same sizes are asked for
again, at the next batch or word, takes fresh pages, which the system has to clear one by one.
"""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt(3).
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3

LARGEST = 1 << 30  # bytes; blocks above it are taken from the system and given back, as ever
LARGEST_ANYWHERE = 32 << 20  # what every version of the C library allows
PAD = 64 << 20  # bytes by which the heap grows

# With one of these in the environment the user has decided.
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, with the GNU C library and where the user set nothing.

    Returns:
        whether it does.
    """
    if not _is_gnu() or any(name in os.environ for name in SETTINGS):
        return False
    set_option = ctypes.CDLL(None).mallopt
    kept = set_option(MMAP_THRESHOLD, LARGEST) or set_option(MMAP_THRESHOLD, LARGEST_ANYWHERE)
    return bool(kept and set_option(TRIM_THRESHOLD, LARGEST) and set_option(TOP_PAD, PAD))


def _is_gnu() -> bool:
    """Whether the C library is GNU's."""
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, OSError, ValueError):  # another system
        return False
