"""Greedy and beam search over any captioner.

Notation for tensor shapes: B videos, K beams, V vocabulary, L words so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capvid.captioners.base import Captioner
from capvid.errors import UsageError
from capvid.text.vocabulary import BOS, EOS, PAD, UNK

IMPOSSIBLE = float("-inf")


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How sentences are searched for.

    Attributes:
        beam_size: beams per video; 1 is greedy search.
        max_length: words at most, the end token not counted.
        length_penalty: a hypothesis of n tokens (end included) ranks by its log-probability / n ** this.
        num_captions: hypotheses returned per video, best first; at most ``beam_size``.
    """

    beam_size: int = 5
    max_length: int = 20
    length_penalty: float = 1.0
    num_captions: int = 1

    def __post_init__(self) -> None:
        if self.beam_size < 1 or self.max_length < 1:
            raise UsageError("beam size and maximum length must be at least 1")
        if not 1 <= self.num_captions <= self.beam_size:
            raise UsageError(
                f"{self.num_captions} captions cannot come from {self.beam_size} beams",
                remedy=f"choose 1 to {self.beam_size} captions or more beams",
            )


@dataclass(frozen=True)
class Hypothesis:
    """One caption of one video.

    Attributes:
        tokens: word numbers, without start and end.
        logprobs: natural log-probability of each token and, last, of the end.
        score: what hypotheses are ranked by: their sum, normalised by length.
    """

    tokens: list[int]
    logprobs: list[float]
    score: float

    @property
    def logprob(self) -> float:
        """Log-probability of the whole caption, its end included."""
        return sum(self.logprobs)


@torch.inference_mode()
def decode(
    captioner: Captioner, features: Tensor, mask: Tensor, options: DecodingOptions
) -> list[list[Hypothesis]]:
    """Caption ``features`` (B, T, D) with ``mask`` (B, T): for each video its hypotheses, best first."""
    captioner.eval()
    return _BeamSearch(captioner, features, mask, options).run()


def next_word_logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities (..., V) from logits; padding, start and unknown are never said."""
    never = torch.tensor([PAD, BOS, UNK], device=logits.device)
    return logits.float().log_softmax(-1).index_fill(-1, never, IMPOSSIBLE)


class _BeamSearch:
    """State of one search. Videos that are done leave the batch, so that they cost nothing."""

    def __init__(
        self, captioner: Captioner, features: Tensor, mask: Tensor, options: DecodingOptions
    ) -> None:
        self.captioner = captioner
        self.options = options
        self.beams = options.beam_size
        self.videos = features.shape[0]
        self.finished: list[list[Hypothesis]] = [[] for _ in range(self.videos)]
        self.state = captioner.encode(features, mask).expand(self.beams)
        device = features.device
        self.active = torch.arange(self.videos, device=device)  # (B,) which video each group of beams is of
        self.tokens = torch.full((self.videos, self.beams, 1), BOS, device=device)  # (B, K, 1 + L)
        self.logprobs = torch.zeros(self.videos, self.beams, 0, device=device)  # (B, K, L)
        self.totals = torch.full((self.videos, self.beams), IMPOSSIBLE, device=device)  # (B, K)
        self.totals[:, 0] = 0.0  # all beams are equal at first: one of them counts

    def run(self) -> list[list[Hypothesis]]:
        for length in range(self.options.max_length + 1):
            self._extend(last=length == self.options.max_length)
            if not len(self.active):
                break
        count = self.options.num_captions
        return [sorted(found, key=lambda h: -h.score)[:count] for found in self.finished]

    def _extend(self, *, last: bool) -> None:
        """Add one word to every beam; ``last`` leaves nothing but the end to say."""
        videos, beams = self.totals.shape
        logits, state, _ = self.captioner.step(self.tokens[:, :, -1].reshape(-1), self.state)
        logprobs = next_word_logprobs(logits).view(videos, beams, -1)  # (B, K, V)
        if last:
            ends = logprobs[..., EOS].clone()
            logprobs.fill_(IMPOSSIBLE)
            logprobs[..., EOS] = ends
        vocabulary = logprobs.shape[-1]
        candidates = (self.totals.unsqueeze(-1) + logprobs).view(videos, -1)
        # Of 2 K candidates at most K end a sentence, so at least K go on.
        totals, chosen = candidates.topk(min(2 * beams, candidates.shape[1]), dim=-1)  # (B, 2 K)
        source = chosen // vocabulary
        words = chosen % vocabulary
        steps = logprobs.view(videos, -1).gather(1, chosen)
        self._collect(totals, source, words, steps)

        going = torch.where(words == EOS, IMPOSSIBLE, totals)
        order = going.sort(dim=-1, descending=True, stable=True).indices[:, :beams]  # (B, K)
        source, words = source.gather(1, order), words.gather(1, order)
        self.totals = going.gather(1, order)
        rows = source.unsqueeze(-1)
        self.tokens = torch.cat(
            [self.tokens.gather(1, rows.expand(-1, -1, self.tokens.shape[2])), words.unsqueeze(-1)], -1
        )
        past = self.logprobs.gather(1, rows.expand(-1, -1, self.logprobs.shape[2]))
        self.logprobs = torch.cat([past, steps.gather(1, order).unsqueeze(-1)], -1)
        flat = (torch.arange(videos, device=rows.device).unsqueeze(-1) * beams + source).view(-1)
        self.state = state.reorder(flat)
        self._leave()

    def _collect(self, totals: Tensor, source: Tensor, words: Tensor, steps: Tensor) -> None:
        """Take the sentences that end among the best K candidates."""
        ended = (words[:, : self.beams] == EOS) & totals[:, : self.beams].isfinite()
        if not ended.any():
            return
        for row, rank in ended.nonzero().tolist():
            beam = int(source[row, rank])
            tokens = self.tokens[row, beam, 1:].tolist()
            logprobs = [*self.logprobs[row, beam].tolist(), float(steps[row, rank])]
            score = float(totals[row, rank]) / len(logprobs) ** self.options.length_penalty
            self.finished[int(self.active[row])].append(Hypothesis(tokens, logprobs, score))

    def _leave(self) -> None:
        """Drop the videos that have as many captions as beams, or no beam that goes on."""
        on = [
            row
            for row, (video, best) in enumerate(
                zip(self.active.tolist(), self.totals[:, 0].tolist(), strict=True)
            )
            if len(self.finished[video]) < self.beams and best > IMPOSSIBLE
        ]
        if len(on) == len(self.active):
            return
        rows = torch.tensor(on, dtype=torch.long, device=self.active.device)
        self.active, self.totals = self.active[rows], self.totals[rows]
        self.tokens, self.logprobs = self.tokens[rows], self.logprobs[rows]
        beams = torch.arange(self.beams, device=rows.device)
        self.state = self.state.select((rows.unsqueeze(-1) * self.beams + beams).view(-1))


def pad_frames(clips: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Clips of (T_i, D) frames -> features (B, T, D) padded with zeros, and mask (B, T) of real frames."""
    features = torch.nn.utils.rnn.pad_sequence(list(clips), batch_first=True)
    lengths = torch.tensor([len(clip) for clip in clips], device=features.device)
    mask = torch.arange(features.shape[1], device=features.device) < lengths.unsqueeze(-1)
    return features, mask
