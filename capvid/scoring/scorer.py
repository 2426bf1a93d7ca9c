"""Scoring of captions: tokenization, then each metric."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capvid.errors import CapvidError, DataError, UsageError
from capvid.metrics import METRICS, Texts
from capvid.metrics.ngram_index import Caption, check_predictions, check_references, check_tokenizer, tokenize

CAPTION_METRICS = ("bleu", "rouge", "cider")  # metrics of captions that need no further data
PARAGRAPH_METRICS = (*CAPTION_METRICS, "repetition")
MISSING = ("error", "empty", "skip")
_ORDER = ("bleu", "meteor", "rouge", "cider", "repetition")  # order in tables; further metrics follow


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores by name: CIDEr-D from 0 to 10, all others from 0 to 1.

    Attributes:
        corpus: scores of all videos together.
        per_video: scores of each video.
        left_out: optional metrics that are not installed, with the reason.
    """

    corpus: dict[str, float]
    per_video: dict[str, dict[str, float]]
    left_out: dict[str, str] = field(default_factory=dict)


def metric_names(*, paragraphs: bool) -> tuple[str, ...]:
    """Return the names of all metrics of captions, or of paragraphs, in the order of the tables."""
    names = [name for name, known in METRICS.items() if paragraphs or not known.paragraphs_only]
    return tuple(sorted(names, key=lambda name: (*_ORDER, name).index(name)))


def score(
    predictions: Mapping[str, Caption],
    references: Mapping[str, Sequence[Caption]],
    *,
    metrics: Collection[str] = CAPTION_METRICS,
    tokenizer: str = "builtin",
    missing: str = "error",
    meteor_engine: str = "auto",
) -> Scores:
    """Score one caption for each video against its references.

    Args:
        predictions: caption, text or list of tokens, by video; videos without references are ignored.
        references: reference captions by video.
        metrics: any of ``bleu``, ``meteor``, ``rouge`` and ``cider``.
        tokenizer: ``builtin`` (``auto`` is the same); ``ptb`` for Stanford's, which needs Java; or ``none``
            for text that is tokenized already, separated by single spaces.
        missing: treatment of videos without a prediction: ``error``, ``empty`` (caption) or ``skip``.
        meteor_engine: ``builtin`` (``auto`` is the same) or ``java``.

    Raises:
        DataError: a video has no prediction or no reference; the message names it.
        UsageError: no such metric, tokenizer or engine.
        MetricError: a metric or tokenizer is not installed.
    """
    check_metrics(metrics, paragraphs=False)
    return score_texts(
        caption_texts(predictions, references, tokenizer=tokenizer, missing=missing),
        metrics=metrics,
        meteor_engine=meteor_engine,
    )


def score_paragraphs(
    predictions: Mapping[str, Sequence[str]],
    references: Mapping[str, Sequence[str]],
    *,
    metrics: Collection[str] = PARAGRAPH_METRICS,
    missing: str = "error",
    meteor_engine: str = "auto",
    repetition_of: Collection[str] | None = None,
) -> Scores:
    """Score a paragraph for each video as MART does: its sentences joined, and R@1 to R@4 over its sentences.

    Args:
        predictions: sentences of the paragraph by video.
        references: reference paragraphs by video, as texts.
        metrics: any of ``bleu``, ``meteor``, ``rouge``, ``cider`` and ``repetition``.
        missing: as for :func:`score`; the scripts of MART's authors use ``empty``.
        meteor_engine: as for :func:`score`.
        repetition_of: videos of R@n, by default all; those without a prediction do not count.

    Raises:
        DataError: a video has no prediction or no reference; the message names it.
        UsageError: no such metric or engine.
        MetricError: a metric is not installed.
    """
    check_metrics(metrics, paragraphs=True)
    texts = paragraph_texts(predictions, references, missing=missing, repetition_of=repetition_of)
    return score_texts(texts, metrics=metrics, meteor_engine=meteor_engine)


def check_metrics(metrics: Iterable[str], *, paragraphs: bool) -> None:
    """Raise UsageError if a metric does not exist, or is one of paragraphs only and these are captions."""
    for name in metrics:
        if name not in METRICS:
            known = ", ".join(metric_names(paragraphs=True))
            raise UsageError(f"no metric named {name!r}", remedy=f"use any of: {known}")
        if METRICS[name].paragraphs_only and not paragraphs:
            raise UsageError(f"{name} is a metric of paragraphs", remedy="leave it out, or score paragraphs")


