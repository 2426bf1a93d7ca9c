"""How much a caption says of its own video, and whether that is so little that it is likely generic.

A captioner that does not know says what it says of any video, and is sure of it: the log-probability of "a
man is talking" is high. So a caption c of a video v is weighed against the average video a, one frame with
the mean of the features: its information is log p(c | v) - log p(c | a), in nats. How likely a caption of so
much information is generic was measured on the validation split (:mod:`capvid.training.calibrate`) and is
kept in the notes of the checkpoint.
Notation for tensor shapes: D feature width, L words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from capvid.captioners.base import Captioner
from capvid.decoding.specificity import average_logprobs
from capvid.errors import CheckpointError

NOTE = "generic"  # its name in a checkpoint's notes
FLAGGED_FROM = 2 / 3  # probability of being generic


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the validation split said about one captioner.

    The probability that a caption of information x is generic is 1 / (1 + exp(-(intercept + slope * x))).

    Attributes:
        average: (D,) the mean of the features.
        intercept: of the logistic curve.
        slope: of it, per nat; below 0.
        videos: how many it was measured on.
        generic: the share of their captions that were generic.
        flagged: the share that gets the flag.
        generic_flagged: the share of generic ones among those with the flag; None if there are none.
        generic_others: the same among those without; None if there are none.
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
        """The calibration in the notes ``info`` of a checkpoint; None if it has none.

        Raises:
            CheckpointError: it is damaged.
        """
        if NOTE not in info:
            return None
        try:
            found = cls(**{**info[NOTE], "average": tuple(info[NOTE]["average"])})
            if not found.average or not all(
                map(math.isfinite, [*found.average, found.intercept, found.slope])
            ):
                raise ValueError("not numbers")
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise CheckpointError(
                f"the captioner's calibration is damaged ({error})", remedy="train it again or copy it anew"
            ) from error
        return found

    def to_dict(self) -> dict[str, Any]:
        """All fields, as plain values for a checkpoint's notes."""
        return {**asdict(self), "average": list(self.average)}

    def probability(self, information: float) -> float:
        """That a caption of so much ``information`` (nats) is generic."""
        return generic_probability(self.intercept, self.slope, information)

    def flags(self, information: float) -> bool:
        """Whether a caption of so much ``information`` (nats) is likely generic: two in three were."""
        return self.probability(information) >= FLAGGED_FROM


def generic_probability(intercept: float, slope: float, information: float) -> float:
    """The logistic curve of :class:`Calibration` at ``information`` (nats)."""
    return 0.5 + 0.5 * math.tanh(0.5 * (intercept + slope * information))


def logprobs_of_average(
    captioner: Captioner, average: Sequence[float], sentences: Sequence[Sequence[int]]
) -> list[float]:
    """Log-probability of each caption, its end included, were the video the average one.

    Args:
        captioner: of single captions.
        average: (D,) the mean of the features.
        sentences: word numbers of each, without start and end.

    Raises:
        CheckpointError: the captioner's features have another width.
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
