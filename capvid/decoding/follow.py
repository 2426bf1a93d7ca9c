"""A captioner's own account of sentences that are there already: log-probabilities and traces.

What a search gives depends, in its last digits, on the videos that are searched for together. So what is
handed out is computed anew, in double precision (:func:`in_double`), and rounded to single, where what a
batch changes is lost.
Notation for tensor shapes: B videos, K sentences of each, L words, V vocabulary, Z what the vocabulary layer
sees, W width of a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from capvid.captioners.base import Captioner, Carried, ParagraphCaptioner, State
from capvid.captioners.layers import at_least_float32
from capvid.decoding.options import Hypothesis
from capvid.text.vocabulary import BOS, EOS

MOST_WEIGHTS = 100_000_000  # of a captioner that is held twice
SENTENCES = 32  # whose logits are held at once


def in_double(captioner: Captioner, device: torch.device) -> Captioner | None:
    """A copy of ``captioner`` in double precision, or None if it is too large or the ``device`` has none."""
    if device.type == "mps" or sum(part.numel() for part in captioner.parameters()) > MOST_WEIGHTS:
        return None
    return deepcopy(captioner).double()


@torch.inference_mode()
def follow(
    captioner: Captioner,
    features: Tensor,
    mask: Tensor,
    sentences: Sequence[Sequence[Hypothesis]],
    *,
    carried: Carried | None = None,
    trace: bool = False,
) -> list[list[Hypothesis]]:
    """Say again how probable the sentences of each video are, word by word.

    Args:
        captioner: that wrote them.
        features: of the videos, or of a segment of each, (B, T, D), or maps (B, T, L, D).
        mask: (B, T) of real frames.
        sentences: of each video, at least one.
        carried: what the segments before these left, for captioners of paragraphs.
        trace: whether to keep what the captioner attended to as :attr:`Hypothesis.trace`.

    Returns:
        the same sentences in their order, with log-probabilities and traces as precise as the captioner.
    """
    features = features.to(next(captioner.parameters()).dtype)
    most = max(map(len, sentences))
    # As many of each video: the last one stands for those that are not there.
    every = list(chain.from_iterable([*each, *[each[-1]] * (most - len(each))] for each in sentences))
    said = [torch.tensor([BOS, *sentence.tokens, EOS], device=features.device) for sentence in every]
    tokens = pad_sequence(said, batch_first=True)  # (B K, L + 2)
    before, after = tokens[:, :-1], tokens[:, 1:]
    hidden = _hidden(captioner, features, mask, before, carried)
    parts = zip(hidden.split(SENTENCES), after.split(SENTENCES), strict=True)
    found = torch.cat([_logprobs(captioner, *part) for part in parts]).tolist()
    traces = _traces(captioner, _state(captioner, features, mask, carried), before) if trace else []

    frames = mask.sum(1).tolist()

    def followed(video: int, rank: int, sentence: Hypothesis) -> Hypothesis:
        row, end = video * most + rank, len(sentence.tokens) + 1
        seen = _trace_of(row, traces[:end], frames[video]) if trace else None
        return replace(sentence, logprobs=found[row][:end], trace=seen)

    return [
        [followed(video, rank, sentence) for rank, sentence in enumerate(each)]
        for video, each in enumerate(sentences)
    ]


def _logprobs(captioner: Captioner, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability (N, L) of each of ``tokens`` (N, L) after ``hidden`` (N, L, Z)."""
    logits = at_least_float32(captioner.logits(hidden))
    return logits.gather(2, tokens.unsqueeze(2)).squeeze(2) - logits.logsumexp(-1)


def _hidden(
    captioner: Captioner, features: Tensor, mask: Tensor, tokens: Tensor, carried: Carried | None
) -> Tensor:
    """What the vocabulary layer sees (B K, L + 1, Z) after each of ``tokens`` (B K, L + 1)."""
    if isinstance(captioner, ParagraphCaptioner):
        state = captioner.encode(features, mask, carried)
        return captioner.read(state.repeat(len(tokens) // len(features)), tokens)[0]
    return captioner.teacher_forced(features, mask, tokens)


def _state(captioner: Captioner, features: Tensor, mask: Tensor, carried: Carried | None) -> State:
    """The state of the videos, or of a segment of each, before the first word."""
    if isinstance(captioner, ParagraphCaptioner):
        return captioner.encode(features, mask, carried)
    return captioner.encode(features, mask)


def _traces(captioner: Captioner, state: State, tokens: Tensor) -> list[dict[str, Tensor]]:
    """The trace of every step while ``tokens`` (B K, L + 1) are read."""
    state = state.expand(len(tokens) // len(next(iter(state.video.values()))))
    traces = []
    for words in tokens.unbind(1):
        _, state, trace = captioner.step(words, state)
        traces.append(trace)
    return traces


def _trace_of(row: int, traces: Sequence[dict[str, Tensor]], frames: int) -> dict[str, Tensor]:
    """The traces (L + 1, W) of one sentence by name; where their width grows, zeros follow.

    Attention is to the real ``frames`` of its video.
    """
    rows = {name: [torch.atleast_1d(seen[name][row]) for seen in traces] for name in traces[0]}
    if "attention" in rows:
        rows["attention"] = [seen[:frames] for seen in rows["attention"]]
    return {name: pad_sequence(each, batch_first=True).cpu() for name, each in rows.items()}
