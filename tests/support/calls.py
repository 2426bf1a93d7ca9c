"""Functions that the tests call in worker processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from capvid.errors import TruncatedVideoError
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import read_frames


def arrays(count: int, size: int) -> dict[str, object]:
    return {
        "many": [np.full(size, n, np.uint8) for n in range(count)],
        "empty": np.empty((0, 3)),
        "pid": os.getpid(),
    }


def pid() -> int:
    return os.getpid()


def announce_and_sleep(path: str) -> None:
    Path(path).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(600)


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def crash() -> None:
    import ctypes

    ctypes.string_at(0)


def leave() -> None:
    os._exit(7)


def fail() -> None:
    raise TruncatedVideoError("a b.mp4", "ends too early", remedy="get it again")


def stumble() -> None:
    raise KeyError("something of a decoder's")


def chatter() -> str:
    print("on stdout")
    print("on stderr", file=sys.stderr)
    os.write(1, b"beneath stdout\n")
    return "said"


def modules() -> list[str]:
    return sorted(sys.modules)


def ignores_terminations() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


def read_hungrily(path: Path) -> int:
    def grow(frames: np.ndarray) -> np.ndarray:
        return np.ones((len(frames), 1 << 27, 8))

    return len(read_frames(path, UniformSampling(4), reduce=grow).frames)