def caption_texts(
    predictions: Mapping[str, Caption],
    references: Mapping[str, Sequence[Caption]],
    *,
    tokenizer: str = "builtin",
    missing: str = "error",
) -> Texts:
    """Tokenize captions; arguments and errors as for :func:`score`."""
    check_tokenizer(tokenizer)
    references = _scored_references(predictions, references, missing)
    captions = [predictions.get(video, "") for video in references]
    captions += [caption for texts in references.values() for caption in texts]
    if tokenizer == "ptb":
        from capvid.metrics import java

        ready = iter(java.tokenize([caption for caption in captions if isinstance(caption, str)]))
        tokens = iter(
            [next(ready) if isinstance(caption, str) else " ".join(caption) for caption in captions]
        )
    else:
        distinct = {caption for caption in captions if isinstance(caption, str)}
        known = {caption: tokenize(caption, tokenizer=tokenizer) for caption in distinct}
        tokens = iter(
            [known[caption] if isinstance(caption, str) else " ".join(caption) for caption in captions]
        )
    return Texts(
        predictions={video: next(tokens) for video in references},
        references={video: [next(tokens) for _ in texts] for video, texts in references.items()},
    )


def paragraph_texts(
    predictions: Mapping[str, Sequence[str]],
    references: Mapping[str, Sequence[str]],
    *,
    missing: str = "error",
    repetition_of: Collection[str] | None = None,
) -> Texts:
    """Join and split paragraphs as MART does; arguments and errors as for :func:`score_paragraphs`."""
    references = _scored_references(predictions, references, missing)
    counted = references if repetition_of is None else repetition_of
    return Texts(
        predictions={video: paragraph_text(predictions.get(video, ())) for video in references},
        references={video: [paragraph_text([text]) for text in texts] for video, texts in references.items()},
        sentences={v: predictions[v] for v in references if v in predictions and v in counted},
    )


def _scored_references(
    predictions: Mapping[str, object], references: Mapping[str, Sequence[Any]], missing: str
) -> Mapping[str, Sequence[Any]]:
    """Return the references of the videos that are scored."""
    if missing not in MISSING:
        raise UsageError(f"missing must be one of {', '.join(MISSING)}, got {missing!r}")
    check_references(references)
    if missing == "error":
        check_predictions(predictions, references)
    if missing == "skip":
        references = {video: texts for video, texts in references.items() if video in predictions}
        if not references:
            raise DataError("no video of the references has a prediction", remedy="compare the ids of both")
    return references


def paragraph_text(sentences: Sequence[str]) -> str:
    """Return a paragraph as MART's scripts score it: letters only, lower case, single spaces."""
    joined = "".join(f"{sentence}. " for sentence in sentences)
    return " ".join(re.sub("[^a-zA-Z]", " ", joined).lower().split())


def score_texts(
    texts: Texts,
    *,
    metrics: Collection[str] = CAPTION_METRICS,
    meteor_engine: str = "auto",
    meteor_needed: bool = True,
) -> Scores:
    """Score tokenized texts.

    Args:
        texts: captions and references.
        metrics: any of :data:`METRICS`.
        meteor_engine: as for :func:`score`.
        meteor_needed: whether a missing METEOR is an error; otherwise it is left out.

    Raises:
        UsageError: no such engine.
        MetricError: METEOR is not installed.
    """
    corpus: dict[str, float] = {}
    per_video: dict[str, dict[str, float]] = {video: {} for video in texts.references}
    left_out: dict[str, str] = {}
    for name in metric_names(paragraphs=True):
        if name not in metrics:
            continue
        try:
            options = {"engine": meteor_engine} if name == "meteor" else {}
            scored = METRICS[name].compute(texts, **options)
        except CapvidError as error:
            if name != "meteor" or meteor_needed or isinstance(error, UsageError):
                raise
            left_out["METEOR"] = str(error)
            continue
        for label, (mean, videos) in scored.items():
            corpus[label] = mean
            for video, value in videos.items():
                per_video[video][label] = value
    return Scores(corpus=corpus, per_video=per_video, left_out=left_out)
