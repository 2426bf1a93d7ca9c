"""Captions of a split by a captioner, and what they score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capvid.captioners.checkpoint import Checkpoint, load_checkpoint
from capvid.data.captions import CaptionedVideo
from capvid.data.frames import FrameReader
from capvid.decoding import DecodingOptions
from capvid.errors import DataError
from capvid.features.store import FeatureStore
from capvid.files import atomic_write_text
from capvid.training.recipe import DataOptions
from capvid.training.tasks import task_of


@dataclass(frozen=True)
class Evaluation:
    """What a captioner says about a split, and how it scores (fractions, not percentages).

    Attributes:
        scores: by the metric's name.
        captions: by the video's id: a sentence, or the sentences of a paragraph.
    """

    scores: dict[str, float]
    captions: dict[str, Any]


def evaluate(
    checkpoint: Checkpoint,
    videos: Sequence[CaptionedVideo],
    store: FeatureStore,
    options: DecodingOptions,
) -> Evaluation:
    """Caption ``videos`` from their features and score against their captions, or paragraphs.

    Raises:
        DataError: there is no video, one without features, or one without what the captioner writes.
        FeatureMismatchError: the features are not of the kind that the captioner was trained on.
    """
    checkpoint.header.checked(store.header)
    if not videos:
        raise DataError("there is no video to evaluate on")
    task = task_of(checkpoint.captioner, data_options(checkpoint.info))
    task.check(videos, checkpoint.name)
    examples = task.examples(videos, FrameReader(store), None)
    said = task.predict(checkpoint.captioner, checkpoint.vocabulary, examples, options)
    return Evaluation(task.score(said, videos), said)


def data_options(info: Mapping[str, Any]) -> DataOptions:
    """How the data of a split are read for the captioner of a checkpoint with the notes ``info``."""
    return DataOptions(
        max_frames=int(info["max_frames"]),
        frames=str(info.get("frames", "spread")),
        max_segments=int(info.get("max_segments", DataOptions.max_segments)),
    )


def evaluate_run(
    folder: Path, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> Evaluation:
    """Score a run's best checkpoint on the test split ``videos`` and write ``test.json``.

    Raises:
        DataError: as :func:`evaluate`.
        CheckpointError: the run has no whole checkpoint.
    """
    found = evaluate(load_checkpoint(folder), videos, store, options)
    record = {"scores": found.scores, "captions": found.captions}
    atomic_write_text(folder / "test.json", json.dumps(record, ensure_ascii=False, indent=1))
    return found
