"""Runs that are killed again and again, and what is there when one at last comes to its end."""

from __future__ import annotations

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

from capvid.cli._batch import SOME_FAILED

pytestmark = pytest.mark.slow

VIDEOS = 50
BROKEN = ("a/broken.mp4", "b/broken.mp4", "not a/vidéo.mp4")
LAST = {"json": b"}\n", "safetensors": b""}  # bytes of a whole file

Command = Callable[..., list[object]]


def extract(toy: Toy, videos: Path, out: Path, *more: object) -> list[object]:
    return ["extract", videos, "--backbone", "toy", "--frames", 3, "-o", out, *more]


def caption(toy: Toy, videos: Path, out: Path, *more: object) -> list[object]:
    how = ["--segments", 2, "--format", "json", "--output-dir", out]
    return ["caption", videos, "--model", toy.model, *how, *more]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize(
    ("command", "suffix", "verb", "sizes", "kills"),
    [
        (extract, "safetensors", "extracted", (2, 8, 32), 10),
        (caption, "json", "captioned", (1, 2, 8), 12),
    ],
    ids=["extract", "caption"],
)
def test_after_many_kills_the_files_are_those_of_an_undisturbed_run(
    toy: Toy, tmp_path: Path, command: Command, suffix: str, verb: str, sizes: tuple[int, ...], kills: int
) -> None:
    videos = tmp_path / "videos"
    for seed in range(VIDEOS):  # equal names in different folders
        write_video(videos / "ab"[seed % 2] / f"{seed // 2}.mp4", seed=seed, frames=1 + seed % 7)
    for name in BROKEN:
        (videos / name).parent.mkdir(exist_ok=True)
        (videos / name).write_bytes(b"no video at all, but a text that is long enough to be looked at" * 9)
    whole, out, said = tmp_path / "whole", tmp_path / "out", tmp_path / "said"
    chance, progress = random.Random(5), []

    def count() -> int:
        return len(list(out.rglob(f"[0-9]*.{suffix}")))

    with Ready() as ready:
        ready.start(command(toy, videos, whole))
        assert ready.wait() == SOME_FAILED
        for _ in range(kills):
            before = count()
            process = ready.start(command(toy, videos, out, "--batch-size", chance.choice(sizes)))
            start = time.monotonic()
            while before < VIDEOS and count() == before:
                assert time.monotonic() - start < 60
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.02))
            with suppress(ProcessLookupError):  # it may have come to its end
                os.kill(process, signal.SIGKILL)
            ready.wait()
            progress.append(count() - before)
            assert all(path.read_bytes().endswith(LAST[suffix]) for path in out.rglob(f"*.{suffix}"))
        assert sum(1 for done in progress if done) > kills // 4, progress  # it was killed at work
        ready.start(command(toy, videos, out), stderr=said)
        assert ready.wait() == SOME_FAILED
    left = VIDEOS - sum(progress)
    lines = said.read_text().splitlines()
    # a kill may come between a video's file and its line in the manifest
    assert left <= int(lines[-1].split()[0]) <= left + kills and verb in lines[-1]
    files = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert len(files) >= VIDEOS
    assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} == files
