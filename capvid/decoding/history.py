"""What a search has chosen, word by word, and the sentences read off it at the end.

Nothing is copied while words are added: every word keeps the number of the beam that it continues, and a
sentence is found by following these numbers backwards.
Notation for tensor shapes: N videos, B of them still searched, K beams, E ends, L steps, H hypotheses a
video, W width of a trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from capvid.captioners.base import Trace
from capvid.decoding.choice import IMPOSSIBLE, Choice
from capvid.decoding.options import DecodingOptions, Hypothesis
from capvid.text.vocabulary import PAD


@dataclass(frozen=True)
class _Step:
    rows: Tensor  # (B,) numbers of the videos
    choice: Choice
    trace: Trace  # (B * beams before the word, ...)


class History:
    """The steps of one search over N ``videos``."""

    def __init__(self, videos: int, options: DecodingOptions) -> None:
        self.videos = videos
        self.options = options
        self.steps: list[_Step] = []

    def add(self, rows: Tensor, choice: Choice, trace: Trace) -> None:
        """Record what was chosen for the videos number ``rows`` (B,)."""
        self.steps.append(_Step(rows, choice, trace if self.options.trace else {}))

    def hypotheses(self, count: int) -> list[list[Hypothesis]]:
        """At most ``count`` sentences of each video, best first; of equal ones the shorter."""
        totals = self._table("end_totals", IMPOSSIBLE)  # (L, N, E)
        tokens_of = torch.arange(1, len(totals) + 1, device=totals.device).view(-1, 1, 1)
        scores = (totals / tokens_of**self.options.length_penalty).transpose(0, 1).flatten(1)  # (N, L E)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        scores, order = scores[:, :count], order[:, :count]  # (N, H)
        ends = order // totals.shape[2]  # (N, H) the step that said the end

        def chosen(name: str) -> Tensor:
            return self._table(name, 0).transpose(0, 1).flatten(1).gather(1, order)

        beams, tokens, logprobs = self._backwards(ends, chosen("end_source"))
        logprobs.scatter_(2, ends.unsqueeze(-1), chosen("end_logprobs").unsqueeze(-1))
        traces = self._traces(ends, beams) if self.options.trace else None
        return _objects(scores, ends, tokens, logprobs, traces)

    def _table(self, name: str, missing: float) -> Tensor:
        """A part of all choices (L, N, K or E); ``missing`` where a video was done or has fewer beams."""
        parts = [getattr(step.choice, name) for step in self.steps]
        width = max(part.shape[1] for part in parts)
        if all(part.shape == (self.videos, width) for part in parts):
            return torch.stack(parts)
        table = parts[0].new_full((len(parts), self.videos, width), missing)
        for place, (step, part) in enumerate(zip(self.steps, parts, strict=True)):
            table[place, step.rows, : part.shape[1]] = part
        return table

    def _backwards(self, ends: Tensor, beams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Follow the hypotheses that end at steps ``ends`` (N, H) in ``beams`` (N, H).

        Returns:
            the beam that each step started from, the tokens and their log-probabilities, each (N, H, L).
        """
        sources, words = self._table("source", 0), self._table("words", PAD)
        steps = self._table("logprobs", 0.0)
        started, tokens, logprobs = [beams], [], []
        for place in reversed(range(len(self.steps))):
            said = ends > place
            tokens.append(words[place].gather(1, beams).where(said, PAD))
            logprobs.append(steps[place].gather(1, beams).where(said, 0.0))
            beams = sources[place].gather(1, beams).where(said, beams)
            started.append(beams)
        beams_then, tokens, logprobs = (list(reversed(parts)) for parts in (started, tokens, logprobs))
        return torch.stack(beams_then[:-1], -1), torch.stack(tokens, -1), torch.stack(logprobs, -1)

    def _traces(self, ends: Tensor, beams: Tensor) -> Trace:
        """The trace of every step of every hypothesis by name, (N, H, L, W), padded with zeros."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.steps[0].trace}
        position = torch.zeros(self.videos, dtype=torch.long, device=ends.device)
        for place, step in enumerate(self.steps):
            position[step.rows] = torch.arange(len(step.rows), device=ends.device)
            said = ends >= place  # (N, H)
            for name, tensor in step.trace.items():
                row = position.unsqueeze(-1) * (len(tensor) // len(step.rows)) + beams[..., place]
                rows = tensor.index_select(0, row.where(said, 0).flatten()).unflatten(0, ends.shape)
                found[name].append(rows)
        return {name: torch.stack(_same_width(parts), 2).cpu() for name, parts in found.items()}


def _same_width(parts: list[Tensor]) -> list[Tensor]:
    """Tensors padded with zeros at their ends to one shape."""
    widest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    return [
        F.pad(
            part,
            [
                amount
                for size, most in zip(reversed(part.shape), reversed(widest), strict=True)
                for amount in (0, most - size)
            ],
        )
        for part in parts
    ]


def _objects(
    scores: Tensor, ends: Tensor, tokens: Tensor, logprobs: Tensor, traces: Trace | None
) -> list[list[Hypothesis]]:
    """Python objects of scores and ends (N, H), tokens and log-probabilities (N, H, L), traces."""
    said, probable, lengths = tokens.tolist(), logprobs.tolist(), ends.tolist()
    return [
        [
            Hypothesis(
                said[video][rank][: lengths[video][rank]],
                probable[video][rank][: lengths[video][rank] + 1],
                score,
                None
                if traces is None
                else {n: t[video, rank, : lengths[video][rank] + 1].clone() for n, t in traces.items()},
            )
            for rank, score in enumerate(ranked)
            if score > IMPOSSIBLE
        ]
        for video, ranked in enumerate(scores.tolist())
    ]
