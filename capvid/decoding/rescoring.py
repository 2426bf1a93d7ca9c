"""Rescoring of finished captions: teacher-forced log-probabilities, traces, specificity, confidence.

A captioner that recognizes nothing writes what fits any video, with high probability: "a man is talking". So
a caption is compared with the average video, one frame with the mean of the features: its information is
log p(caption | video) - log p(caption | average video), in nats. Its mean log-probability per word and its
information give its confidence, the probability that it is right, by a logistic curve that is fitted to the
validation split (:mod:`capvid.training.evaluation`) and kept in the notes of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from capvid.captioners.base import Captioner, Carried, ParagraphCaptioner, Standardise, Trace
from capvid.captioners.layers import at_least_float32
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.errors import CheckpointError, UsageError
from capvid.text.vocabulary import BOS, EOS

MOST_WEIGHTS = 100_000_000  # of a captioner that is held twice
SENTENCES = 32  # whose logits are held at once
AVERAGE_WORDS = 8192  # words of sentences that are read together, given the average video


def in_double(captioner: Captioner, device: torch.device) -> Captioner | None:
    """Return a copy of ``captioner`` in double precision; None if it is too large or ``device`` has none."""
    if device.type == "mps" or sum([part.numel() for part in captioner.parameters()]) > MOST_WEIGHTS:
        return None
    return deepcopy(captioner).double()


@torch.inference_mode()
def rescore(
    captioner: Captioner,
    features: Tensor,
    mask: Tensor,
    hypotheses: Sequence[Sequence[Hypothesis]],
    *,
    carried: Carried | None = None,
    trace: bool = False,
) -> list[list[Hypothesis]]:
    """Return the same hypotheses with log-probabilities and traces as precise as the captioner.

    Args:
        captioner: captioner that wrote them.
        features: features of the videos, or of a segment of each, (B, T, D), or maps (B, T, L, D).
        mask: (B, T) of real frames.
        hypotheses: captions of each video, at least one.
        carried: memory of the segments before these, for paragraph captioners.
        trace: whether to keep :attr:`Hypothesis.trace`.
    """
    features = features.to(next(captioner.parameters()).dtype)
    width = max(map(len, hypotheses))  # K; the last caption fills the rows of videos that have fewer
    rows = [row.tokens for each in hypotheses for row in [*each, *[each[-1]] * (width - len(each))]]
    before, after = _words_around(rows, features.device)  # (B K, L + 1)
    if isinstance(captioner, ParagraphCaptioner):
        state = captioner.encode(features, mask, carried)
        hidden = captioner.read(state.repeat(width), before)[0]
    else:
        hidden = captioner.teacher_forced(features, mask, before)  # (B K, L + 1, Z)
    logprobs = _word_logprobs(captioner, hidden, after)
    traces: list[Trace] = []
    if trace:
        if not isinstance(captioner, ParagraphCaptioner):
            state = captioner.encode(features, mask)
        state = state.expand(width)
        for words in before.unbind(1):
            _, state, step = captioner.step(words, state)
            traces.append(step)
    frames = mask.sum(1).tolist()
    rescored: list[list[Hypothesis]] = []
    for video, each in enumerate(hypotheses):
        rescored.append([])
        for row, hypothesis in enumerate(each, video * width):
            end, kept = len(hypothesis.tokens) + 1, {}
            for name in traces[0] if trace else ():
                steps = [torch.atleast_1d(step[name][row]) for step in traces[:end]]
                if name == "attention":  # of the real frames alone
                    steps = [weights[: frames[video]] for weights in steps]
                kept[name] = pad_sequence(steps, batch_first=True).cpu()  # (L + 1, W)
            rescored[-1].append(
                replace(hypothesis, logprobs=logprobs[row][:end], trace=kept if trace else None)
            )
    return rescored


def _words_around(sentences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the word before and after each position of sentences with start and end, both (N, L + 1)."""
    tokens = [torch.tensor([BOS, *words, EOS], device=device) for words in sentences]
    padded = pad_sequence(tokens, batch_first=True)
    return padded[:, :-1], padded[:, 1:]


def _word_logprobs(captioner: Captioner, hidden: Tensor, words: Tensor) -> list[list[float]]:
    """Return the log-probabilities of ``words`` (N, L) by inputs of the vocabulary layer (N, L, Z)."""
    logprobs: list[list[float]] = []
    for part, after in zip(hidden.split(SENTENCES), words.split(SENTENCES), strict=True):
        logits = at_least_float32(captioner.logits(part))
        logprobs += (logits.gather(2, after.unsqueeze(2)).squeeze(2) - logits.logsumexp(-1)).tolist()
    return logprobs


def check_specificity(captioner: Captioner, options: DecodingOptions) -> None:
    """Check that ``captioner`` can rank by the ``specificity`` of the options.

    Raises:
        UsageError: it writes paragraphs, or does not hold the mean of the training features.
    """
    if not options.specificity or options.temperature:
        return
    if captioner.paragraphs or not isinstance(captioner.standardise, Standardise):
        raise UsageError(
            f"specificity = {options.specificity}: expected a captioner of single captions, trained with "
            "standardise = true, which holds the mean of the training features",
            remedy=f"leave specificity at 0 for this {captioner.name}",
        )


