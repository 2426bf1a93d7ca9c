"""Large runs on a Ray cluster of two nodes, which here are two groups of processes of one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import signal_at
from s3_server import FlakyS3
from webdataset_reader import read_webdataset

pytest.importorskip("ray")
# A busy machine starts processes slowly.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


class TwoNodes:
    """A cluster of a head and a second node."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 1, "object_store_memory": 100 << 20}
        self.cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        self.second = self.cluster.add_node(**small)
        self.address = self.cluster.address

    def actors(self, kind: str = "MapWorker") -> list[psutil.Process]:
        """Actors of a kind that have begun, by default all."""
        found = []
        for node in self.cluster.list_all_nodes():
            for info in node.all_processes.get("raylet", []):
                for child in psutil.Process(info.process.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        title = " ".join(child.cmdline())
                        if "MapWorker" in title and kind in title and "__init__" not in title:
                            found.append(child)
        return found

    def close(self) -> None:
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def s3() -> Iterator[FlakyS3]:
    """A server that fails now and then, whose credentials are in the environment of the cluster."""
    server = FlakyS3()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **server.environment(),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
        }.items():
            patch.setenv(name, value)
        yield server
    server.close()


@pytest.fixture(scope="module")
def nodes(s3: FlakyS3) -> Iterator[TwoNodes]:
    cluster = TwoNodes()
    yield cluster
    cluster.close()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def start_until_first_shard(number: int, *arguments: object) -> subprocess.Popen[str]:
    """Start a command that sends itself a signal when the first shard is reported to it."""
    command = signal_at.command(number, "pickle.find_class", "capvid.output.shards", 1, *arguments)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(*arguments: object) -> tuple[int, str]:
    """The exit code of a command that needs no cluster, and what it said."""
    done = forked.run(None, arguments, env=environment(), cwd=ROOT)
    return done.returncode, done.stderr


def records(folder: Path) -> list[dict[str, Any]]:
    """What the shards of a folder say, by video."""
    lines = [line for shard in folder.glob("captions-*.jsonl") for line in shard.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda record: record["video"])


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait until there is something."""
    end = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def test_features_of_an_archive_on_a_server_that_fails_now_and_then(
    nodes: TwoNodes, s3: FlakyS3, many_videos: Path, tmp_path: Path
) -> None:
    """They are those of this machine, to the last digit; what ends every process is given up alone."""
    import s3fs

    folders = many_videos / "3", many_videos / "broken"
    how = ["--backbone", "colour-grid", "--frames", 4, "--format", "webdataset", "-o", tmp_path]
    code, said = run("extract", *folders, *how)
    assert code == 3 and "20 extracted" in said and "20 failed" in said, said
    bucket = s3fs.S3FileSystem()
    bucket.mkdir("ray")
    for folder in folders:
        for path in folder.iterdir():
            bucket.pipe_file(f"ray/{folder.name}/{path.name}", path.read_bytes())
    bucket.pipe_file("ray/3/poison.mp4", next(folders[0].iterdir()).read_bytes())
    s3.every, s3.cut = 9, 5
    script = ROOT / "tests" / "support" / "ray_crashing_job.py"
    process = subprocess.Popen(
        [sys.executable, script, nodes.address, "s3://ray/features", "s3://ray/3/", "s3://ray/broken/"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, errors = process.communicate(timeout=500)
    failed, s3.every, s3.cut = s3.failed, 0, 0
    assert process.returncode == 0, errors
    assert failed > 5
    counted = [json.loads(line) for line in said.splitlines()]
    bucket.invalidate_cache()
    theirs = by_name(bucket.cat(shard) for shard in bucket.glob("ray/features/features-*.tar"))
    ours = by_name(shard.read_bytes() for shard in tmp_path.glob("features-*.tar"))
    poison, _ = theirs.pop("3/poison.mp4")
    why = "the processes that worked on it died, one after the other; see whether there is memory enough"
    assert dict(counted)["s3://ray/3/poison.mp4"] == f"s3://ray/3/poison.mp4: {why}"
    assert poison["status"] == "error"
    assert poison["error"]["message"] == f"s3://ray/3/poison.mp4: {why.partition(';')[0]}"
    assert len(counted) == len(dict(counted)) == 41
    assert theirs.keys() == ours.keys() and len(ours) == 40
    for name, (one, features) in ours.items():
        other, found = theirs[name]
        assert one["status"] == other["status"] and one["duration"] == other["duration"]
        assert (features is None) == (found is None) == (one["status"] == "error")
        if features is not None:
            assert features.header == found.header and features.video == found.video
            assert features.streams[0].tolist() == found.streams[0].tolist()
            assert features.times.tolist() == found.times.tolist()


def by_name(shards: Iterable[bytes]) -> dict[str, Any]:
    """What shards have of each video, by the end of its path."""
    samples = [sample for shard in shards for sample in read_webdataset(shard)]
    found = {"/".join(sample[0]["video"].split("/")[-2:]): sample for sample in samples}
    assert len(found) == len(samples)
    return found


def test_runs_that_die_lose_nothing_and_double_nothing(
    nodes: TwoNodes, quick_model: Path, many_videos: Path, tmp_path: Path
) -> None:
    """The first run is killed; in the second an actor of each kind, and a node, while they work."""
    command = ["caption", many_videos, "--model", quick_model]
    code, said = run(*command, "--output-dir", tmp_path / "here", "--videos-per-file", 50)
    assert code == 3 and "140 captioned" in said and "20 failed" in said, said
    here, out = records(tmp_path / "here"), tmp_path / "ray"
    assert Counter(record["status"] for record in here) == {"ok": 140, "error": 20}
    assert len({record["captions"][0]["text"] for record in here if record["captions"]}) > 3
    command += ["--output-dir", out, "--videos-per-file", 5]
    command += ["--engine", "ray", "--ray-address", nodes.address]

    def shards() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in out.glob("captions-*.jsonl")}

    process = start_until_first_shard(signal.SIGKILL, *command)
    _, said = process.communicate(timeout=500)
    assert process.returncode == -signal.SIGKILL, said
    wait_for(lambda: not nodes.actors())  # a shard may be on its way
    before, done = shards(), records(out)
    assert 5 <= len(done) <= 130

    process = start_until_first_shard(signal.SIGSTOP, *command)
    for kind in ("Decoding", "Computing"):
        actors: list[psutil.Process] = wait_for(partial(nodes.actors, kind))
        actors[0].kill()
    signal_at.wait_until_stopped(process)
    assert len(before) < len(shards()) < 30
    nodes.cluster.remove_node(nodes.second, allow_graceful=False)
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=500)
    code = process.returncode
    *errors, last = said.splitlines()
    good = sum(record["status"] == "ok" for record in done)
    assert last.startswith(f"{140 - good} captioned") and f"{len(done)} skipped (already done)" in last, said
    assert len(errors) == 20 - (len(done) - good) and all(e.startswith("error: ") for e in errors), said
    assert code == (3 if errors else 0)
    assert records(out) == here
    assert before.items() <= shards().items()

    assert run(*command) == (0, "0 captioned, 160 skipped (already done)\n")
    assert records(out) == here


def test_a_cluster_that_is_not_there_is_one_line(
    quick_model: Path, many_videos: Path, tmp_path: Path
) -> None:
    command = ["caption", many_videos, "--model", quick_model, "--output-dir", tmp_path]
    code, said = run(*command, "--engine", "ray", "--ray-address", "127.0.0.1:9")
    assert code == 2
    assert said.startswith("error: no Ray cluster at 127.0.0.1:9") and said.count("\n") == 1
