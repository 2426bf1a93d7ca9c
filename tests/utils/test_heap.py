"""Memory that stays with the process: how many pages it takes to use blocks of one size again and again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from capvid.utils.device import MALLOC_VARIABLES

COUNT = """
import ctypes, resource, sys
from capvid.cli.app import main
from capvid.utils.device import keep_freed_memory

if sys.argv[1] == "kept":
    print(keep_freed_memory())
elif sys.argv[1] == "command":
    main(["--version"])
heap = ctypes.CDLL(None)
heap.malloc.argtypes, heap.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
heap.free.argtypes = [ctypes.c_void_p]


def use(size):
    block = heap.malloc(size)
    ctypes.memset(block, 1, size)
    heap.free(block)


use(48 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use(40 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def said(how: str, **variables: str) -> list[str]:
    """What the process prints: what was returned, and how many pages it took."""
    plain = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    command = [sys.executable, "-c", COUNT, how]
    done = subprocess.run(command, env={**plain, **variables}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(said("kept")[0] != "True", reason="another C library")
def test_pages_are_used_again() -> None:
    fresh = int(said("nothing")[-1])
    assert said("kept")[0] == "True"
    for how in ("kept", "command"):
        assert int(said(how)[-1]) * 10 < fresh, how


@pytest.mark.slow
@pytest.mark.parametrize("name", MALLOC_VARIABLES)
def test_what_the_user_has_set_stays(name: str) -> None:
    value = "glibc.malloc.top_pad=131072" if name == "GLIBC_TUNABLES" else "131072"
    assert said("kept", **{name: value})[0] == "False"
