"""Time and peak memory of METEOR in capvid and in the published program.

Captions are sampled with replacement from a file of the form ``{"references": {video: [caption]}}``,
optionally inside ``"tokenized"``; a prediction is a caption of its video that is not among its references.
Each run is a separate process, loading included: ``python benchmarks/scoring_meteor.py captions.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import psutil

SIZES = ((670, 40), (2990, 20))
WAYS = ("capvid", "java")


def captions_of_size(
    pools: dict[str, list[str]], videos: int, each: int
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return predictions and references of ``videos`` videos, ``each`` references per video."""
    draw = random.Random(0)
    names = sorted(name for name, pool in pools.items() if len(pool) > 1)
    predictions, references = {}, {}
    for number in range(videos):
        pool = draw.sample(pools[names[number % len(names)]], k=len(pools[names[number % len(names)]]))
        predictions[str(number)] = pool[0]
        references[str(number)] = [pool[1 + index % (len(pool) - 1)] for index in range(each)]
    return predictions, references


def peak_memory(stop: threading.Event, peak: list[int]) -> None:
    """Track the peak resident bytes of this process and its children."""
    own = psutil.Process(os.getpid())
    while not stop.wait(0.02):
        total = 0
        for process in (own, *own.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak[0] = max(peak[0], total)


def measure(
    way: str, predictions: dict[str, str], references: dict[str, list[str]]
) -> tuple[float, float, int]:
    """Return seconds (with imports), corpus score and peak bytes of one implementation."""
    stop, peak = threading.Event(), [0]
    watcher = threading.Thread(target=peak_memory, args=(stop, peak))
    watcher.start()
    start = time.perf_counter()
    if way == "capvid":
        from capvid.metrics.meteor.meteor_scorer import meteor_scores as scores
    else:
        from capvid.metrics.java import meteor_scores as scores
    corpus, _ = scores(predictions, references)
    seconds = time.perf_counter() - start
    stop.set()
    watcher.join()
    return seconds, corpus, peak[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("captions", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    read = json.loads(options.captions.read_text("utf-8"))
    pools = read.get("tokenized", read)["references"]
    for videos, each in SIZES:
        predictions, references = captions_of_size(pools, videos, each)
        for _ in range(options.repeats):
            for way in WAYS:
                with get_context("spawn").Pool(1) as pool:
                    seconds, corpus, peak = pool.apply(measure, (way, predictions, references))
                print(f"{videos} x {each} {way:6s} {seconds:6.2f} s {peak / 1e6:6.0f} MB  METEOR {corpus!r}")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
