"""Calibrated detection of generic captions.

A captioner that recognises nothing writes what fits any video, with high probability: "a man is talking". So
a caption is weighed against the average video, one frame with the mean of the features: its information is
log p(caption | video) - log p(caption | average video), in nats. The probability that a caption of that
information is generic is measured on the validation split (:mod:`capvid.training.evaluation`) and kept in
the notes of the checkpoint. Notation for tensor shapes: D feature width, L words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from capvid.captioners.base import Captioner
from capvid.decoding.rescoring import average_logprobs
from capvid.errors import CheckpointError

NOTE = "generic"  # its name in a checkpoint's notes
FLAGGED_FROM = 2 / 3  # probability of being generic


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration of one captioner on the validation split.

    The probability that a caption of information x is generic is 1 / (1 + exp(-(intercept + slope * x))).

    Attributes:
        average: (D,) mean of the features.
        intercept: intercept of the logistic curve.
        slope: slope of it, per nat; below 0.
        videos: number of videos measured.
        generic: share of generic captions.
        flagged: share of flagged captions.
        generic_flagged: share of generic ones among flagged captions; None if there are none.
        generic_others: share of generic ones among the others; None if there are none.
    """

    average: tuple[float, ...]
    intercept: float
    slope: float
    videos: int
    generic: float
    flagged: float
    generic_flagged: float | None
    generic_others: float | None

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Calibration | None:
        """Return the calibration in the notes ``info`` of a checkpoint; None if there is none.

        Raises:
            CheckpointError: it is damaged.
        """
        if NOTE not in info:
            return None
        try:
            calibration = cls(**{**info[NOTE], "average": tuple(info[NOTE]["average"])})
            numbers = [*calibration.average, calibration.intercept, calibration.slope]
            if not calibration.average or not all(map(math.isfinite, numbers)):
                raise ValueError("not numbers")
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise CheckpointError(
                f"the captioner's calibration is damaged ({error})", remedy="train it again or copy it anew"
            ) from error
        return calibration

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values for a checkpoint's notes."""
        return {**asdict(self), "average": list(self.average)}

    def flags(self, information: float) -> bool:
        """Return whether a caption of this ``information`` (nats) is likely generic."""
        return generic_probability(self.intercept, self.slope, information) >= FLAGGED_FROM


def generic_probability(intercept: float, slope: float, information: float) -> float:
    """Return the logistic curve of :class:`Calibration` at ``information`` (nats)."""
    return 0.5 + 0.5 * math.tanh(0.5 * (intercept + slope * information))


def logprobs_of_average(
    captioner: Captioner, average: Sequence[float], sentences: Sequence[Sequence[int]]
) -> list[float]:
    """Return the log-probability of each caption, its end included, given the average video.

    Args:
        captioner: captioner of single captions.
        average: (D,) mean of the features.
        sentences: word numbers of each, without start and end.

    Raises:
        CheckpointError: the captioner's features have a different width.
    """
    config = captioner.config
    if len(average) != config.feature_width:
        raise CheckpointError(
            f"the captioner's calibration is of features of width {len(average)}, and it takes "
            f"{config.feature_width}",
            remedy="train it again or copy it anew",
        )
    weights = next(captioner.parameters())
    mean = torch.tensor(average, dtype=weights.dtype, device=weights.device)
    return average_logprobs(captioner, mean, sentences)
