"""Runs that are killed again and again, and what is there when one at last comes to its end."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from ready import Ready
from toy import Toy, write_video

VIDEOS, KILLS = 50, 20

Command = Callable[..., list[object]]


def extract(toy: Toy, videos: Path, out: Path, *more: object) -> list[object]:
    return ["extract", videos, "--backbone", "toy", "--frames", 3, "-o", out, *more]


def caption(toy: Toy, videos: Path, out: Path, *more: object) -> list[object]:
    return ["caption", videos, "--model", toy.model, "--format", "json", "--output-dir", out, *more]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize(
    ("command", "suffix", "verb", "sizes"),
    [(extract, "safetensors", "extracted", (2, 8, 32)), (caption, "json", "captioned", (1, 2, 8))],
    ids=["extract", "caption"],
)
def test_after_twenty_kills_the_files_are_those_of_an_undisturbed_run(
    toy: Toy, tmp_path: Path, command: Command, suffix: str, verb: str, sizes: tuple[int, ...]
) -> None:
    videos = tmp_path / "videos"
    for seed in range(VIDEOS):
        write_video(videos / f"{seed}.mp4", seed=seed, frames=1 + seed % 7)
    whole, out, said = tmp_path / "whole", tmp_path / "out", tmp_path / "said"
    chance, progress = random.Random(5), []

    def count() -> int:
        return len(list(out.glob(f"*.{suffix}")))

    with Ready() as ready:
        ready.start(command(toy, videos, whole))
        assert ready.wait() == 0
        for _ in range(KILLS):
            before = count()
            process = ready.start(command(toy, videos, out, "--batch-size", chance.choice(sizes)))
            start = time.monotonic()
            while before < VIDEOS and count() == before:
                assert time.monotonic() - start < 60
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.08))
            with suppress(ProcessLookupError):  # it may have come to its end
                os.kill(process, signal.SIGKILL)
            ready.wait()
            progress.append(count() - before)
        assert sum(1 for done in progress if done) > 5, progress  # it was killed at work
        ready.start(command(toy, videos, out), stderr=said)
        assert ready.wait() == 0
    left = VIDEOS - sum(progress)
    lines = said.read_text().splitlines()
    # a kill may come between a video's file and its line in the manifest
    assert left <= int(lines[-1].split()[0]) <= left + KILLS and verb in lines[-1]
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
    for path in whole.iterdir():
        assert_alike(path.read_bytes(), (out / path.name).read_bytes())


def assert_alike(one: bytes, other: bytes) -> None:
    """The same bytes; of captions log-probabilities may differ by what it does to compute them together."""
    if one == other:
        return
    numbers: list[list[float]] = [[], []]
    texts = [
        json.loads(text, parse_float=lambda digits, found=found: found.append(float(digits)))  # type: ignore[misc]
        for text, found in zip((one, other), numbers, strict=True)
    ]
    assert texts[0] == texts[1]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-3)
