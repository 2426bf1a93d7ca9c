"""Ranking by what a sentence says of its own video, beyond what fits any.

The likeliest sentence is often one that is likely of any video. So the sentences c that a search has found
for a video v are ranked by (log p(c | v) - specificity * log p(c | a)) / n ** length_penalty, where n counts
the tokens with the end and a is the average video: one frame with the mean of the training features. That is
the maximum mutual information objective, in its form with an anti-language model, of Li et al., "A
Diversity-Promoting Objective Function for Neural Conversation Models" (NAACL 2016, arXiv:1510.03055), with
p(c | a) for the language model, and used for ranking alone.
Notation for tensor shapes: D feature width, K locations of a feature map, P different beginnings of
sentences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from capvid.captioners.base import Captioner
from capvid.captioners.layers import Standardise, at_least_float32
from capvid.decoding.options import DecodingOptions, Hypothesis
from capvid.errors import UsageError
from capvid.text.vocabulary import BOS, EOS


def check_specificity(captioner: Captioner, options: DecodingOptions) -> None:
    """Check that the sentences of ``captioner`` can be ranked as the options want.

    Raises:
        UsageError: it writes paragraphs, or does not hold the mean of the training features.
    """
    if not options.specificity or options.sampling:
        return
    if captioner.paragraphs or not isinstance(captioner.standardise, Standardise):
        raise UsageError(
            f"specificity = {options.specificity}: expected a captioner of single captions, trained with "
            "standardise = true, which holds the mean of the training features",
            remedy=f"leave specificity at 0 for this {captioner.name}",
        )


def by_specificity(
    captioner: Captioner, found: Sequence[Sequence[Hypothesis]], options: DecodingOptions
) -> list[list[Hypothesis]]:
    """Rank each video's hypotheses anew and keep the best ``num_captions``.

    Args:
        captioner: that wrote them; one that :func:`check_specificity` accepts.
        found: all hypotheses of each video.
        options: of the decoding.

    Returns:
        for each video its hypotheses, best first, each with its new score; of equal ones, in their order.
    """
    mean = captioner.standardise.mean
    assert isinstance(mean, Tensor)
    distinct = list(dict.fromkeys(tuple(hypothesis.tokens) for hypothesis in chain.from_iterable(found)))
    average = dict(zip(distinct, average_logprobs(captioner, mean, distinct), strict=True))

    def scored(hypothesis: Hypothesis) -> Hypothesis:
        specific = hypothesis.logprob - options.specificity * average[tuple(hypothesis.tokens)]
        return replace(hypothesis, score=specific / len(hypothesis.logprobs) ** options.length_penalty)

    return [
        sorted(map(scored, hypotheses), key=lambda hypothesis: -hypothesis.score)[: options.num_captions]
        for hypotheses in found
    ]


@torch.inference_mode()
def average_logprobs(captioner: Captioner, mean: Tensor, sentences: Sequence[Sequence[int]]) -> list[float]:
    """Log-probability of each sentence, its end included, were the video the average one.

    What follows the same beginning is computed once. In their last digits they depend on the sentences that
    are given together.

    Args:
        captioner: of single captions.
        mean: (D,) of the features; of a feature map, at every location.
        sentences: word numbers of each, without start and end.
    """
    captioner.eval()
    state = captioner.encode(*_average_video(mean, captioner.config.locations))
    totals, going = [0.0] * len(sentences), list(range(len(sentences)))
    rows = [0] * len(sentences)  # of each sentence that of its words so far
    words = [BOS]  # of each row the last word
    while going:
        logits, state, _ = captioner.step(torch.tensor(words, device=mean.device), state)
        following = [(*sentences[number], EOS)[state.words - 1] for number in going]
        found = _logprobs(logits, [rows[number] for number in going], following)
        beginnings: dict[tuple[int, int], int] = {}
        still = []
        for number, word, logprob in zip(going, following, found, strict=True):
            totals[number] += logprob
            if state.words <= len(sentences[number]):
                rows[number] = beginnings.setdefault((rows[number], word), len(beginnings))
                still.append(number)
        going, words = still, [word for _, word in beginnings]
        state = state.reorder(torch.tensor([row for row, _ in beginnings], device=mean.device).long())
    return totals


def _average_video(mean: Tensor, locations: int) -> tuple[Tensor, Tensor]:
    """Features (1, 1, D), or a map (1, 1, K, D), and mask (1, 1) of one frame that is the mean (D,)."""
    frame = mean.view(1, 1, -1)
    if locations:
        frame = frame.unsqueeze(2).expand(-1, -1, locations, -1)
    return frame, torch.ones(1, 1, dtype=torch.bool, device=mean.device)


def _logprobs(logits: Tensor, rows: Sequence[int], words: Sequence[int]) -> list[float]:
    """Log-probability of each of ``words`` by its row of ``logits`` (P, V)."""
    logits = at_least_float32(logits)
    row_of, word_of = torch.tensor([rows, words], device=logits.device)
    found: list[float] = (logits[row_of, word_of] - logits.logsumexp(-1)[row_of]).tolist()
    return found
