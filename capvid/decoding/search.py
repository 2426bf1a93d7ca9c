"""From a captioner to sentences: one loop for greedy search, beam search and sampling.

The first word is asked for once per video, not once per beam. Videos that are done leave the batch, so that
they cost nothing. Sentences become Python objects at the end (:mod:`capvid.decoding.history`).
Notation for tensor shapes: B videos, K beams, V vocabulary, L words so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capvid.captioners.base import Captioner, State
from capvid.decoding.choice import IMPOSSIBLE, BestOfBeams, Chooser, Outlook
from capvid.decoding.constraints import Repetition
from capvid.decoding.history import History
from capvid.decoding.options import DecodingOptions, Hypothesis
from capvid.decoding.sampling import Drawn
from capvid.decoding.specificity import by_specificity, check_specificity
from capvid.errors import CapvidError
from capvid.text.vocabulary import BOS

__all__ = ["decode", "sentences"]


@torch.inference_mode()
def decode(
    captioner: Captioner, features: Tensor, mask: Tensor, options: DecodingOptions
) -> list[list[Hypothesis]]:
    """Caption ``features`` (B, T, D) with ``mask`` (B, T): for each video its hypotheses, best first.

    A video is one segment for captioners that write paragraphs.

    Raises:
        CapvidError: probabilities that are no numbers.
        UsageError: a specificity that the captioner cannot rank by.
    """
    captioner.eval()
    if not len(features):
        return []
    return sentences(captioner, captioner.encode(features, mask), len(features), options)


def sentences(
    captioner: Captioner, state: State, videos: int, options: DecodingOptions
) -> list[list[Hypothesis]]:
    """Hypotheses, best first, of as many ``videos`` as ``state`` is of, which is before its first word."""
    device = next(captioner.parameters()).device
    if not options.sampling:
        check_specificity(captioner, options)
        search = _Search(captioner, state, videos, BestOfBeams(options.beam_size), options)
        if not options.specificity or options.beam_size == 1:
            return search.run(options.num_captions)
        most = 2 * options.beam_size  # fewer than one beam's width before the last place, and as many there
        return by_specificity(captioner, search.run(most), options)
    samples = options.num_captions
    draw = Drawn(options, videos=videos, device=device)
    flat = _Search(captioner, state.repeat(samples), videos * samples, draw, options).run(1)
    drawn = [
        [found for sample in flat[first : first + samples] for found in sample]
        for first in range(0, len(flat), samples)
    ]
    return [sorted(found, key=lambda hypothesis: -hypothesis.score) for found in drawn]


class _Search:
    """One search. ``rows`` are the numbers of the videos that are not done yet."""

    def __init__(
        self, captioner: Captioner, state: State, videos: int, chooser: Chooser, options: DecodingOptions
    ) -> None:
        self.captioner = captioner
        self.options = options
        self.chooser = chooser
        self.history = History(videos, options)
        self.state = state
        device = next(captioner.parameters()).device
        self.rows = torch.arange(videos, device=device)  # (B,)
        self.words = torch.full((videos, 1), BOS, device=device)  # (B, K)
        self.totals = torch.zeros(videos, 1, device=device)  # (B, K)
        self.found = torch.zeros(videos, dtype=torch.long, device=device)  # (B,) sentences that ended
        self.repetition = Repetition(captioner, options)
        self.said = self.words.new_empty(videos, 1, 0)  # (B, K, L), kept only if repetition matters

    def run(self, count: int) -> list[list[Hypothesis]]:
        """At most ``count`` hypotheses of each video, best first."""
        for place in range(self.options.max_length + 1):
            self._extend(place)
            if not len(self.rows):
                break
        found = self.history.hypotheses(count)
        if not all(found):
            raise CapvidError(
                "the captioner's probabilities are no numbers",
                remedy="see whether its weights or the features have infinite values",
            )
        return found

    def _extend(self, place: int) -> None:
        """Add word number ``place`` to every beam."""
        options = self.options
        logits, self.state, trace = self.captioner.step(self.words.flatten(), self.state)
        banned = self.repetition.banned(self.said.flatten(0, 1)) if self.repetition else None
        outlook = Outlook.of(
            logits,
            self.totals,
            banned=banned,
            may_end=place >= options.min_length,
            may_go_on=place < options.max_length,
        )
        choice = self.chooser(outlook, place=place, rows=self.rows)
        self.history.add(self.rows, choice, trace)
        if not outlook.may_go_on:
            self.rows = self.rows[:0]
            return
        beams = self.totals.shape[1]
        self.words, self.totals = choice.words, choice.totals
        self.found += (choice.end_totals > IMPOSSIBLE).sum(-1)
        if self.repetition:
            past = self.said.gather(1, choice.source.unsqueeze(-1).expand(-1, -1, place))
            self.said = torch.cat([past, choice.words.unsqueeze(-1)], -1)
        self._follow(choice.source, beams)

    def _follow(self, source: Tensor, beams: int) -> None:
        """Continue from the beams ``source`` (B, K) of ``beams``; drop the videos that are done.

        A video is done when as many sentences as beams have ended, or when no beam goes on.
        """
        going = (self.found < self.chooser.width) & (self.totals > IMPOSSIBLE).any(-1)
        kept = going.nonzero().squeeze(-1)
        if not len(kept):
            self.rows = kept
            return
        if len(kept) == len(going) and source.shape[1] == beams == 1:
            return  # every beam continues itself
        flat = torch.arange(len(source), device=source.device).unsqueeze(-1) * beams + source
        if len(kept) < len(going):
            self.rows, self.words, self.totals = self.rows[kept], self.words[kept], self.totals[kept]
            self.found, self.said = self.found[kept], self.said[kept]
            self.state = self.state.select(kept, flat[kept].flatten())
        else:
            self.state = self.state.reorder(flat.flatten())
