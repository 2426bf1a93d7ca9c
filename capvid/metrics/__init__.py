"""Scores of captions, as the papers report them: BLEU, ROUGE_L and CIDEr-D, and R@n of paragraphs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from capvid.errors import UsageError
from capvid.metrics.bleu import bleu_scores
from capvid.metrics.cider import CiderD
from capvid.metrics.ngrams import Caption, check_predictions, check_references, tokenised
from capvid.metrics.repetition import repetition
from capvid.metrics.rouge import rouge_l

__all__ = ["METRICS", "CiderD", "Scores", "paragraph_text", "score", "score_paragraphs"]

METRICS = ("bleu", "rouge", "cider")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores by name: BLEU-1 to BLEU-4 and ROUGE_L from 0 to 1, CIDEr-D from 0 to 10."""

    corpus: dict[str, float]
    per_video: dict[str, dict[str, float]]


def score(
    predictions: Mapping[str, Caption],
    references: Mapping[str, Sequence[Caption]],
    *,
    metrics: Collection[str] = METRICS,
    tokenizer: str = "builtin",
) -> Scores:
    """Score one caption for each video against its references.

    Args:
        predictions: a caption, text or list of tokens, for every video of the references; captions of other
            videos are left out of account.
        references: for each video its reference captions.
        metrics: any of ``bleu``, ``rouge`` and ``cider``.
        tokenizer: ``builtin``, or ``none`` for texts whose tokens are separated by single spaces already.

    Raises:
        DataError: a video has no prediction or no reference; the message names it.
        UsageError: there is no metric, or no tokenizer, of that name.
    """
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise UsageError(f"no metric named {unknown[0]!r}", remedy=f"use any of: {', '.join(METRICS)}")
    check_references(references)
    check_predictions(predictions, references)
    predicted = {video: tokenised(predictions[video], tokenizer=tokenizer) for video in references}
    wanted = {
        video: [tokenised(caption, tokenizer=tokenizer) for caption in captions]
        for video, captions in references.items()
    }
    corpus: dict[str, float] = {}
    per_video: dict[str, dict[str, float]] = {video: {} for video in references}
    if "bleu" in metrics:
        means, videos = bleu_scores(predicted, wanted)
        corpus |= _named_bleu(means)
        for video, values in videos.items():
            per_video[video] |= _named_bleu(values)
    if "rouge" in metrics:
        corpus["ROUGE_L"], rouges = rouge_l(predicted, wanted)
        for video, value in rouges.items():
            per_video[video]["ROUGE_L"] = value
    if "cider" in metrics:
        corpus["CIDEr-D"], ciders = CiderD(wanted, tokenizer="none").score(predicted)
        for video, value in ciders.items():
            per_video[video]["CIDEr-D"] = value
    return Scores(corpus=corpus, per_video=per_video)


def _named_bleu(values: Sequence[float]) -> dict[str, float]:
    return {f"BLEU-{n}": value for n, value in enumerate(values, start=1)}


def paragraph_text(sentences: Sequence[str]) -> str:
    """A paragraph as MART's scripts score it: letters only, lower case, single spaces."""
    joined = "".join(f"{sentence}. " for sentence in sentences)
    return " ".join(re.sub("[^a-zA-Z]", " ", joined).lower().split())


def score_paragraphs(
    predictions: Mapping[str, Sequence[str]], references: Mapping[str, Sequence[str]]
) -> Scores:
    """Score a paragraph for each video as MART does: its sentences joined, and R@1 to R@4 over its sentences.

    Args:
        predictions: the sentences of a paragraph for every video of the references.
        references: for each video its reference paragraphs, as texts.

    Raises:
        DataError: a video has no prediction or no reference; the message names it.
    """
    wanted = {video: [paragraph_text([text]) for text in texts] for video, texts in references.items()}
    said = {video: paragraph_text(sentences) for video, sentences in predictions.items()}
    found = score(said, wanted, tokenizer="none")
    means, videos = repetition({video: predictions[video] for video in references})
    for video, values in videos.items():
        found.per_video[video].update(values)
    found.corpus.update(means)
    return found
