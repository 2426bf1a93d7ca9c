"""Runs that are killed again and again, and what is there when one at last comes to its end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy import Toy, write_video

VIDEOS, KILLS = 50, 20


def extract(videos: Path, out: Path, *more: object) -> list[str]:
    arguments = ("extract", videos, "--backbone", "toy", "--frames", 3, "-o", out, *more)
    return [sys.executable, "-m", "capvid", *map(str, arguments)]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_after_twenty_kills_the_files_are_those_of_an_undisturbed_run(toy: Toy, tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    for seed in range(VIDEOS):
        write_video(videos / f"{seed}.mp4", seed=seed, frames=1 + seed % 7)
    whole = tmp_path / "whole"
    subprocess.run(extract(videos, whole), check=True, capture_output=True, timeout=120)
    out, chance = tmp_path / "out", random.Random(5)
    progress = []
    for _ in range(KILLS):
        before = len(list(out.glob("*.safetensors")))
        process = subprocess.Popen(extract(videos, out, "--batch-size", chance.choice((2, 8, 32))), stderr=-3)
        start = time.monotonic()
        while len(list(out.glob("*.safetensors"))) == before and process.poll() is None:
            assert time.monotonic() - start < 60
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.08))
        process.send_signal(signal.SIGKILL)
        process.wait()
        progress.append(len(list(out.glob("*.safetensors"))) - before)
    assert sum(1 for done in progress if done) > 5, progress  # it was killed at work
    last = subprocess.run(extract(videos, out), capture_output=True, text=True, timeout=120, check=True)
    assert last.stderr.startswith(f"{VIDEOS - sum(progress)} extracted")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
