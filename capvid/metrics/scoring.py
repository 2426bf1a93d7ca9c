"""From captions and references to scores by name: tokens first, then every metric that is asked for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from capvid.errors import CapvidError, DataError, MetricError, UsageError
from capvid.metrics.bleu import bleu_scores
from capvid.metrics.cider import CiderD
from capvid.metrics.index import ReferenceIndex
from capvid.metrics.ngrams import (
    Caption,
    check_predictions,
    check_references,
    check_tokenizer,
    tokenised,
)
from capvid.metrics.repetition import repetition
from capvid.metrics.rouge import rouge_l

METRICS = ("bleu", "meteor", "rouge", "cider", "repetition")
CAPTION_METRICS = ("bleu", "rouge", "cider")  # those of captions that need no further data
PARAGRAPH_METRICS = (*CAPTION_METRICS, "repetition")
MISSING = ("error", "empty", "skip")
ENGINES = {
    "auto": "capvid.metrics.meteor",
    "builtin": "capvid.metrics.meteor",
    "java": "capvid.metrics.meteor_java",
}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores by name: CIDEr-D from 0 to 10, all others from 0 to 1.

    Attributes:
        corpus: of all videos together.
        per_video: of each video.
        left_out: metrics that are not installed and need not be, and why.
    """

    corpus: dict[str, float]
    per_video: dict[str, dict[str, float]]
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Tokenised captions and their references, ready to be scored.

    Attributes:
        predictions: for each video of the references a caption, its tokens separated by single spaces.
        references: for each video its reference captions, likewise.
        sentences: of paragraphs the sentences as they were predicted, for the videos of R@n.
    """

    predictions: Mapping[str, str]
    references: Mapping[str, Sequence[str]]
    sentences: Mapping[str, Sequence[str]] = field(default_factory=dict)


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
        predictions: a caption, text or list of tokens, for every video of the references; captions of other
            videos are left out of account.
        references: for each video its reference captions.
        metrics: any of ``bleu``, ``meteor``, ``rouge`` and ``cider``.
        tokenizer: ``builtin`` (``auto`` is the same); ``ptb`` for Stanford's, which needs Java; or ``none``
            for texts whose tokens are separated by single spaces already.
        missing: what becomes of videos without a prediction: ``error``, ``empty`` (they have said nothing)
            or ``skip`` (they are left out).
        meteor_engine: ``builtin`` (``auto`` is the same) or ``java``.

    Raises:
        DataError: a video has no prediction or no reference; the message names it.
        UsageError: there is no metric, tokenizer or engine of that name.
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
        predictions: the sentences of a paragraph for every video of the references.
        references: for each video its reference paragraphs, as texts.
        metrics: any of ``bleu``, ``meteor``, ``rouge``, ``cider`` and ``repetition``.
        missing: as for :func:`score`; MART's own scripts do ``empty``.
        meteor_engine: as for :func:`score`.
        repetition_of: the videos of R@n, all if it is None; those without a prediction do not count.

    Raises:
        DataError: a video has no prediction or no reference; the message names it.
        UsageError: there is no metric or engine of that name.
        MetricError: a metric is not installed.
    """
    check_metrics(metrics, paragraphs=True)
    texts = paragraph_texts(predictions, references, missing=missing, repetition_of=repetition_of)
    return score_texts(texts, metrics=metrics, meteor_engine=meteor_engine)


def check_metrics(metrics: Iterable[str], *, paragraphs: bool) -> None:
    """Refuse names that are none of a metric.

    Raises:
        UsageError: there is such a name, or ``repetition`` for captions.
    """
    for name in metrics:
        if name not in METRICS:
            raise UsageError(f"no metric named {name!r}", remedy=f"use any of: {', '.join(METRICS)}")
        if name == "repetition" and not paragraphs:
            raise UsageError(
                "repetition is a metric of paragraphs", remedy="leave it out, or score paragraphs"
            )


def caption_texts(
    predictions: Mapping[str, Caption],
    references: Mapping[str, Sequence[Caption]],
    *,
    tokenizer: str = "builtin",
    missing: str = "error",
) -> Texts:
    """Tokenise captions; the arguments and errors are those of :func:`score`."""
    check_tokenizer(tokenizer)
    kept = _kept(predictions, references, missing)
    said = [predictions.get(video, "") for video in kept]
    wanted = [caption for captions in kept.values() for caption in captions]
    if tokenizer == "ptb":
        from capvid.metrics import ptb_java

        raw = [caption for caption in (*said, *wanted) if isinstance(caption, str)]
        ready = iter(ptb_java.tokenise(raw))
        tokens = iter([next(ready) if isinstance(c, str) else " ".join(c) for c in (*said, *wanted)])
    else:
        tokens = iter([tokenised(caption, tokenizer=tokenizer) for caption in (*said, *wanted)])
    return Texts(
        predictions={video: next(tokens) for video in kept},
        references={video: [next(tokens) for _ in captions] for video, captions in kept.items()},
    )


