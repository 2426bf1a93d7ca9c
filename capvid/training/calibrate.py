"""How likely captions of little information are generic, measured on the validation split.

A caption counts as generic if it does not tell its video from others: by CIDEr-D it fits more than a tenth of
the other validation videos at least as well as its own. That is so of what could be said of any video, and of
what is said of the wrong one. Logistic regression gives how likely a caption is generic by its information
(:mod:`capvid.decoding.confidence`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from capvid.captioners.checkpoint import Checkpoint, load_checkpoint, save_info
from capvid.data.captions import CaptionedVideo
from capvid.data.examples import Example
from capvid.data.frames import FrameReader
from capvid.decoding import DecodingOptions
from capvid.decoding.confidence import (
    FLAGGED_FROM,
    NOTE,
    Calibration,
    generic_probability,
    logprobs_of_average,
)
from capvid.errors import CapvidError, DataError
from capvid.features.store import FeatureStore
from capvid.metrics.cider import CiderD
from capvid.training.evaluate import data_options
from capvid.training.tasks import Captions

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
    """The validation split does not say how likely captions are generic."""


def calibrate(
    checkpoint: Checkpoint, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> Calibration:
    """Measure how likely captions of a checkpoint are generic by their information.

    Args:
        checkpoint: a captioner of single captions.
        videos: of the validation split; at most :data:`MOST_VIDEOS` are taken, evenly.
        store: their features.
        options: how they are captioned.

    Raises:
        UncalibratedError: there are too few videos or captions of either kind, or information does not tell
            generic captions from others.
        DataError: a video has no features, or no captions.
        FeatureMismatchError: the features are not of the kind that the captioner was trained on.
    """
    if checkpoint.captioner.paragraphs:
        raise UncalibratedError(f"{checkpoint.name} writes paragraphs, not single captions")
    if len(videos) < LEAST_VIDEOS:
        raise UncalibratedError(f"{len(videos)} validation videos, and it takes {LEAST_VIDEOS}")
    checkpoint.header.checked(store.header)
    count = min(len(videos), MOST_VIDEOS)
    videos = [videos[place * len(videos) // count] for place in range(count)]
    captioner, task = checkpoint.captioner, Captions(data_options(checkpoint.info))
    examples = task.examples(videos, FrameReader(store), None)
    said = task.hypotheses(captioner, examples, options)
    average = _average(checkpoint, examples)
    found = [said[video.id] for video in videos]
    distinct = list(dict.fromkeys(tuple(h.tokens) for h in found))
    unseen = dict(zip(distinct, logprobs_of_average(captioner, average, distinct), strict=True))
    information = np.array([h.logprob - unseen[tuple(h.tokens)] for h in found])
    generic = fit_others(
        {v.id: " ".join(checkpoint.vocabulary.decode(h.tokens)) for v, h in zip(videos, found, strict=True)},
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


def _average(checkpoint: Checkpoint, examples: Sequence[Example]) -> tuple[float, ...]:
    """The mean (D,) of all frames that are looked at."""
    total, count = np.zeros(checkpoint.captioner.config.feature_width), 0
    for example in examples:
        vectors = checkpoint.frames(example.frames).double().flatten(0, -2).numpy()  # (N, D)
        total, count = total + vectors.sum(0), count + len(vectors)
    return tuple(float(f"{value:.{_DIGITS}g}") for value in (total / count).tolist())


def calibrate_run(
    folder: Path, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> str | None:
    """Calibrate a run's best checkpoint on the validation ``videos`` and add that to its notes.

    Returns:
        None, or why it was not calibrated, without any path; what is trained is never lost for want of it.
    """
    try:
        checkpoint = load_checkpoint(folder)
        assert checkpoint.folder is not None
        found = calibrate(checkpoint, videos, store, options)
        save_info(checkpoint.folder, {**checkpoint.info, NOTE: found.to_dict()})
    except UncalibratedError as error:
        return error.message
    except (CapvidError, OSError, SafetensorError, RuntimeError, MemoryError) as error:
        return type(error).__name__
    return None


def fit_others(said: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> Flags:
    """Whether each caption fits more than a tenth of the other videos at least as well as its own.

    Args:
        said: for each video its caption.
        references: for each of the same videos its reference captions, in the same order.
    """
    scorer, names = CiderD(references), list(references)
    scores = {
        caption: np.array(scorer.score_captions(names, [caption] * len(names)))
        for caption in dict.fromkeys(said.values())
    }
    fitting = np.empty(len(names))
    for place, name in enumerate(names):
        found = scores[said[name]]
        fitting[place] = (found >= found[place]).sum() - 1
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
