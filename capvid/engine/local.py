"""A large run on this machine: the stages one after the other, in one process and those that decode."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from capvid.video.workers import WorkerPool

if TYPE_CHECKING:
    from capvid.engine.jobs import Job
    from capvid.output.rows import Row
    from capvid.output.shards import ShardFolder
    from capvid.video.inputs import VideoInput


def run_here(
    job: Job,
    folder: ShardFolder,
    inputs: Iterable[VideoInput],
    *,
    per_file: int,
    workers: int,
    timeout: float | None,
) -> Generator[Row, None, None]:
    """Do the job and give each row as it comes; what is not in a shard yet is written when this is closed.

    Args:
        job: what is done.
        folder: for the shards.
        inputs: taken one by one as they are needed.
        per_file: videos in a shard.
        workers: processes that decode.
        timeout: seconds after which a video is given up; None waits for ever.

    Raises:
        StorageError: a shard cannot be written.
    """
    rows: list[Row] = []
    try:
        with (
            WorkerPool(workers, timeout=timeout) as pool,
            closing(job.decoding.videos(pool, inputs)) as videos,
        ):
            for row in map(folder.checked, job.rows(videos)):
                rows.append(row)
                if len(rows) == per_file:
                    full, rows = rows, []
                    folder.write(full)
                yield row
    finally:
        if rows:
            folder.write(rows)
