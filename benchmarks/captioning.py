"""A thousand short clips captioned in one run: memory, descriptors, processes, and videos per second.

The clips of a folder, as often as it takes, captioned by one captioner; and each stage alone with the same
processes and threads: decoding, the backbone, the captioner. ``python benchmarks/captioning.py --help``.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch

import capvid
from capvid.features.extraction import extract
from capvid.features.prefetch import DecodeStage, View
from capvid.pipeline import CaptionPipeline
from capvid.video.input_set import find_videos
from capvid.video.worker_pool import WorkerPool

EVERY = 100


class Stages:
    """Each stage alone, over the same videos."""

    def __init__(self, pipeline: CaptionPipeline, paths: Sequence[Path], pool: WorkerPool) -> None:
        self.pipeline = pipeline
        self.paths = paths
        self.pool = pool
        (self.backbone,) = pipeline.loaded_backbones
        extracted = extract(paths, [self.backbone], pipeline.sampling, pool=pool)
        self.results = [result for result in extracted if result.features is not None]
        self.crops: list[np.ndarray] = []

    def decoding(self) -> None:
        """Frames of all videos, cut and resized in the pool's processes."""
        views = [View.of(self.backbone.entry)]
        stage = DecodeStage(sampling=self.pipeline.sampling, views=tuple(views), frames=32)
        self.crops = [v.decoded.crops[0] for v in stage.videos(self.pool, self.paths) if v.decoded]

    def model(self) -> None:
        """The backbone, from crops that are in memory."""
        self.backbone.compute(np.concatenate(self.crops), batch_size=32)

    def captioner(self) -> None:
        """Captions, from features that are in memory."""
        size = self.pipeline.batch_size
        for start in range(0, len(self.results), size):
            list(self.pipeline.describe(self.results[start : start + size]))


def seconds(run: Callable[[], None], repeats: int = 3) -> float:
    """The least time that it takes, after a first time that is not counted."""
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def state(process: psutil.Process) -> str:
    """Resident memory, open descriptors and processes of the run at this moment."""
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
    parser.add_argument("--number", type=int, default=1000, help="of videos captioned in the long run")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of backbone and captioner")
    parser.add_argument("--segments", help="cut the videos")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    given = {"weights": options.weights, "workers": options.workers, "segments": options.segments}
    pipeline = capvid.load(options.model, **given)
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
    print(f"pipeline: {done} captioned in {taken:.1f} s, {rate:.2f} a second")

    if options.segments is None:
        with WorkerPool(options.workers) as pool:
            stages = Stages(pipeline, paths, pool)
            alone = {
                name: len(stages.results) / seconds(getattr(stages, name))
                for name in ("decoding", "model", "captioner")
            }
        for name, speed in alone.items():
            print(f"{name + ' alone:':16} {speed:7.2f} videos a second")
        print(f"the pipeline has {rate / min(alone.values()):.2f} of the speed of the slowest stage alone")


if __name__ == "__main__":
    main()