def rank_by_specificity(
    captioner: Captioner, hypotheses: Sequence[Sequence[Hypothesis]], options: DecodingOptions
) -> list[list[Hypothesis]]:
    """Return each video's best ``num_captions`` hypotheses, best first, with their new scores.

    A score is (log p(caption | video) - specificity * log p(caption | average video)) divided by
    n ** length_penalty.

    Args:
        captioner: a captioner that :func:`check_specificity` accepts.
        hypotheses: all finished captions of each video.
        options: decoding options.
    """
    mean = captioner.standardise.mean
    assert isinstance(mean, Tensor)
    distinct = list(dict.fromkeys(tuple(hypothesis.tokens) for hypothesis in chain.from_iterable(hypotheses)))
    average = dict(zip(distinct, average_logprobs(captioner, mean, distinct), strict=True))

    def scored(hypothesis: Hypothesis) -> Hypothesis:
        specific = hypothesis.logprob - options.specificity * average[tuple(hypothesis.tokens)]
        return replace(hypothesis, score=specific / len(hypothesis.logprobs) ** options.length_penalty)

    return [
        sorted(map(scored, each), key=lambda hypothesis: -hypothesis.score)[: options.num_captions]
        for each in hypotheses
    ]


@torch.inference_mode()
def average_logprobs(
    captioner: Captioner, average: Tensor | Sequence[float], sentences: Sequence[Sequence[int]]
) -> list[float]:
    """Return the log-probability of each sentence, its end included, given the average video.

    The last digits depend on the sentences that share a call.

    Args:
        captioner: captioner of single captions.
        average: (D,) mean of the features; for feature maps, at every location.
        sentences: word numbers of each, without start and end.

    Raises:
        CheckpointError: the captioner's features have a different width.
    """
    config, weights = captioner.config, next(captioner.parameters())
    if len(average) != config.feature_width:
        raise CheckpointError(
            f"the captioner's calibration is of features of width {len(average)}, and it takes "
            f"{config.feature_width}",
            remedy="train it again or copy it anew",
        )
    captioner.eval()
    frame = torch.as_tensor(average, dtype=weights.dtype, device=weights.device).view(1, 1, -1)
    if config.locations:
        frame = frame.unsqueeze(2).expand(-1, -1, config.locations, -1)
    mask = torch.ones(1, 1, dtype=torch.bool, device=weights.device)
    together = max(1, AVERAGE_WORDS // (max(map(len, sentences), default=0) + 1))
    totals: list[float] = []
    for start in range(0, len(sentences), together):  # their gates are computed for all words at once
        batch = sentences[start : start + together]
        before, after = _words_around(batch, weights.device)
        logprobs = _word_logprobs(captioner, captioner.teacher_forced(frame, mask, before), after)
        totals += [sum(row[: len(words) + 1]) for row, words in zip(logprobs, batch, strict=True)]
    return totals


NOTE = "confidence"  # its name in a checkpoint's notes


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration of a captioner's confidence on the validation split.

    The confidence is 1 / (1 + exp(-(intercept + per_logprob * x + per_information * y))) for a caption with
    the mean log-probability x per word, its end included, and the information y.

    Attributes:
        average: (D,) mean of the features.
        intercept: intercept of the logistic curve.
        per_logprob: slope of it, per nat of x.
        per_information: slope of it, per nat of y.
        videos: number of videos measured.
        right: share of right captions.
        flagged: share of captions with a confidence below 0.2.
        right_flagged: share of right ones among these; None if there are none.
        right_others: share of right ones among the others; None if there are none.
    """

    average: tuple[float, ...]
    intercept: float
    per_logprob: float
    per_information: float
    videos: int
    right: float
    flagged: float
    right_flagged: float | None
    right_others: float | None

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
            curve = (calibration.intercept, calibration.per_logprob, calibration.per_information)
            if not calibration.average or not all(map(math.isfinite, (*calibration.average, *curve))):
                raise ValueError("not numbers")
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise CheckpointError(
                f"the captioner's calibration is damaged ({error})", remedy="train it again or copy it anew"
            ) from error
        return calibration

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values for a checkpoint's notes."""
        return {**asdict(self), "average": list(self.average)}

    def confidence(self, hypothesis: Hypothesis, average_logprob: float) -> float:
        """Return the probability that a caption is right, given its log-probability for the average video."""
        mean, information = signals(hypothesis, average_logprob)
        x = self.intercept + self.per_logprob * mean + self.per_information * information
        return 0.5 + 0.5 * math.tanh(0.5 * x)  # 1 / (1 + exp(-x)) without overflow


def signals(hypothesis: Hypothesis, average_logprob: float) -> tuple[float, float]:
    """Return the mean log-probability per word of a caption, and its information, in nats."""
    return hypothesis.logprob / len(hypothesis.logprobs), hypothesis.logprob - average_logprob
