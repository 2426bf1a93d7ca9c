"""Stages of a large run, and the engine that runs them on this machine.

Every engine runs the same three stages: ``Job.decoding`` decodes inputs, ``Job.rows`` computes a row for
each decoded video, and :class:`~capvid.output.shards.ShardFolder` checks rows and writes them as shards. A
job can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from capvid.errors import input_error
from capvid.features.extraction import ExtractionResult, compute_features, views_of
from capvid.features.prefetch import DecodeStage, Video
from capvid.output.results import SCHEMA_VERSION, CaptionResult
from capvid.output.shards import caption_row, features_row
from capvid.utils.validation import MIB
from capvid.video.worker_pool import WorkerPool

if TYPE_CHECKING:
    import torch

    from capvid.backbones.backbone import Backbone
    from capvid.output.shards import Row, ShardFolder
    from capvid.pipeline import CaptionPipeline
    from capvid.video.frame_sampling import Sampling
    from capvid.video.input_set import VideoInput

MAX_MEDIA = 256 * MIB  # of videos in a shard
_Result = TypeVar("_Result", CaptionResult, ExtractionResult)


def _rows(results: Iterable[_Result], make_row: Callable[[_Result], Row]) -> Iterator[Row]:
    """Yield the rows of results; one that cannot be made is the error of its video."""
    for result in results:
        try:
            row = make_row(result)
        except Exception as cause:
            row = make_row(result.failed(input_error(result.path, cause)))
        yield row


@dataclass(frozen=True, kw_only=True)
class CaptionJob:
    """Captions by a captioner.

    With ``attention``, records include its weights over the frames; with ``media``, rows include the videos
    of archives.
    """

    kind: ClassVar[str] = "captions"

    pipeline: CaptionPipeline
    attention: bool = False
    media: bool = False

    @property
    def decoding(self) -> DecodeStage:
        """The decoding stage of the pipeline."""
        return self.pipeline.decoding

    def rows(self, videos: Iterable[Video]) -> Iterator[Row]:
        """Yield the captions of decoded videos."""
        make_row = partial(
            caption_row, settings=self.pipeline.settings, attention=self.attention, media=self.media
        )
        return _rows(self.pipeline.describe(self.pipeline.features_of(videos)), make_row)

    @property
    def head(self) -> dict[str, Any]:
        """Everything that all rows depend on, as JSON values: the model and all settings."""
        settings = {**self.pipeline.settings, "attention": self.attention}
        return {"schema_version": SCHEMA_VERSION, "model": self.pipeline.model, "settings": settings}

    def on(self, device: torch.device | str) -> CaptionJob:
        """Return the same captioner on another device."""
        return replace(self, pipeline=self.pipeline.on(device))


@dataclass(frozen=True, kw_only=True)
class ExtractJob:
    """Features by backbones, one stream each, which compute ``batch_size`` frames together."""

    kind: ClassVar[str] = "features"

    backbones: Sequence[Backbone]
    sampling: Sampling
    batch_size: int = 32

    @property
    def decoding(self) -> DecodeStage:
        """Decode what the backbones see."""
        return DecodeStage(
            views=tuple(views_of(self.backbones)), sampling=self.sampling, frames=self.batch_size
        )

    def rows(self, videos: Iterable[Video]) -> Iterator[Row]:
        """Yield the features of decoded videos."""
        results = compute_features(videos, self.backbones, self.sampling, batch_size=self.batch_size)
        return _rows(results, features_row)

    @property
    def head(self) -> dict[str, Any]:
        """The header of all features, except for the precision, which depends on the device."""
        streams = [vars(replace(backbone.header, precision=None)) for backbone in self.backbones]
        return {"streams": streams, "sampling": self.sampling.spec()}

    def on(self, device: torch.device | str) -> ExtractJob:
        """Return the same backbones on another device."""
        return replace(self, backbones=[backbone.on(device) for backbone in self.backbones])


Job = CaptionJob | ExtractJob


def run_here(
    job: Job,
    folder: ShardFolder,
    inputs: Iterable[VideoInput],
    *,
    per_file: int,
    workers: int,
    timeout: float | None,
) -> Generator[Row, None, None]:
    """Run a job on this machine and yield each row as it comes; closing writes the last, unfilled shard.

    Args:
        job: what to compute.
        folder: folder of the shards.
        inputs: videos, consumed lazily.
        per_file: number of videos in a shard.
        workers: number of decoding processes.
        timeout: seconds before a video is abandoned; None disables the limit.

    Raises:
        StorageError: a shard cannot be written.
    """
    rows: list[Row] = []
    num_bytes = 0
    try:
        with (
            WorkerPool(workers, timeout=timeout) as pool,
            closing(job.decoding.videos(pool, inputs)) as videos,
        ):
            for row in map(folder.checked, job.rows(videos)):
                rows.append(row)
                num_bytes += sum(len(data) for _, data in row.media)
                if len(rows) == per_file or num_bytes > MAX_MEDIA:
                    full, rows, num_bytes = rows, [], 0
                    folder.write(full)
                yield row.without_data()
    finally:
        if rows:
            folder.write(rows)
