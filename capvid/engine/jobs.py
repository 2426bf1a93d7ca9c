"""What is done with every video of a large run, by whichever engine: decode, compute, and write shards.

Both engines are made of these stages: :attr:`Job.decoding` turns inputs into decoded videos, :meth:`Job.rows`
those into rows, and :class:`~capvid.output.shards.ShardFolder` writes the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from capvid.features.ahead import Video
from capvid.features.extract import ExtractionResult, compute_features, views_of
from capvid.features.parts import DecodeStage
from capvid.isolation import input_error
from capvid.output.feature_shards import ParquetFeatures, WebDataset, features_row
from capvid.output.parquet import ParquetCaptions
from capvid.output.records import SCHEMA_VERSION
from capvid.output.rows import Row, caption_row
from capvid.output.shards import JsonLines, ShardFormat

if TYPE_CHECKING:
    import torch

    from capvid.features.backbones import Backbone
    from capvid.pipeline import CaptionPipeline
    from capvid.results import CaptionResult
    from capvid.video.sampling import Sampling


class Job(ABC):
    """The stages of a run. Can be sent to another process.

    Attributes:
        kind: what the shards hold.
        formats: in which they can be written, by name.
    """

    kind: ClassVar[str]
    formats: ClassVar[Mapping[str, type[ShardFormat]]]

    @property
    @abstractmethod
    def decoding(self) -> DecodeStage:
        """The stage that decodes."""

    @abstractmethod
    def rows(self, videos: Iterable[Video]) -> Iterator[Row]:
        """The stage that computes: a row for each decoded video, in their order, as they come."""

    @property
    @abstractmethod
    def head(self) -> dict[str, Any]:
        """What all rows depend on, as JSON has it."""

    @abstractmethod
    def on(self, device: torch.device | str) -> Job:
        """The same job on another device."""


@dataclass(frozen=True, kw_only=True)
class CaptionJob(Job):
    """Captions by a captioner.

    Attributes:
        pipeline: that makes them.
        attention: whether records say what the captioner looked at.
    """

    kind: ClassVar[str] = "captions"
    formats: ClassVar[Mapping[str, type[ShardFormat]]] = {"jsonl": JsonLines, "parquet": ParquetCaptions}

    pipeline: CaptionPipeline
    attention: bool = False

    @property
    def decoding(self) -> DecodeStage:
        """The stage that decodes."""
        return self.pipeline.decoding

    def rows(self, videos: Iterable[Video]) -> Iterator[Row]:
        """Captions of decoded videos."""
        return map(self._row, self.pipeline.describe(self.pipeline.features_of(videos)))

    def _row(self, result: CaptionResult) -> Row:
        try:
            return caption_row(result, self.pipeline.settings, attention=self.attention)
        except Exception as cause:
            failed = result.failed(input_error(result.path, cause))
            return caption_row(failed, self.pipeline.settings)

    @property
    def head(self) -> dict[str, Any]:
        """The model and all settings."""
        settings = {**self.pipeline.settings, "attention": self.attention}
        return {"schema_version": SCHEMA_VERSION, "model": self.pipeline.model, "settings": settings}

    def on(self, device: torch.device | str) -> CaptionJob:
        """The same captioner on another device."""
        return replace(self, pipeline=self.pipeline.on(device))


@dataclass(frozen=True, kw_only=True)
class ExtractJob(Job):
    """Features by backbones.

    Attributes:
        backbones: one stream each.
        sampling: which frames.
        batch_size: frames gathered before the backbones compute.
    """

    kind: ClassVar[str] = "features"
    formats: ClassVar[Mapping[str, type[ShardFormat]]] = {
        "webdataset": WebDataset,
        "parquet": ParquetFeatures,
    }

    backbones: Sequence[Backbone]
    sampling: Sampling
    batch_size: int = 32

    @property
    def decoding(self) -> DecodeStage:
        """The stage that decodes."""
        return DecodeStage(
            views=tuple(views_of(self.backbones)), sampling=self.sampling, frames=self.batch_size
        )

    def rows(self, videos: Iterable[Video]) -> Iterator[Row]:
        """Features of decoded videos."""
        results = compute_features(videos, self.backbones, self.sampling, batch_size=self.batch_size)
        return map(self._row, results)

    @staticmethod
    def _row(result: ExtractionResult) -> Row:
        try:
            return features_row(result)
        except Exception as cause:
            return features_row(result.failed(input_error(result.path, cause)))

    @property
    def head(self) -> dict[str, Any]:
        """The header of all features, but for what says in which precision they were computed."""
        streams = [vars(replace(backbone.header, precision=None)) for backbone in self.backbones]
        return {"streams": streams, "sampling": self.sampling.spec()}

    def on(self, device: torch.device | str) -> ExtractJob:
        """The same backbones on another device."""
        return replace(self, backbones=[backbone.on(device) for backbone in self.backbones])
