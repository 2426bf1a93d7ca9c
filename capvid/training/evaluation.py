"""Task of a captioner (captions or paragraphs), evaluation on a split, and calibration of its confidence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from capvid.captioners.base import Captioner, ParagraphCaptioner
from capvid.captioners.checkpoint import Checkpoint, limited, load_checkpoint, save_info
from capvid.captioners.layers import pad_frames, pad_segments
from capvid.datasets.batches import (
    FrameReader,
    Lengths,
    ParagraphBatches,
    TrainingBatches,
    make_examples,
    usable_captions,
    usable_paragraphs,
)
from capvid.datasets.dataset import CaptionedVideo
from capvid.decoding.beam_search import decode, decode_paragraphs
from capvid.decoding.caption_generator import LOW_CONFIDENCE
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.decoding.rescoring import NOTE, Calibration, average_logprobs, signals
from capvid.errors import CapvidError, DataError
from capvid.features.feature_store import NO_VIEWS, FeatureStore, Views
from capvid.metrics.cider import CiderD
from capvid.scoring.scorer import paragraph_text, score, score_paragraphs
from capvid.text.vocabulary import Vocabulary
from capvid.training.recipe import DataOptions
from capvid.utils.files import atomic_write_text

Prediction = Any  # str, or a list of sentences
DECODING_BATCH = 64  # videos


class Task:
    """Single captions, or ``paragraphs`` with a sentence per segment: examples, predictions, scores."""

    def __init__(self, data: DataOptions, *, paragraphs: bool) -> None:
        self.data, self.paragraphs = data, paragraphs
        self.lengths = Lengths(data.max_words, cut=data.long_captions == "cut", tokenizer=data.tokenizer)

    def check(self, videos: Sequence[CaptionedVideo], name: str) -> None:
        """Raise DataError unless every video has references for the captioner ``name``."""
        missing = [v.id for v in videos if not (v.paragraphs if self.paragraphs else v.captions)]
        if missing and self.paragraphs:
            raise DataError(
                f"{name} writes paragraphs and expects segments with a sentence each; {missing[0]} has "
                "single captions only",
                remedy='give rows with "segments" and "paragraphs", or choose a captioner of sentences '
                "such as m3",
            )
        if missing:
            raise DataError(
                f"{name} writes one sentence per video and expects captions; {missing[0]} has only "
                "paragraphs of its segments",
                remedy="give data with captions, or choose a captioner of paragraphs such as mart",
            )

    def sentences(self, videos: Sequence[CaptionedVideo]) -> list[list[str]]:
        """Return all sentences to learn from, as lists of words."""
        if not self.paragraphs:
            return [tokens for video in videos for tokens in usable_captions(video, self.lengths)]
        segments = self.data.max_segments
        return [s for v in videos for p in usable_paragraphs(v, self.lengths, segments) for s in p]

    def examples(
        self,
        videos: Sequence[CaptionedVideo],
        reader: FrameReader,
        vocabulary: Vocabulary | None,
        views: Views = NO_VIEWS,
    ) -> list[Any]:
        """Return the videos with usable sentences and their views; without a vocabulary, all videos."""
        segments = self.data.max_segments if self.paragraphs else None
        return make_examples(videos, reader, vocabulary, self.lengths, views, max_segments=segments)

    def batches(self, examples: Sequence[Any], *, batch_size: int, seed: int) -> Any:
        """Return the training batches."""
        return self._batches(
            examples,
            batch_size=batch_size,
            captions_per_video=self.data.captions_per_video,
            frame_dropout=self.data.frame_dropout,
            seed=seed,
        )

    def validation_batches(self, examples: Sequence[Any], batch_size: int) -> Any:
        """Return batches of all captions, the same in every epoch."""
        captions = max([len(e.paragraphs if self.paragraphs else e.captions) for e in examples], default=0)
        return self._batches(examples, batch_size=batch_size, captions_per_video=captions, seed=0)

    def _batches(self, examples: Sequence[Any], **options: Any) -> Any:
        batches: Any = ParagraphBatches if self.paragraphs else TrainingBatches
        limits = {"max_frames": self.data.max_frames, "frames": self.data.frames}
        return batches(examples, **limits, **options)

    def hypotheses(
        self, captioner: Captioner, examples: Sequence[Any], options: DecodingOptions
    ) -> dict[str, list[Hypothesis]]:
        """Return the best hypothesis of each segment by video id; single captions have one segment."""
        device = next(captioner.parameters()).device

        def frames(features: torch.Tensor) -> torch.Tensor:
            return limited(features, self.data.max_frames, self.data.frames).float()

        best: dict[str, list[Hypothesis]] = {}
        for first in range(0, len(examples), DECODING_BATCH):
            batch = examples[first : first + DECODING_BATCH]
            if isinstance(captioner, ParagraphCaptioner):
                padded = pad_segments([[frames(segment) for segment in e.segments] for e in batch])
                features, mask, counts = (tensor.to(device) for tensor in padded)
                decoded = decode_paragraphs(captioner, features, mask, counts, options)
            else:
                features, mask = pad_frames([frames(example.frames) for example in batch])
                captions = decode(captioner, features.to(device), mask.to(device), options)
                decoded = [[hypotheses] for hypotheses in captions]
            for example, segments in zip(batch, decoded, strict=True):
                best[example.id] = [hypotheses[0] for hypotheses in segments]
        return best

    def predict(
        self, captioner: Captioner, vocabulary: Vocabulary, examples: Sequence[Any], options: DecodingOptions
    ) -> dict[str, Prediction]:
        """Return the best caption, or the sentences of the best paragraph, by video id."""
        predictions: dict[str, Prediction] = {}
        for name, segments in self.hypotheses(captioner, examples, options).items():
            sentences = [" ".join(vocabulary.decode(hypothesis.tokens)) for hypothesis in segments]
            predictions[name] = sentences if self.paragraphs else sentences[0]
        return predictions

    def cider(self, videos: Sequence[CaptionedVideo]) -> Callable[[Mapping[str, Prediction]], float]:
        """Return a function that scores predictions for ``videos`` by CIDEr-D."""
        scorer = CiderD(self._references(videos), tokenizer="none" if self.paragraphs else "builtin")
        text = paragraph_text if self.paragraphs else str
        return lambda predictions: scorer.score({k: text(p) for k, p in predictions.items()})[0]

    def score(
        self, predictions: Mapping[str, Prediction], videos: Sequence[CaptionedVideo]
    ) -> dict[str, float]:
        """Return BLEU, ROUGE_L and CIDEr-D by metric, and R@1 to R@4 of paragraphs."""
        scorer = score_paragraphs if self.paragraphs else score
        return dict(scorer(predictions, self._references(videos)).corpus)

    def _references(self, videos: Sequence[CaptionedVideo]) -> dict[str, list[str]]:
        if self.paragraphs:
            return {video.id: [paragraph_text(p) for p in video.paragraphs] for video in videos}
        return {video.id: list(video.captions) for video in videos}


@dataclass(frozen=True)
class Evaluation:
    """Predictions of a captioner for a split, and their scores."""

    scores: dict[str, float]  # fractions by metric
    captions: dict[str, Prediction]  # by video id


def evaluate(
    checkpoint: Checkpoint, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> Evaluation:
    """Caption ``videos`` from their features and score the captions against the references."""
    checkpoint.header.require_match(store.header)
    if not videos:
        raise DataError("there is no video to evaluate on")
    task = task_of(checkpoint)
    task.check(videos, checkpoint.name)
    examples = task.examples(videos, FrameReader(store), None)
    captions = task.predict(checkpoint.captioner, checkpoint.vocabulary, examples, options)
    return Evaluation(task.score(captions, videos), captions)


def task_of(checkpoint: Checkpoint) -> Task:
    """Return the task of a trained captioner."""
    info = checkpoint.info
    data = DataOptions(
        max_frames=int(info["max_frames"]),
        frames=str(info.get("frames", "spread")),
    )
    return Task(data, paragraphs=checkpoint.captioner.paragraphs)


def evaluate_run(
    folder: Path, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> Evaluation:
    """Evaluate a run's best checkpoint on the test split ``videos`` and write ``test.json``."""
    result = evaluate(load_checkpoint(folder), videos, store, options)
    record = {"scores": result.scores, "captions": result.captions}
    atomic_write_text(folder / "test.json", json.dumps(record, ensure_ascii=False, indent=1))
    return result


