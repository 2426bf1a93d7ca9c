"""Evaluation of a captioner on a split, and calibration of its warnings of generic captions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from capvid.captioners.checkpoint import Checkpoint, load_checkpoint, save_info
from capvid.datasets.dataset import CaptionedVideo
from capvid.datasets.examples import FrameReader
from capvid.decoding.confidence import (
    FLAGGED_FROM,
    NOTE,
    Calibration,
    generic_probability,
    logprobs_of_average,
)
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import CapvidError, DataError
from capvid.features.feature_store import FeatureStore
from capvid.metrics.cider import CiderD
from capvid.training.recipe import DataOptions
from capvid.training.tasks import task_of
from capvid.utils.files import atomic_write_text


@dataclass(frozen=True)
class Evaluation:
    """Captions of a split by a captioner, and their scores.

    Attributes:
        scores: by metric, as fractions.
        captions: by video id: a sentence, or the sentences of a paragraph.
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
    captions = task.predict(checkpoint.captioner, checkpoint.vocabulary, examples, options)
    return Evaluation(task.score(captions, videos), captions)


def data_options(info: Mapping[str, Any]) -> DataOptions:
    """Return how videos are read for the captioner of a checkpoint with the notes ``info``."""
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
        CheckpointError: the run has no complete checkpoint.
    """
    result = evaluate(load_checkpoint(folder), videos, store, options)
    record = {"scores": result.scores, "captions": result.captions}
    atomic_write_text(folder / "test.json", json.dumps(record, ensure_ascii=False, indent=1))
    return result


LEAST_VIDEOS = 100  # with fewer, a share among them is not known to a tenth (two standard errors)
LEAST_OF_EACH = 10  # captions that are generic, and that are not
MOST_VIDEOS = 500  # each caption is scored against every video
SHARE_OF_OTHERS = 0.1
RIDGE = 1.0
_STEPS = 50
_DIGITS = 6

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class UncalibratedError(DataError):
    """The validation split does not predict how likely captions are generic."""


def calibrate(
    checkpoint: Checkpoint, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> Calibration:
    """Measure how likely captions of a checkpoint are generic by their information.

    Args:
        checkpoint: a captioner of single captions.
        videos: validation split; at most :data:`MOST_VIDEOS` are used, evenly spread.
        store: their features.
        options: decoding options.

    Raises:
        UncalibratedError: too few videos or captions of either kind, or information does not separate them.
        DataError: a video has no features, or no captions.
        FeatureMismatchError: the features are not of the kind that the captioner was trained on.
    """
    if checkpoint.captioner.paragraphs:
        raise UncalibratedError(f"{checkpoint.name} writes paragraphs, not single captions")
    if len(videos) < LEAST_VIDEOS:
        raise UncalibratedError(f"{len(videos)} validation videos, and it takes {LEAST_VIDEOS}")
    checkpoint.header.checked(store.header)
    count = min(len(videos), MOST_VIDEOS)
    videos = [videos[row * len(videos) // count] for row in range(count)]
    captioner, vocabulary = checkpoint.captioner, checkpoint.vocabulary
    task = task_of(captioner, data_options(checkpoint.info))
    examples = task.examples(videos, FrameReader(store), None)
    best = task.hypotheses(captioner, examples, options)
    hypotheses = [best[video.id][0] for video in videos]
    total, frames = np.zeros(captioner.config.feature_width), 0
    for example in examples:
        vectors = checkpoint.frames(example.frames).double().flatten(0, -2).numpy()  # (N, D)
        total, frames = total + vectors.sum(0), frames + len(vectors)
    average = tuple(float(f"{value:.{_DIGITS}g}") for value in (total / frames).tolist())
    distinct = list(dict.fromkeys(tuple(h.tokens) for h in hypotheses))
    unconditional = dict(zip(distinct, logprobs_of_average(captioner, average, distinct), strict=True))
    information = np.array([h.logprob - unconditional[tuple(h.tokens)] for h in hypotheses])
    sentences = [" ".join(vocabulary.decode(h.tokens)) for h in hypotheses]
    generic = fit_others(
        {video.id: sentence for video, sentence in zip(videos, sentences, strict=True)},
        {video.id: list(video.captions) for video in videos},
    )
    intercept, slope = fit(information, generic)
    flagged = np.array([generic_probability(intercept, slope, x) >= FLAGGED_FROM for x in information])
    return Calibration(
        average=average,
        intercept=intercept,
        slope=slope,
        videos=count,
        generic=_rounded(generic.mean()),
        flagged=_rounded(flagged.mean()),
        generic_flagged=_rounded(generic[flagged].mean()) if flagged.any() else None,
        generic_others=_rounded(generic[~flagged].mean()) if not flagged.all() else None,
    )


def calibrate_run(
    folder: Path, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> str | None:
    """Calibrate a run's best checkpoint on the validation ``videos`` and add that to its notes.

    Returns:
        None, or the reason for no calibration, without any path; a trained run is never lost for want of it.
    """
    try:
        checkpoint = load_checkpoint(folder)
        assert checkpoint.folder is not None
        calibration = calibrate(checkpoint, videos, store, options)
        save_info(checkpoint.folder, {**checkpoint.info, NOTE: calibration.to_dict()})
    except UncalibratedError as error:
        return error.message
    except (CapvidError, OSError, SafetensorError, RuntimeError, MemoryError) as error:
        return type(error).__name__
    return None


def fit_others(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> Flags:
    """Whether each caption fits more than a tenth of the other videos at least as well as its own.

    Args:
        captions: caption of each video.
        references: reference captions of the same videos, in the same order.
    """
    scorer, names = CiderD(references), list(references)
    scores = {
        caption: np.array(scorer.score_captions(names, [caption] * len(names)))
        for caption in dict.fromkeys(captions.values())
    }
    fitting = np.empty(len(names))
    for row, name in enumerate(names):
        ciders = scores[captions[name]]
        fitting[row] = (ciders >= ciders[row]).sum() - 1
    result: Flags = fitting > SHARE_OF_OTHERS * (len(names) - 1)
    return result


def fit(information: Floats, generic: Flags) -> tuple[float, float]:
    """Intercept and slope of the logistic curve by Newton's method, with a ridge on the slope in deviations.

    Raises:
        UncalibratedError: there are too few captions of either kind, or the curve does not fall.
    """
    fewest = min(generic.sum(), (~generic).sum())
    if fewest < LEAST_OF_EACH:
        raise UncalibratedError(f"{generic.sum()} of {len(generic)} validation captions are generic")
    mean, deviation = information.mean(), information.std()
    if not (math.isfinite(deviation) and deviation > 0):
        raise UncalibratedError("the validation captions all have the same information, or none")
    x = (information - mean) / deviation
    a = b = 0.0
    for _ in range(_STEPS):
        p = 0.5 + 0.5 * np.tanh(0.5 * (a + b * x))
        error, weight = generic - p, p * (1 - p)
        slopes = error.sum(), (error * x).sum() - RIDGE * b
        aa, ab, bb = weight.sum(), (weight * x).sum(), (weight * x * x).sum() + RIDGE
        determinant = aa * bb - ab * ab
        a += (bb * slopes[0] - ab * slopes[1]) / determinant
        b += (aa * slopes[1] - ab * slopes[0]) / determinant
    if not b < 0:
        raise UncalibratedError("information does not tell generic validation captions from others")
    return _rounded(a - b * mean / deviation), _rounded(b / deviation)


def _rounded(value: float) -> float:
    return round(float(value), _DIGITS)
