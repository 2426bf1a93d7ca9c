"""Throughput of sharded runs: the local engine, Ray with one node, and Ray with two nodes.

Each captions the same repeated clips into shards, on the same cores: one Ray node has all of them, two nodes
half each. ``python benchmarks/cluster.py FOLDER --clips 600``. Prints the rate of the command, the rate from
the first shard to the last (without start-up), and the peak memory. ``--inputs 2000 20000`` instead captions
that many copies of tiny videos, to measure memory only.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from capvid.cli._options import RuntimeOptions
from capvid.video.input_set import EXTENSIONS

STORE = 400 << 20  # total bytes of the object stores of all nodes
EVERY = 0.5  # seconds between two memory samples


@dataclass
class MemoryWatch:
    """Peak memory in MiB of the command and of the object stores."""

    driver: float = 0.0
    store: float = 0.0
    _end: threading.Event = field(default_factory=threading.Event)

    def sample(self, process: psutil.Process) -> None:
        """Sample the memory until stopped."""
        while not self._end.wait(EVERY):
            try:
                self.driver = max(self.driver, process.memory_info().rss / 2**20)
                held = psutil.disk_usage("/dev/shm").used if Path("/dev/shm").exists() else 0
                self.store = max(self.store, held / 2**20)
            except psutil.Error:
                return

    def stop(self) -> None:
        """Stop sampling."""
        self._end.set()


@contextmanager
def cluster(nodes: int, cores: int) -> Iterator[str]:
    """Start nodes that share the cores and the memory; yield the address."""
    from ray.cluster_utils import Cluster

    each: dict[str, Any] = {"num_cpus": max(1, cores // nodes), "object_store_memory": STORE // nodes}
    ray_cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            ray_cluster.add_node(**each)
        yield ray_cluster.address
    finally:
        ray_cluster.shutdown()


def measure(name: str, inputs: Path, count: int, options: Sequence[object]) -> None:
    """Caption the inputs and print both rates and the peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        shards = max(10, count // 20)
        command = [sys.executable, "-m", "capvid", "caption", "--from-file", inputs, "--output-dir", folder]
        command += ["--videos-per-file", shards, *options]
        watch, begun = MemoryWatch(), time.monotonic()
        wall = time.time()
        process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
        thread = threading.Thread(target=watch.sample, args=(psutil.Process(process.pid),))
        thread.start()
        _, stderr = process.communicate()
        seconds = time.monotonic() - begun
        watch.stop()
        thread.join()
        if process.returncode not in (0, 3):
            raise SystemExit(stderr)
        written = sorted(path.stat().st_mtime for path in Path(folder).glob("captions-*"))
        steady = (count - shards) / max(1e-9, written[-1] - written[0])
        print(
            f"{name:24} {count / seconds:6.2f} per second overall ({seconds:.0f} s), "
            f"{steady:6.2f} from the first shard ({written[0] - wall:.0f} s) on; "
            f"{watch.driver:.0f} MiB in the command, "
            f"{watch.store:.0f} MiB in /dev/shm",
            flush=True,
        )


def copies(clips: Sequence[Path], count: int, folder: Path) -> Path:
    """Write a list of ``count`` links to the clips and return its path."""
    names = []
    for number, clip in zip(range(count), itertools.cycle(clips), strict=False):
        link = folder / f"{number // 1000}" / f"{number}{clip.suffix}"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(clip.resolve())
        names.append(str(link))
    listed = folder / f"{count}.txt"
    listed.write_text("\n".join(names))
    return listed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of clips")
    parser.add_argument("--clips", type=int, default=600)
    parser.add_argument(
        "--inputs", type=int, nargs="*", help="numbers of inputs; measures the memory of Ray only"
    )
    parser.add_argument("--model", default=None)
    options = parser.parse_args()
    clips = sorted(path for path in options.folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    model = ["--model", options.model] if options.model else []
    os.environ["OMP_NUM_THREADS"] = str(cores := RuntimeOptions().num_workers)
    print(f"{len(clips)} clips, {cores} cores, object stores of {STORE >> 20} MiB in total", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.inputs:
            for count in options.inputs:
                with cluster(1, cores) as address:
                    ray = ["--engine", "ray", "--ray-address", address, *model]
                    measure(f"Ray, {count} inputs", copies(clips, count, folder), count, ray)
                for path in folder.iterdir():
                    subprocess.run(["rm", "-rf", str(path)], check=True)
            return
        listed = copies(clips, options.clips, folder)
        measure("local", listed, options.clips, model)
        for nodes in (1, 2):
            with cluster(nodes, cores) as address:
                ray = ["--engine", "ray", "--ray-address", address, *model]
                measure(f"Ray, {nodes} node{'s' * (nodes > 1)}", listed, options.clips, ray)


if __name__ == "__main__":
    main()