def paragraph_texts(
    predictions: Mapping[str, Sequence[str]],
    references: Mapping[str, Sequence[str]],
    *,
    missing: str = "error",
    repetition_of: Collection[str] | None = None,
) -> Texts:
    """Join and split paragraphs as MART does; arguments and errors as for :func:`score_paragraphs`."""
    kept = _kept(predictions, references, missing)
    counted = kept if repetition_of is None else repetition_of
    return Texts(
        predictions={video: paragraph_text(predictions.get(video, ())) for video in kept},
        references={video: [paragraph_text([text]) for text in texts] for video, texts in kept.items()},
        sentences={video: predictions[video] for video in kept if video in predictions and video in counted},
    )


def _kept(
    predictions: Mapping[str, object], references: Mapping[str, Sequence[Any]], missing: str
) -> Mapping[str, Sequence[Any]]:
    """The references of the videos that are scored."""
    if missing not in MISSING:
        raise UsageError(f"no way {missing!r} with missing ones", remedy=f"use one of: {', '.join(MISSING)}")
    check_references(references)
    if missing == "error":
        check_predictions(predictions, references)
    if missing == "skip":
        references = {video: texts for video, texts in references.items() if video in predictions}
        if not references:
            raise DataError("no video of the references has a prediction", remedy="compare the ids of both")
    return references


def paragraph_text(sentences: Sequence[str]) -> str:
    """A paragraph as MART's scripts score it: letters only, lower case, single spaces."""
    joined = "".join(f"{sentence}. " for sentence in sentences)
    return " ".join(re.sub("[^a-zA-Z]", " ", joined).lower().split())


def score_texts(
    texts: Texts,
    *,
    metrics: Collection[str] = CAPTION_METRICS,
    meteor_engine: str = "auto",
    index: ReferenceIndex | None = None,
    meteor_needed: bool = True,
) -> Scores:
    """Score what is tokenised already.

    Args:
        texts: captions and references.
        metrics: any of :data:`METRICS`.
        meteor_engine: as for :func:`score`.
        index: of the references, if there is one already.
        meteor_needed: whether it is an error if METEOR is not installed; otherwise it is left out.

    Raises:
        UsageError: there is no engine of that name.
        MetricError: METEOR is not installed.
    """
    said, wanted = texts.predictions, texts.references
    corpus: dict[str, float] = {}
    per_video: dict[str, dict[str, float]] = {video: {} for video in wanted}
    left_out: dict[str, str] = {}

    def add(name: str, result: tuple[float, Mapping[str, float]]) -> None:
        corpus[name] = result[0]
        for video, value in result[1].items():
            per_video[video][name] = value

    if index is None and {"bleu", "cider"} & set(metrics):
        index = ReferenceIndex(wanted)
    if "bleu" in metrics:
        means, videos = bleu_scores(said, wanted, index)
        for n, mean in enumerate(means):
            add(f"BLEU-{n + 1}", (mean, {video: values[n] for video, values in videos.items()}))
    if "meteor" in metrics:
        try:
            add("METEOR", _meteor(meteor_engine)(said, wanted))
        except CapvidError as error:
            if meteor_needed or isinstance(error, UsageError):
                raise
            left_out["METEOR"] = str(error)
    if "rouge" in metrics:
        add("ROUGE_L", rouge_l(said, wanted))
    if "cider" in metrics:
        add("CIDEr-D", CiderD(wanted, tokenizer="none", index=index).score(said))
    if "repetition" in metrics:
        repeated, each = repetition(texts.sentences)
        for name, value in repeated.items():
            add(name, (value, {video: values[name] for video, values in each.items()}))
    return Scores(corpus=corpus, per_video=per_video, left_out=left_out)


def _meteor(engine: str) -> Any:
    """The function that scores METEOR.

    Raises:
        UsageError: there is no engine of that name.
        MetricError: it is not installed.
    """
    if engine not in ENGINES:
        raise UsageError(f"no METEOR engine {engine!r}", remedy=f"use one of: {', '.join(ENGINES)}")
    try:
        return import_module(ENGINES[engine]).meteor_scores
    except ImportError as error:
        raise MetricError("METEOR is not available", remedy="pip install 'capvid[meteor]'") from error
