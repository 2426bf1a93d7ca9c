"""A captioner's own account of sentences that are there already: log-probabilities and traces.

What a search gives depends, in its last digits, on the videos that are searched for together. So what is
handed out is computed anew for each video by itself.
Notation for tensor shapes: K sentences of one video, L words, V vocabulary, W width of a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from capvid.captioners.base import Captioner, State
from capvid.captioners.layers import at_least_float32
from capvid.decoding.options import Hypothesis
from capvid.text.vocabulary import BOS, EOS


@torch.inference_mode()
def follow(
    captioner: Captioner, state: State, sentences: Sequence[Hypothesis], *, trace: bool
) -> list[Hypothesis]:
    """Say again how probable each of a video's sentences is, word by word.

    Args:
        captioner: that wrote them.
        state: of the one video, before its first word.
        sentences: of the video.
        trace: whether to keep what the captioner attended to as :attr:`Hypothesis.trace`.

    Returns:
        the same sentences in their order, with log-probabilities and traces that depend on the video alone.
    """
    device = next(captioner.parameters()).device
    longest = max(len(sentence.tokens) for sentence in sentences)
    rows = [[*sentence.tokens, *[EOS] * (longest + 1 - len(sentence.tokens))] for sentence in sentences]
    said = torch.tensor(rows, device=device)  # (K, L + 1), ends included
    words = torch.full_like(said[:, 0], BOS)
    state = state.expand(len(sentences))
    logprobs, traces = [], []
    for place in range(longest + 1):
        logits, state, seen = captioner.step(words, state)
        words = said[:, place]
        logits = at_least_float32(logits)
        logprobs.append(logits.gather(1, words.unsqueeze(1)).squeeze(1) - logits.logsumexp(-1))
        traces.append(seen)
    table = torch.stack(logprobs, 1).tolist()
    return [
        replace(
            sentence,
            logprobs=table[row][: len(sentence.tokens) + 1],
            trace=_trace_of(row, traces[: len(sentence.tokens) + 1]) if trace else None,
        )
        for row, sentence in enumerate(sentences)
    ]


def _trace_of(row: int, traces: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The traces (L + 1, W) of one sentence by name; where their width grows, zeros follow."""
    rows = {name: [torch.atleast_1d(seen[name][row]) for seen in traces] for name in traces[0]}
    return {name: pad_sequence(each, batch_first=True).cpu() for name, each in rows.items()}
