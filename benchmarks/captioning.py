"""Throughput, memory, descriptors and processes of captioning a thousand short clips in one run.

The clips of a folder are repeated and captioned by one captioner. Each stage (decoding, backbone, captioner)
is also timed alone, with the same processes and threads. ``python benchmarks/captioning.py --help``.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

import capvid
from capvid.pipeline import CaptionPipeline
from capvid.video.input_set import find_videos
from capvid.video.worker_pool import WorkerPool

EVERY = 100


class Stages:
    """The stages of the pipeline, to be timed separately on the same videos."""

    def __init__(self, pipeline: CaptionPipeline, paths: Sequence[Path], pool: WorkerPool) -> None:
        self.pipeline = pipeline
        self.paths = paths
        self.pool = pool
        self.decoding()
        results = pipeline.features_of(self.videos)
        self.results = [result for result in results if result.features is not None]

    def decoding(self) -> None:
        """Decode, crop and resize the frames of all videos in the pool's processes."""
        self.videos = list(self.pipeline.decoding.videos(self.pool, self.paths))

    def backbone(self) -> None:
        """Run the backbones on crops in memory; chat models have none."""
        list(self.pipeline.features_of(self.videos))

    def captioner(self) -> None:
        """Generate captions from features, or frames, in memory."""
        size = self.pipeline.generator.batch_size
        for start in range(0, len(self.results), size):
            list(self.pipeline.describe(self.results[start : start + size]))


def seconds(run: Callable[[], None], repeats: int = 3) -> float:
    """Return the shortest time of ``run``, after a warm-up run."""
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def state(process: psutil.Process) -> str:
    """Return the current resident memory, open descriptors, threads and processes."""
    children = process.children(recursive=True)
    own, theirs = process.memory_info().rss, sum(child.memory_info().rss for child in children)
    return (
        f"{own >> 20:5} MB, decoding processes {theirs >> 20:5} MB, {process.num_fds():3} descriptors, "
        f"{process.num_threads():3} threads, {len(children)} processes"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("videos", type=Path, nargs="+", help="videos, or folders of them")
    parser.add_argument("--model")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--number", type=int, default=1000, help="number of videos to caption")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads of backbone and captioner")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--endpoint", help="address of a served chat model")
    parser.add_argument("--segments", help="segment the videos, as capvid caption does")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {"weights": options.weights, "workers": options.workers, "segments": options.segments}
    settings |= {"batch_size": options.batch_size, "endpoint": options.endpoint}
    pipeline = capvid.load(options.model, **settings)
    paths = [video.path for video in find_videos(options.videos)]
    print(f"{len(paths)} clips, {pipeline.model}, {options.workers} workers, {options.threads} threads")

    process, done = psutil.Process(), 0
    start = time.perf_counter()
    for result in pipeline.stream(itertools.islice(itertools.cycle(paths), options.number)):
        done += result.error is None
        if done % EVERY == 0 and result.error is None:
            print(f"{done:5} captioned, {time.perf_counter() - start:6.1f} s, {state(process)}")
    taken = time.perf_counter() - start
    rate = done / taken
    print(f"pipeline: {done} captioned in {taken:.1f} s, {rate:.2f} per second")

    if options.segments is None:
        with WorkerPool(options.workers) as pool:
            stages = Stages(pipeline, paths, pool)
            alone = {
                name: len(stages.results) / seconds(getattr(stages, name))
                for name in ("decoding", "backbone", "captioner")
            }
        for name, speed in alone.items():
            print(f"{name + ' alone:':16} {speed:7.2f} videos/s")
        print(f"the pipeline runs at {rate / min(alone.values()):.2f} of the speed of the slowest stage")


if __name__ == "__main__":
    main()
