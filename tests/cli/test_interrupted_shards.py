"""Sharded runs resume after kills and interrupts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command_server import CommandServer
from shard_records import index_by_video, read_jsonl_shards
from toy import Toy, write_video

pytestmark = pytest.mark.slow


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_sharded_run_resumes_after_kills_and_interrupts(toy: Toy, tmp_path: Path) -> None:
    """The captions equal those of an uninterrupted run."""
    videos, out, undisturbed = tmp_path / "videos", tmp_path / "out", tmp_path / "undisturbed"
    for seed in range(12):
        write_video(videos / f"{seed}.mp4", seed=seed, frames=1 + seed % 5)
    (videos / "broken.mp4").write_bytes(b"plain text, long enough for its format to be probed" * 9)
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
    with CommandServer() as server:
        for number in range(3):
            ending = signal.SIGINT if number == 1 else signal.SIGKILL
            at = {"number": ending, "event": "os.rename", "text": "captions-", "count": 2}
            server.start([*command, 2, "--output-dir", out], stderr=tmp_path / "stderr", signal_at=at)
            assert server.wait() == (130 if ending == signal.SIGINT else -ending)
            index_by_video(read_jsonl_shards(out))  # no duplicates
            if ending == signal.SIGINT:
                stderr = (tmp_path / "stderr").read_text()
                assert stderr.splitlines()[-1].startswith("interrupted: ")
                assert stderr.endswith("; the same command goes on from there\n")
        assert len(read_jsonl_shards(out)) >= 6
        server.start([*command, 2, "--output-dir", out], stderr=tmp_path / "stderr")
        assert server.wait() in (0, 3)
        server.start([*command, 100, "--output-dir", undisturbed])
        assert server.wait() == 3
    assert (
        index_by_video(read_jsonl_shards(out)) == index_by_video(read_jsonl_shards(undisturbed))
        and len(read_jsonl_shards(out)) == 13
    )
    other_files = [path.name for path in out.iterdir() if not path.name.startswith("captions-")]
    assert other_files == ["capvid-shards.json"]
