"""Decoding that hangs, crashes or is killed, by the name of the video; in the process that decodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from capvid.features.decode import Decoded, View, decode_video
from capvid.video.sampling import Sampling


def decode(path: Path, sampling: Sampling, views: Sequence[View], reader: str, pictures: bool) -> Decoded:
    """Decode a video, unless its name says otherwise; ``crash once`` is a reader's fault."""
    if path.stem == "sleeps":
        time.sleep(1000)
    if path.stem == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if path.stem == "crashes" or (path.stem == "crashes once" and reader != "pyav"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return decode_video(path, sampling, views, reader, pictures)
