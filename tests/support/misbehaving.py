"""Decoding that hangs, crashes, raises or is killed in its worker process, by the name of the video."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from capvid.features.prefetch import Decoded, Timeline, View, decode_video, read_timeline
from capvid.video.frame_sampling import Sampling


def decode(path: Path, sampling: Sampling, views: Sequence[View], reader: str, pictures: bool) -> Decoded:
    """Decode a video, unless its name asks for a failure; ``crashes once`` fails in all readers but PyAV."""
    if path.stem == "sleeps":
        time.sleep(1000)
    if path.stem == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if path.stem == "crashes" or (path.stem == "crashes once" and reader != "pyav"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if path.stem == "raises":
        raise ValueError("boom")
    if path.stem == "runs out of memory":
        raise MemoryError
    return decode_video(path, sampling, views, reader, pictures)


def timeline(path: Path, reader: str) -> Timeline:
    """Read the frame times of a video, or hang if its name is ``raises``."""
    if path.stem == "raises":
        time.sleep(1000)
    return read_timeline(path, reader)