MIN_VIDEOS = 100  # with fewer, the standard error of a share exceeds 1/20
MIN_PER_CLASS = 10  # right captions, and wrong ones
RIGHT_FROM = 0.5  # CIDEr-D; about the mean of one reference of MSR-VTT against the others
RIDGE = 1.0
MIN_GAIN = 4.6  # nats: two useless signals gain as much in one fit of a hundred
_STEPS = 50
_DIGITS = 6

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class UncalibratedError(DataError):
    """The validation split does not say which captions are right."""


def calibrate(
    checkpoint: Checkpoint, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> Calibration:
    """Fit the probability that a caption is right, by its CIDEr-D, to the validation ``videos``.

    Raises:
        UncalibratedError: too few videos or captions of either kind, or probabilities do not separate them.
    """
    captioner, vocabulary = checkpoint.captioner, checkpoint.vocabulary
    if captioner.paragraphs:
        raise UncalibratedError(f"{checkpoint.name} writes paragraphs, not single captions")
    if len(videos) < MIN_VIDEOS:
        raise UncalibratedError(f"{len(videos)} validation videos, and it takes {MIN_VIDEOS}")
    checkpoint.header.require_match(store.header)
    task = task_of(checkpoint)
    examples = task.examples(videos, FrameReader(store), None)
    best = {name: group[0] for name, group in task.hypotheses(captioner, examples, options).items()}
    total, frames = np.zeros(captioner.config.feature_width), 0
    for example in examples:
        vectors = checkpoint.frames(example.frames).double().flatten(0, -2).numpy()  # (N, D)
        total, frames = total + vectors.sum(0), frames + len(vectors)
    average = tuple(float(f"{value:.{_DIGITS}g}") for value in (total / frames).tolist())
    distinct = list(dict.fromkeys(tuple(hypothesis.tokens) for hypothesis in best.values()))
    unconditional = dict(zip(distinct, average_logprobs(captioner, average, distinct), strict=True))
    x = np.array(
        [signals(hypothesis, unconditional[tuple(hypothesis.tokens)]) for hypothesis in best.values()]
    )
    captions = [" ".join(vocabulary.decode(hypothesis.tokens)) for hypothesis in best.values()]
    scorer = CiderD({video.id: list(video.captions) for video in videos})
    right = np.array(scorer.score_captions(list(best), captions)) >= RIGHT_FROM
    intercept, (per_logprob, per_information) = fit(x, right)
    odds = intercept + x @ np.array([per_logprob, per_information])
    flagged = 1 / (1 + np.exp(-odds)) < LOW_CONFIDENCE
    return Calibration(
        average=average,
        intercept=intercept,
        per_logprob=per_logprob,
        per_information=per_information,
        videos=len(videos),
        right=_rounded(right.mean()),
        flagged=_rounded(flagged.mean()),
        right_flagged=_rounded(right[flagged].mean()) if flagged.any() else None,
        right_others=_rounded(right[~flagged].mean()) if not flagged.all() else None,
    )


def calibrate_run(
    folder: Path, videos: Sequence[CaptionedVideo], store: FeatureStore, options: DecodingOptions
) -> str | None:
    """Calibrate a run's best checkpoint on the validation ``videos``; return the reason if that fails.

    A failure must not lose a trained run; the reason names no path.
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


def fit(x: Floats, right: Flags) -> tuple[float, list[float]]:
    """Fit a logistic regression, with a ridge penalty on standardized slopes, by Newton's method.

    Args:
        x: signals (N, F).
        right: (N,) whether each caption is right.

    Returns:
        the intercept, and the slope of each signal.
    """
    if min(right.sum(), (~right).sum()) < MIN_PER_CLASS:
        raise UncalibratedError(f"{right.sum()} of {len(right)} validation captions are right")
    mean, deviation = x.mean(0), x.std(0)
    if not (np.isfinite(deviation).all() and (deviation > 0).all()):
        raise UncalibratedError("the validation captions all have the same probability, or none")
    design = np.column_stack([np.ones(len(x)), (x - mean) / deviation])  # (N, 1 + F)
    penalty = RIDGE * np.diag([0.0, *np.ones(x.shape[1])])
    odds = math.log(right.mean() / (1 - right.mean()))  # without signals
    weights = np.array([odds, *np.zeros(x.shape[1])])
    for _ in range(_STEPS):
        p = 0.5 + 0.5 * np.tanh(0.5 * (design @ weights))
        slope = design.T @ (right - p) - penalty @ weights
        curvature = (design * (p * (1 - p))[:, None]).T @ design + penalty
        weights = weights + np.linalg.solve(curvature, slope)
    if _log_likelihood(design @ weights, right) < _log_likelihood(np.full(len(x), odds), right) + MIN_GAIN:
        raise UncalibratedError("probabilities do not separate right validation captions from wrong ones")
    slopes = weights[1:] / deviation
    return _rounded(weights[0] - slopes @ mean), [_rounded(slope) for slope in slopes]


def _log_likelihood(odds: Floats, right: Flags) -> float:
    """Return the log-likelihood (nats) of the labels (N,) given log-odds (N,)."""
    return float(-np.logaddexp(0, np.where(right, -odds, odds)).sum())


def _rounded(value: float) -> float:
    return round(float(value), _DIGITS)
