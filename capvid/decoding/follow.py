"""A captioner's own account of sentences that are there already: log-probabilities and traces.

What a search gives depends, in its last digits, on the videos that are searched for together. So what is
handed out is computed anew for each video by itself.
Notation for tensor shapes: K sentences of one video, L words, V vocabulary, Z what the vocabulary layer sees,
W width of a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from capvid.captioners.base import Captioner, Carried, ParagraphCaptioner, State
from capvid.captioners.layers import at_least_float32
from capvid.decoding.options import Hypothesis
from capvid.text.vocabulary import BOS, EOS


@torch.inference_mode()
def follow(
    captioner: Captioner,
    features: Tensor,
    mask: Tensor,
    sentences: Sequence[Hypothesis],
    *,
    carried: Carried | None = None,
    trace: bool = False,
) -> list[Hypothesis]:
    """Say again how probable each of a video's sentences is, word by word.

    Args:
        captioner: that wrote them.
        features: of the one video, or segment, (1, T, D), or maps (1, T, L, D).
        mask: (1, T) of real frames.
        sentences: of the video.
        carried: what the segments before it left, for captioners of paragraphs.
        trace: whether to keep what the captioner attended to as :attr:`Hypothesis.trace`.

    Returns:
        the same sentences in their order, with log-probabilities and traces that depend on the video alone.
    """
    said = [torch.tensor([BOS, *sentence.tokens, EOS], device=features.device) for sentence in sentences]
    tokens = pad_sequence(said, batch_first=True)  # (K, L + 2)
    logits = at_least_float32(captioner.logits(_hidden(captioner, features, mask, tokens[:, :-1], carried)))
    found = logits.gather(2, tokens[:, 1:, None]).squeeze(2) - logits.logsumexp(-1)  # (K, L + 1)
    traces = _traces(captioner, _state(captioner, features, mask, carried), tokens[:, :-1]) if trace else []
    return [
        replace(
            sentence,
            logprobs=logprobs[: len(sentence.tokens) + 1],
            trace=_trace_of(row, traces[: len(sentence.tokens) + 1]) if trace else None,
        )
        for row, (sentence, logprobs) in enumerate(zip(sentences, found.tolist(), strict=True))
    ]


def _hidden(
    captioner: Captioner, features: Tensor, mask: Tensor, tokens: Tensor, carried: Carried | None
) -> Tensor:
    """What the vocabulary layer sees (K, L + 1, Z) after each of ``tokens`` (K, L + 1)."""
    if isinstance(captioner, ParagraphCaptioner):
        return captioner.read(captioner.encode(features, mask, carried).repeat(len(tokens)), tokens)[0]
    return captioner.teacher_forced(features, mask, tokens)


def _state(captioner: Captioner, features: Tensor, mask: Tensor, carried: Carried | None) -> State:
    """The state of one video, or segment, before its first word."""
    if isinstance(captioner, ParagraphCaptioner):
        return captioner.encode(features, mask, carried)
    return captioner.encode(features, mask)


def _traces(captioner: Captioner, state: State, tokens: Tensor) -> list[dict[str, Tensor]]:
    """The trace of every step while ``tokens`` (K, L + 1) are read."""
    state = state.expand(len(tokens))
    traces = []
    for words in tokens.unbind(1):
        _, state, trace = captioner.step(words, state)
        traces.append(trace)
    return traces


def _trace_of(row: int, traces: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The traces (L + 1, W) of one sentence by name; where their width grows, zeros follow."""
    rows = {name: [torch.atleast_1d(seen[name][row]) for seen in traces] for name in traces[0]}
    return {name: pad_sequence(each, batch_first=True).cpu() for name, each in rows.items()}
