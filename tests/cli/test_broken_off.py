"""Large runs that are killed and interrupted."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ready import Ready
from toy import Toy, write_video

pytestmark = pytest.mark.slow


def lines(out: Path) -> list[dict[str, Any]]:
    """The records in all shards."""
    return [json.loads(line) for path in sorted(out.glob("captions-*.jsonl")) for line in path.open("rb")]


def by_video(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Records by their videos, each of which is there once."""
    assert len({record["video"] for record in found}) == len(found)
    return {record["video"]: record for record in found}


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_runs_that_are_broken_off_go_on(toy: Toy, tmp_path: Path) -> None:
    """Kills and interrupts; an undisturbed run says the same of every video."""
    videos, out, whole = tmp_path / "videos", tmp_path / "out", tmp_path / "whole"
    for seed in range(12):
        write_video(videos / f"{seed}.mp4", seed=seed, frames=1 + seed % 5)
    (videos / "broken.mp4").write_bytes(
        b"no video at all, but a text that is long enough to be looked at" * 9
    )
    command = [
        "caption",
        videos,
        "--model",
        toy.model,
        "--batch-size",
        2,
        "--workers",
        1,
        "--videos-per-file",
    ]
    with Ready() as ready:
        for number in range(3):
            before = len(lines(out))
            process = ready.start([*command, 2, "--output-dir", out], stderr=tmp_path / "said")
            begun = time.monotonic()
            while len(lines(out)) < min(13, before + 2):
                assert time.monotonic() - begun < 60
                time.sleep(0.005)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGINT if number == 1 else signal.SIGKILL)
            code = ready.wait()
            by_video(lines(out))  # none is there twice
            if number == 1 and code == 130:
                said = (tmp_path / "said").read_text()
                assert said.splitlines()[-1].startswith("interrupted: ")
                assert said.endswith("; the same command goes on from there\n")
        assert len(lines(out)) >= 6
        ready.start([*command, 2, "--output-dir", out], stderr=tmp_path / "said")
        assert ready.wait() in (0, 3)
        ready.start([*command, 100, "--output-dir", whole])
        assert ready.wait() == 3
    assert by_video(lines(out)) == by_video(lines(whole)) and len(lines(out)) == 13
    left = [path.name for path in out.iterdir() if not path.name.startswith("captions-")]
    assert left == ["capvid-shards.json"]
