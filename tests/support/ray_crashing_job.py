"""Feature extraction on a Ray cluster whose processes die on videos with poison in their path."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from capvid.backbones.backbone import load_backbone
from capvid.distributed import ray_engine as on_ray
from capvid.distributed.jobs import ExtractJob
from capvid.features.prefetch import Video
from capvid.output.shards import Row, ShardFolder, WebDataset
from capvid.video.frame_sampling import UniformSampling
from capvid.video.input_set import iter_videos


@dataclass(frozen=True, kw_only=True)
class CrashingJob(ExtractJob):
    def rows(self, videos: Iterable[Video]) -> Iterator[Row]:
        def checked() -> Iterator[Video]:
            for video in videos:
                if video.decoded and "poison" in str(video.path):
                    os._exit(1)
                yield video

        return super().rows(checked())


def main(address: str, out: str, *videos: str) -> None:
    """Extract features and print each video and its error as JSON."""
    on_ray._TRIES = 1
    job = CrashingJob(backbones=[load_backbone("colour-grid")], sampling=UniformSampling(4))
    folder = ShardFolder(out, kind=job.kind, form=WebDataset(), head=job.head)
    folder.begin(overwrite=False)
    inputs = iter_videos(videos)
    for result in on_ray.run_on_ray(job, folder, inputs, per_file=16, timeout=None, address=address):
        print(json.dumps([result.video, result.error]))


if __name__ == "__main__":
    import ray_crashing_job  # under the name that the cluster's processes import

    ray_crashing_job.main(*sys.argv[1:])
