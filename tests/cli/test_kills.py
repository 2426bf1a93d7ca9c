"""``extract`` and ``caption`` killed repeatedly end with the files of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command_server import CommandServer
from toy import Toy, write_video

from capvid.cli._batch import SOME_FAILED

pytestmark = pytest.mark.slow

VIDEOS = 50
BROKEN = ("a/broken.mp4", "b/broken.mp4", "not a/vidéo.mp4")

Command = Callable[..., list[object]]


def extract_command(toy: Toy, videos: Path, out: Path, *arguments: object) -> list[object]:
    return ["extract", videos, "--backbone", "toy", "--frames", 3, "-o", out, *arguments]


def caption_command(toy: Toy, videos: Path, out: Path, *arguments: object) -> list[object]:
    options = ["--segments", 2, "--format", "json", "--output-dir", out]
    return ["caption", videos, "--model", toy.model, *options, *arguments]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize(
    ("command", "suffix", "verb", "sizes", "kills"),
    [
        (extract_command, "safetensors", "extracted", (2, 8, 32), 10),
        (caption_command, "json", "captioned", (1, 2, 8), 12),
    ],
    ids=["extract", "caption"],
)
def test_killed_runs_end_with_the_files_of_an_undisturbed_run(
    toy: Toy, tmp_path: Path, command: Command, suffix: str, verb: str, sizes: tuple[int, ...], kills: int
) -> None:
    videos = tmp_path / "videos"
    for seed in range(VIDEOS):  # equal names in different folders
        write_video(videos / "ab"[seed % 2] / f"{seed // 2}.mp4", seed=seed, frames=1 + seed % 7)
    for name in BROKEN:
        (videos / name).parent.mkdir(exist_ok=True)
        (videos / name).write_bytes(b"plain text, long enough for its format to be probed" * 9)
    undisturbed, out, stderr = tmp_path / "undisturbed", tmp_path / "out", tmp_path / "stderr"
    generator, progress = random.Random(5), []
    kill = {"number": signal.SIGKILL, "event": "os.rename", "text": f".{suffix}.", "count": 2}

    def count() -> int:
        return len(list(out.rglob(f"[0-9]*.{suffix}")))

    with CommandServer() as server:
        server.start(command(toy, videos, undisturbed))
        assert server.wait() == SOME_FAILED
        for number in range(kills):
            finished = count()
            # the first half is killed just before the second file, the other half at any moment after that
            delay = 0 if number < kills // 2 else generator.uniform(0, 0.02)
            options = ["--batch-size", generator.choice(sizes)]
            server.start(command(toy, videos, out, *options), signal_at={**kill, "delay": delay})
            code = server.wait()
            progress.append(count() - finished)
            assert delay or (code, progress[-1]) == (-signal.SIGKILL, 1)
            for path in out.rglob(f"*.{suffix}"):
                assert path.read_bytes() == (undisturbed / path.relative_to(out)).read_bytes()
        server.start(command(toy, videos, out), stderr=stderr)
        assert server.wait() == SOME_FAILED
    remaining = VIDEOS - sum(progress)
    lines = stderr.read_text().splitlines()
    # a kill may come between a video's file and its line in the manifest
    assert remaining <= int(lines[-1].split()[0]) <= remaining + kills and verb in lines[-1]
    files = {
        path.relative_to(undisturbed): path.read_bytes() for path in undisturbed.rglob("*") if path.is_file()
    }
    assert len(files) >= VIDEOS
    assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} == files
