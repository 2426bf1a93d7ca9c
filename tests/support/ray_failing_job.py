"""Extraction on Ray that fails to make the rows of ``bad`` videos and to encode those of ``odd`` ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from capvid.backbones.backbone import load_backbone
from capvid.distributed import jobs
from capvid.distributed.jobs import ExtractJob
from capvid.distributed.ray_engine import run_on_ray
from capvid.features.extraction import ExtractionResult
from capvid.features.prefetch import Video
from capvid.output.shards import Row, ShardFolder, WebDataset, features_row
from capvid.video.frame_sampling import UniformSampling
from capvid.video.input_set import iter_videos


@dataclass(frozen=True, kw_only=True)
class FailingJob(ExtractJob):
    def rows(self, videos: Iterable[Video]) -> Iterator[Row]:
        def row(result: ExtractionResult) -> Row:
            if result.features is not None and "bad" in result.name:
                raise ValueError("boom")
            return features_row(result)

        vars(jobs)["features_row"] = row
        return super().rows(videos)


class FailingWebDataset(WebDataset):
    def encode(self, rows: Sequence[Row]) -> bytes:
        if any("odd" in row.video and row.features is not None for row in rows):
            raise ValueError("boom")
        return super().encode(rows)


def main(out: str, *videos: str) -> None:
    """Extract features and print each video, its error and its traceback as JSON."""
    job = FailingJob(backbones=[load_backbone("colour-grid")], sampling=UniformSampling(4))
    folder = ShardFolder(out, kind=job.kind, form=FailingWebDataset(), head=job.head)
    folder.begin(overwrite=False)
    inputs: Any = iter_videos(videos)
    for result in run_on_ray(job, folder, inputs, per_file=16, timeout=None, address="local"):
        print(json.dumps([result.video, result.error, result.trace]))


if __name__ == "__main__":
    import ray_failing_job  # under the name that Ray's processes import

    ray_failing_job.main(*sys.argv[1:])
