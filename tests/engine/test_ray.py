"""Large runs on a Ray cluster of two nodes, which here are two groups of processes of one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from s3_server import FlakyS3

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)  # a busy machine begins processes slowly
ROOT = Path(__file__).resolve().parents[2]


class TwoNodes:
    """A cluster of a head and a second node."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 1, "object_store_memory": 100 << 20}
        self.cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        self.second = self.cluster.add_node(**small)
        self.address = self.cluster.address

    def processes(self, kind: str) -> list[psutil.Process]:
        """Actors of a kind."""
        found = []
        for node in self.cluster.list_all_nodes():
            for info in node.all_processes.get("raylet", []):
                for child in psutil.Process(info.process.pid).children(recursive=True):
                    try:
                        if kind in " ".join(child.cmdline()) and "__init__" not in " ".join(child.cmdline()):
                            found.append(child)
                    except psutil.Error:
                        continue
        return found

    def close(self) -> None:
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def s3() -> Iterator[FlakyS3]:
    """A server that fails now and then, whose credentials are in the environment of the cluster."""
    server = FlakyS3()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server
    server.close()


@pytest.fixture(scope="module")
def nodes(s3: FlakyS3) -> Iterator[TwoNodes]:
    cluster = TwoNodes()
    yield cluster
    cluster.close()


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "capvid", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def records(folder: Path) -> list[dict[str, Any]]:
    """What the shards of a folder say, by video."""
    lines = [line for shard in folder.glob("captions-*.jsonl") for line in shard.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda record: record["video"])


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    """Wait until something holds, while a command runs."""
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def here(
    quick_model: Path, many_videos: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What this machine alone makes of the videos."""
    folder = tmp_path_factory.mktemp("here")
    arguments = [
        "caption",
        many_videos,
        "--model",
        quick_model,
        "--output-dir",
        folder,
        "--videos-per-file",
        50,
    ]
    process = start(*arguments)
    _, said = process.communicate(timeout=500)
    assert process.returncode == 3, said
    assert "280 captioned" in said and "20 failed" in said
    found = records(folder)
    assert Counter(record["status"] for record in found) == {"ok": 280, "error": 20}
    assert len({record["captions"][0]["text"] for record in found if record["captions"]}) > 3
    return found


def test_an_archive_on_a_server_that_fails_now_and_then(
    nodes: TwoNodes, s3: FlakyS3, quick_model: Path, many_videos: Path, here: list[dict[str, Any]]
) -> None:
    import s3fs

    bucket = s3fs.S3FileSystem()
    bucket.mkdir("ray")
    wanted = {record["video"]: record for record in here if "/3/" in record["video"]}
    assert len(wanted) == 40
    for path in wanted:
        bucket.pipe_file(f"ray/videos/{Path(path).name}", Path(path).read_bytes())
    s3.every, s3.cut = 9, 5
    arguments = ["caption", "s3://ray/videos", "--model", quick_model, "--output-dir", "s3://ray/captions"]
    arguments += ["--engine", "ray", "--ray-address", nodes.address, "--videos-per-file", 16]
    process = start(*arguments)
    _, said = process.communicate(timeout=500)
    failed, s3.every, s3.cut = s3.failed, 0, 0
    assert process.returncode == 0, said
    assert said.startswith("40 captioned") and failed > 5
    bucket.invalidate_cache()
    lines = [
        line for shard in bucket.glob("ray/captions/captions-*") for line in bucket.cat(shard).splitlines()
    ]
    found = {Path(record["video"]).name: record for record in map(json.loads, lines)}
    assert len(lines) == len(found) == 40
    for path, record in wanted.items():
        theirs = found[Path(path).name]
        assert theirs == {**record, "video": f"s3://ray/videos/{Path(path).name}"}


def test_what_dies_in_the_middle_loses_nothing_and_doubles_nothing(
    nodes: TwoNodes, quick_model: Path, many_videos: Path, here: list[dict[str, Any]], tmp_path: Path
) -> None:
    """An actor of each kind is killed, and a node removed."""
    arguments = ["caption", many_videos, "--model", quick_model, "--output-dir", tmp_path]
    process = start(*arguments, "--videos-per-file", 10, "--engine", "ray", "--ray-address", nodes.address)

    def shards() -> int:
        return len(list(tmp_path.glob("captions-*.jsonl")))

    wait_for(lambda: shards() >= 1, process)
    wait_for(lambda: nodes.processes("Decoding"), process)
    nodes.processes("Decoding")[0].kill()
    wait_for(lambda: shards() >= 4, process)
    wait_for(lambda: nodes.processes("Computing"), process)
    nodes.processes("Computing")[0].kill()
    wait_for(lambda: shards() >= 7, process)
    nodes.cluster.remove_node(nodes.second, allow_graceful=False)
    assert shards() < 28
    _, said = process.communicate(timeout=500)
    assert process.returncode == 3, said
    assert said.splitlines()[-1].startswith("280 captioned"), said
    assert all(line.startswith("error: ") for line in said.splitlines()[:-1]), said
    assert records(tmp_path) == here


def test_a_driver_that_is_killed_leaves_the_rest_to_the_next(
    nodes: TwoNodes, quick_model: Path, many_videos: Path, here: list[dict[str, Any]], tmp_path: Path
) -> None:
    arguments = ["caption", many_videos, "--model", quick_model, "--output-dir", tmp_path]
    arguments += ["--videos-per-file", 10, "--engine", "ray", "--ray-address", nodes.address]
    process = start(*arguments)
    wait_for(lambda: len(list(tmp_path.glob("captions-*.jsonl"))) >= 5, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(2)  # a shard may be on its way
    before = {path.name: path.read_bytes() for path in tmp_path.glob("captions-*.jsonl")}
    done = records(tmp_path)
    assert 50 <= len(done) < 300
    again = start(*arguments)
    _, said = again.communicate(timeout=500)
    good = sum(record["status"] == "ok" for record in done)
    assert f"{280 - good} captioned" in said and f"{len(done)} skipped (already done)" in said
    assert records(tmp_path) == here
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())
    nothing = start(*arguments)
    _, said = nothing.communicate(timeout=500)
    assert (nothing.returncode, said) == (0, "0 captioned, 300 skipped (already done)\n")
    assert records(tmp_path) == here


def test_features_are_those_of_this_machine(nodes: TwoNodes, many_videos: Path, tmp_path: Path) -> None:
    from capvid.output.feature_shards import read_webdataset

    arguments = [
        "extract",
        many_videos / "3",
        many_videos / "broken",
        "--backbone",
        "colour-grid",
        "--frames",
        4,
    ]
    arguments += ["--videos-per-file", 16]
    found = []
    for name, engine in (("here", ["local"]), ("ray", ["ray", "--ray-address", nodes.address])):
        process = start(*arguments, "-o", tmp_path / name, "--engine", *engine)
        _, said = process.communicate(timeout=500)
        assert process.returncode == 3 and "40 extracted" in said and "20 failed" in said, said
        samples = [
            sample
            for shard in (tmp_path / name).glob("features-*.tar")
            for sample in read_webdataset(shard.read_bytes())
        ]
        found.append(sorted(samples, key=lambda sample: sample[0]["video"]))
    assert len(found[0]) == 60
    for (one, features), (other, theirs) in zip(*found, strict=True):
        assert one == other
        assert (features is None) == (theirs is None) == (one["status"] == "error")
        if features is not None:
            assert features.header == theirs.header and features.video == theirs.video
            assert features.streams[0].tolist() == theirs.streams[0].tolist()
            assert features.times.tolist() == theirs.times.tolist()


def test_a_cluster_that_is_not_there_is_one_line(
    quick_model: Path, many_videos: Path, tmp_path: Path
) -> None:
    arguments = ["caption", many_videos, "--model", quick_model, "--output-dir", tmp_path]
    process = start(*arguments, "--engine", "ray", "--ray-address", "127.0.0.1:9")
    _, said = process.communicate(timeout=500)
    assert process.returncode == 2
    assert said.startswith("error: no Ray cluster at 127.0.0.1:9") and said.count("\n") == 1
