"""Throughput of decoding alone, the model alone, the pipeline, and a plain loop.

All process the videos of a folder, 28 frames each, in one run. Each stage alone has the same processes and
threads as in the pipeline. The plain loop is the naive version: it decodes one video at a time with decord's
own threads and runs the network in float32 on its frames. ``python benchmarks/extraction.py --help``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from capvid.backbones.backbone import Backbone, load_backbone
from capvid.features.extraction import extract, views_of
from capvid.features.prefetch import DecodeStage
from capvid.video.frame_sampling import UniformSampling
from capvid.video.input_set import find_videos
from capvid.video.worker_pool import WorkerPool

FRAMES = 28
SAMPLING = UniformSampling(FRAMES)


class Runs:
    """The measured stages, for one backbone."""

    def __init__(self, paths: Sequence[Path], backbone: Backbone, plain: Backbone, batch_size: int) -> None:
        self.paths = paths
        self.backbone = backbone
        self.plain = plain
        self.batch_size = batch_size
        self.crops: list[np.ndarray] = []

    def decoding(self, pool: WorkerPool) -> int:
        """Decode, crop and resize the frames of all videos in the pool's processes."""
        views = tuple(views_of([self.backbone]))
        stage = DecodeStage(views=views, sampling=SAMPLING, frames=self.batch_size)
        self.crops = [v.decoded.crops[0] for v in stage.videos(pool, self.paths) if v.decoded]
        return sum(map(len, self.crops))

    def model(self) -> int:
        """Run the backbone on crops in memory."""
        return len(self.backbone.compute(np.concatenate(self.crops), batch_size=self.batch_size))

    def pipeline(self, pool: WorkerPool) -> int:
        """Run both stages, overlapping."""
        results = extract(self.paths, [self.backbone], SAMPLING, batch_size=self.batch_size, pool=pool)
        return sum(len(result.features) for result in results if result.features)

    @torch.inference_mode()
    def loop(self) -> int:
        """Decode each video and run the network on its frames, one after another."""
        import decord

        decord.logging.set_level(decord.logging.QUIET)
        count = 0
        for path in self.paths:
            try:
                reader = decord.VideoReader(str(path))
                indices = np.linspace(0, len(reader) - 1, min(FRAMES, len(reader))).astype(int)
                frames = reader.get_batch(list(indices)).asnumpy()
            except (decord.DECORDError, RuntimeError):
                continue
            images = torch.from_numpy(frames).permute(0, 3, 1, 2).float()
            short = min(images.shape[2:])
            size = [round(256 * side / short) for side in images.shape[2:]]
            images = torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True)
            top, left = (size[0] - 224) // 2, (size[1] - 224) // 2
            images = images[:, :, top : top + 224, left : left + 224].flip(1)
            images = images - torch.tensor([104.0, 117.0, 123.0]).view(3, 1, 1)
            self.plain.module(images.to(self.plain.device)).cpu()
            count += len(images)
        return count


def timed(run: Callable[[], int]) -> tuple[float, int]:
    """Return the seconds of ``run`` and the number of frames it reports."""
    start = time.perf_counter()
    frames = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, frames


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("videos", type=Path, nargs="+", help="videos, or folders of them")
    parser.add_argument("--backbone", default="googlenet")
    parser.add_argument("--weights", type=Path, help="default: the usual places")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--workers", type=int, action="append", help="default: 1 and 2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the model")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = {"weights": options.weights, "device": options.device}
    backbone = load_backbone(options.backbone, precision=options.precision, **load)
    plain = load_backbone(options.backbone, precision="fp32", **load)
    paths = [video.path for video in find_videos(options.videos)]
    runs = Runs(paths, backbone, plain, options.batch_size)
    print(
        f"{len(paths)} videos, {backbone.entry.name} in {backbone.header.precision} on {options.device}, "
        f"{options.threads} threads, torch {torch.__version__}; medians of {options.repeats}"
    )
    for workers in options.workers or [1, 2]:
        with WorkerPool(workers) as pool:
            stages: dict[str, Callable[[], int]] = {
                "decoding alone": lambda pool=pool: runs.decoding(pool),
                "model alone": runs.model,
                "pipeline": lambda pool=pool: runs.pipeline(pool),
                "plain loop": runs.loop,
            }
            taken: dict[str, list[float]] = {name: [] for name in stages}
            frames: dict[str, int] = {}
            for repeat in range(options.repeats + 1):
                for name, run in stages.items():
                    seconds, frames[name] = timed(run)
                    if repeat:
                        taken[name].append(seconds)
        seconds_of = {name: statistics.median(times) for name, times in taken.items()}
        print(f"{workers} decoding process{'es' if workers > 1 else ''}:")
        for name, seconds in seconds_of.items():
            print(f"  {name:15} {seconds:7.2f} s {frames[name] / seconds:8.0f} frames/s")
        slower = max(seconds_of["decoding alone"], seconds_of["model alone"])
        both = seconds_of["decoding alone"] + seconds_of["model alone"]
        print(f"  pipeline: {slower / seconds_of['pipeline']:.2f} of the speed of the slower stage,", end=" ")
        print(f"{both / seconds_of['pipeline']:.2f} times the stages in sequence,", end=" ")
        per_frame = {name: seconds_of[name] / frames[name] for name in ("plain loop", "pipeline")}
        print(f"{per_frame['plain loop'] / per_frame['pipeline']:.2f} times the plain loop")


if __name__ == "__main__":
    main()
