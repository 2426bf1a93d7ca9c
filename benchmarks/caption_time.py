"""Median time of one ``capvid caption`` command, of ``import torch``, and of each stage.

python benchmarks/caption_time.py [RUNS] [VIDEO]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CLIP = Path(__file__).resolve().parents[1] / "examples" / "car.mp4"


def median(runs: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def stage_seconds(runs: int, video: Path) -> dict[str, float]:
    """Return the seconds of decoding, backbone and captioner, each after a warm-up run."""
    import torch

    import capvid
    from capvid.backbones.backbone import load_backbone
    from capvid.video.readers import read_frames

    pipeline = capvid.load("kv-memory")  # one backbone
    pipeline(video)
    sampled = read_frames(video, pipeline.sampling)
    backbone = load_backbone(str(pipeline.generator.checkpoint.header.streams[0].backbone))
    features = torch.from_numpy(backbone(sampled.frames))
    return {
        "decoding": median(runs, lambda: read_frames(video, pipeline.sampling)),
        "backbone": median(runs, lambda: backbone(sampled.frames)),
        "captioner": median(runs, lambda: pipeline.caption_features([features.numpy()])),
    }


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    video = Path(sys.argv[2]) if len(sys.argv) > 2 else CLIP

    def run(*arguments: str) -> None:
        subprocess.run(arguments, check=True, capture_output=True)

    command = median(runs, lambda: run(sys.executable, "-m", "capvid", "caption", str(video)))
    torch_alone = median(runs, lambda: run(sys.executable, "-c", "import torch"))
    print(f"capvid caption {video.name}: {command:.2f} s; import torch: {torch_alone:.2f} s")
    for name, seconds in stage_seconds(runs, video).items():
        print(f"{name}: {seconds:.3f} s")


if __name__ == "__main__":
    main()
