"""Seconds of ``capvid score --dense`` on 5,000 videos with two annotators.

python benchmarks/scoring_dense.py VAL_1.json VAL_2.json [VIDEOS]

The files are annotations of ActivityNet Captions, plain or gzip. A prediction has the segments of an
annotator, moved at random, with the sentences of another video.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from capvid.metrics.dense_captioning import Segments
from capvid.scoring.dense import read_timed_sentences


def save(path: Path, segments: Segments) -> str:
    videos = {
        name: {"timestamps": [each[:2] for each in parts], "sentences": [each.sentence for each in parts]}
        for name, parts in segments.items()
    }
    path.write_text(json.dumps(videos), encoding="utf-8")
    return str(path)


def main() -> None:
    sources = [read_timed_sentences(Path(name)) for name in sys.argv[1:3]]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 5000
    draw = random.Random(0)
    ids = [name for name in sources[0] if name in sources[1]]
    chosen = [ids[n % len(ids)] for n in range(count)]
    annotators = [{f"v{n}": source[name] for n, name in enumerate(chosen)} for source in sources]
    predictions = {}
    for video, segments in annotators[0].items():
        sentences = sources[1][draw.choice(ids)]
        length = max(segment.end for segment in segments) / 10
        predictions[video] = [
            segment._replace(
                start=max(0.0, segment.start - draw.random() * length),
                end=segment.end + draw.random() * length,
                sentence=draw.choice(sentences).sentence,
            )
            for segment in segments
        ]
    with tempfile.TemporaryDirectory() as folder:
        files = [save(Path(folder, f"{n}.json"), each) for n, each in enumerate([predictions, *annotators])]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "capvid", "score", "--dense", *files], check=True)
        print(f"{count} videos: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
