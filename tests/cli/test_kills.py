"""Runs that are killed again and again, and what is there when one at last comes to its end."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ready import Ready
from toy import Toy, write_video

VIDEOS, KILLS = 50, 20


def extract(videos: Path, out: Path, *more: object) -> list[object]:
    return ["extract", videos, "--backbone", "toy", "--frames", 3, "-o", out, *more]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_after_twenty_kills_the_files_are_those_of_an_undisturbed_run(toy: Toy, tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    for seed in range(VIDEOS):
        write_video(videos / f"{seed}.mp4", seed=seed, frames=1 + seed % 7)
    whole, out, said = tmp_path / "whole", tmp_path / "out", tmp_path / "said"
    chance, progress = random.Random(5), []
    with Ready() as ready:
        ready.start(extract(videos, whole))
        assert ready.wait() == 0
        for _ in range(KILLS):
            before = len(list(out.glob("*.safetensors")))
            process = ready.start(extract(videos, out, "--batch-size", chance.choice((2, 8, 32))))
            start = time.monotonic()
            while before < VIDEOS and len(list(out.glob("*.safetensors"))) == before:
                assert time.monotonic() - start < 60
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.08))
            with suppress(ProcessLookupError):  # it may have come to its end
                os.kill(process, signal.SIGKILL)
            ready.wait()
            progress.append(len(list(out.glob("*.safetensors"))) - before)
        assert sum(1 for done in progress if done) > 5, progress  # it was killed at work
        ready.start(extract(videos, out), stderr=said)
        assert ready.wait() == 0
    assert said.read_text().startswith(f"{VIDEOS - sum(progress)} extracted")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
