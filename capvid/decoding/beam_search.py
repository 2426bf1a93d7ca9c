"""Beam search, greedy search and sampling in one loop, for single captions and paragraphs.

Notation for tensor shapes: N videos, B videos that are not finished, K beams, L words, H hypotheses of a
video; T frames, D feature width, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from capvid.captioners.base import Captioner, Carried, ParagraphCaptioner, State, trim
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.decoding.rescoring import check_specificity, rank_by_specificity
from capvid.decoding.token_selection import (
    IMPOSSIBLE,
    BeamSelector,
    NextTokens,
    Sampler,
    Selection,
    repeated_words,
)
from capvid.errors import CapvidError, UsageError
from capvid.text.vocabulary import BOS, PAD


@torch.inference_mode()
def decode(
    captioner: Captioner, features: Tensor, mask: Tensor, options: DecodingOptions
) -> list[list[Hypothesis]]:
    """Caption ``features`` (N, T, D) with ``mask`` (N, T): return each video's hypotheses, best first.

    A video is one segment for captioners that write paragraphs.

    Raises:
        CapvidError: the captioner's probabilities are NaN.
        UsageError: a specificity that the captioner cannot rank by.
    """
    captioner.eval()
    if not len(features):
        return []
    return _decode_from(captioner, captioner.encode(features, mask), len(features), options)


@torch.inference_mode()
def decode_paragraphs(
    captioner: ParagraphCaptioner, features: Tensor, mask: Tensor, segments: Tensor, options: DecodingOptions
) -> list[list[list[Hypothesis]]]:
    """Caption every segment of every video, knowing the best captions of the segments before it.

    Videos with fewer segments leave the batch; no caption depends on the other videos.

    Args:
        captioner: paragraph captioner.
        features: (N, S, T, D), or maps (N, S, T, L, D).
        mask: (N, S, T) of real frames.
        segments: (N,) number of real segments of each video.
        options: decoding options.

    Returns:
        hypotheses, best first, by video and segment.
    """
    captioner.eval()
    counts = segments.tolist()
    if not captioner.recurrent:
        real = torch.arange(features.shape[1], device=mask.device) < segments.to(mask.device).unsqueeze(-1)
        decoded = iter(decode(captioner, features[real], mask[real], options))
        return [[next(decoded) for _ in range(count)] for count in counts]
    paragraphs: list[list[list[Hypothesis]]] = [[] for _ in counts]
    rows = [video for video, count in enumerate(counts) if count]
    carried: Carried | None = None
    for segment in range(max(counts, default=0)):
        videos = torch.tensor(rows, device=features.device)
        state = captioner.encode(*trim(features[videos, segment], mask[videos, segment]), carried)
        captions = _decode_from(captioner, state, len(rows), options)
        for video, hypotheses in zip(rows, captions, strict=True):
            paragraphs[video].append(hypotheses)
        active = [number for number, video in enumerate(rows) if counts[video] > segment + 1]
        if not active:
            break
        best = as_tokens([hypotheses[0].tokens for hypotheses in captions], features.device)
        carried = captioner.remember(state, best)
        if len(active) < len(rows):
            index = torch.tensor(active, device=features.device)
            carried = {name: tensor.index_select(0, index) for name, tensor in carried.items()}
        rows = [rows[number] for number in active]
    return paragraphs


def as_tokens(captions: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return captions as tokens (N, L) from the start token on, padded with 0."""
    rows = [torch.tensor([BOS, *caption]) for caption in captions]
    return pad_sequence(rows, batch_first=True).to(device)


def _decode_from(
    captioner: Captioner, state: State, videos: int, options: DecodingOptions
) -> list[list[Hypothesis]]:
    """Return each video's hypotheses, best first, decoding from the initial ``state``."""
    if not options.temperature:
        selector = BeamSelector(options.beam_size)
        if options.specificity:
            check_specificity(captioner, options)
        if not options.specificity or options.beam_size == 1:
            return _search(captioner, state, videos, selector, options, options.num_captions)
        # Fewer sentences than beams end before the last position, and at most as many there.
        ended = _search(captioner, state, videos, selector, options, 2 * options.beam_size)
        return rank_by_specificity(captioner, ended, options)
    samples = options.num_captions
    sampler = Sampler(options, videos=videos, device=next(captioner.parameters()).device)
    flat = _search(captioner, state.repeat(samples), videos * samples, sampler, options, 1)
    return [
        sorted((h for sample in flat[row : row + samples] for h in sample), key=lambda h: -h.score)
        for row in range(0, len(flat), samples)
    ]


def _search(
    captioner: Captioner,
    state: State,
    videos: int,
    selector: BeamSelector | Sampler,
    options: DecodingOptions,
    count: int,
) -> list[list[Hypothesis]]:
    """Return at most ``count`` hypotheses of each video, best first."""
    check_repetition(captioner, options)
    device = next(captioner.parameters()).device
    free = torch.tensor([PAD, *(captioner.function_words or ())], device=device)  # tokens that may repeat
    rows = torch.arange(videos, device=device)  # (B,)
    words = torch.full((videos, 1), BOS, device=device)  # (B, K)
    totals = torch.zeros(videos, 1, device=device)  # (B, K)
    ended = torch.zeros(videos, dtype=torch.long, device=device)  # (B,) number of finished sentences
    past = words.new_empty(videos, 1, 0)  # (B, K, L), kept only if repetition is restricted
    restricted = options.no_repeat_words or options.no_repeat_ngram > 0
    steps: list[tuple[Tensor, Selection]] = []  # the videos (B,) of each step, and what was selected
    for position in range(options.max_length + 1):
        logits, state, _ = captioner.step(words.flatten(), state)
        scores = NextTokens.of(
            logits,
            totals,
            banned=repeated_words(past.flatten(0, 1), free, options) if restricted else None,
            may_end=position >= options.min_length,
            may_go_on=position < options.max_length,
        )
        selection = selector(scores, position=position, rows=rows)
        steps.append((rows, selection))
        if not scores.may_go_on:
            break
        source, beams = selection.source, totals.shape[1]
        words, totals = selection.words, selection.totals
        ended = ended + (selection.end_totals > IMPOSSIBLE).sum(-1)
        if restricted:
            past = past.gather(1, source.unsqueeze(-1).expand(-1, -1, position))
            past = torch.cat([past, words.unsqueeze(-1)], -1)
        # A video is finished when as many sentences as beams have ended, or when no beam goes on.
        active = (ended < selector.width) & (totals > IMPOSSIBLE).any(-1)
        kept = active.nonzero().squeeze(-1)
        if not len(kept):
            break
        if len(kept) == len(active) and source.shape[1] == beams == 1:
            continue  # every beam continues itself
        flat = torch.arange(len(source), device=device).unsqueeze(-1) * beams + source
        if len(kept) < len(active):
            rows, words, totals, ended, past = (x[kept] for x in (rows, words, totals, ended, past))
            state = state.select(kept, flat[kept].flatten())
        else:
            state = state.reorder(flat.flatten())
    hypotheses = _hypotheses(steps, videos, count, options)
    if not all(hypotheses):
        raise CapvidError(
            "the captioner's probabilities are no numbers",
            remedy="see whether its weights or the features have infinite values",
        )
    return hypotheses


def _hypotheses(
    steps: Sequence[tuple[Tensor, Selection]], videos: int, count: int, options: DecodingOptions
) -> list[list[Hypothesis]]:
    """Return at most ``count`` sentences of each video, best first; of equal ones the shorter."""

    def table(name: str, missing: float) -> Tensor:
        """Stack a tensor of all selections: (L, N, K or E), ``missing`` for finished videos and beams."""
        parts = [getattr(selection, name) for _, selection in steps]
        width = max([part.shape[1] for part in parts])
        if {part.shape for part in parts} == {(videos, width)}:
            return torch.stack(parts)
        stacked = parts[0].new_full((len(parts), videos, width), missing)
        for position, ((rows, _), part) in enumerate(zip(steps, parts, strict=True)):
            stacked[position, rows, : part.shape[1]] = part
        return stacked

    totals = table("end_totals", IMPOSSIBLE)  # (L, N, E)
    lengths = torch.arange(1, len(totals) + 1, device=totals.device).view(-1, 1, 1)
    ranked = (totals / lengths**options.length_penalty).transpose(0, 1).flatten(1)  # (N, L E)
    scores, order = [x[:, :count] for x in ranked.sort(dim=-1, descending=True, stable=True)]  # (N, H)
    ends = order // totals.shape[2]  # (N, H) position of the end
    beams = table("end_source", 0).transpose(0, 1).flatten(1).gather(1, order)  # (N, H)
    end_logprobs = table("end_logprobs", 0).transpose(0, 1).flatten(1).gather(1, order)

    # Follow the back-pointers from the ends.
    sources, words, word_logprobs = table("source", 0), table("words", PAD), table("logprobs", 0.0)
    tokens, logprobs = [], []
    for position in reversed(range(len(steps))):
        before_end = ends > position
        tokens.append(words[position].gather(1, beams).where(before_end, PAD))
        logprobs.append(word_logprobs[position].gather(1, beams).where(before_end, 0.0))
        beams = sources[position].gather(1, beams).where(before_end, beams)
    all_tokens, all_logprobs = torch.stack(tokens[::-1], -1), torch.stack(logprobs[::-1], -1)  # (N, H, L)
    all_logprobs.scatter_(2, ends.unsqueeze(-1), end_logprobs.unsqueeze(-1))

    token_lists, logprob_lists, end_lists = all_tokens.tolist(), all_logprobs.tolist(), ends.tolist()
    return [
        [
            Hypothesis(token_lists[video][rank][:end], logprob_lists[video][rank][: end + 1], score)
            for rank, (score, end) in enumerate(zip(row, end_lists[video], strict=True))
            if score > IMPOSSIBLE
        ]
        for video, row in enumerate(scores.tolist())
    ]


def check_repetition(captioner: Captioner, options: DecodingOptions) -> None:
    """Raise UsageError if ``no_repeat_words`` is on and the captioner's tokens are pieces of words."""
    if options.no_repeat_words and captioner.function_words is None:
        raise UsageError(
            f"no_repeat_words: the tokens of {captioner.name} are pieces of words",
            remedy="use no_repeat_ngram",
        )
