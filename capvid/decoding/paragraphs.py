"""Paragraphs: a sentence for each segment of a video, by any search.

Notation for tensor shapes: B videos, S segments, T frames, L words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from capvid.captioners.base import Carried, ParagraphCaptioner
from capvid.decoding.options import DecodingOptions, Hypothesis
from capvid.decoding.search import decode, sentences
from capvid.text.vocabulary import BOS


@torch.inference_mode()
def decode_paragraphs(
    captioner: ParagraphCaptioner,
    features: Tensor,
    mask: Tensor,
    segments: Tensor,
    options: DecodingOptions,
) -> list[list[list[Hypothesis]]]:
    """Caption every segment of every video.

    A segment is captioned knowing the best sentences of the segments before it. Videos with fewer segments
    leave the batch; no sentence depends on the other videos.

    Args:
        captioner: writes them.
        features: (B, S, T, D), or maps (B, S, T, L, D).
        mask: (B, S, T) of real frames.
        segments: (B,) how many segments of each video are real.
        options: of the decoding.

    Returns:
        for each video, for each of its segments, its hypotheses, best first.
    """
    captioner.eval()
    if captioner.recurrent:
        return _one_after_another(captioner, features, mask, segments, options)
    real = torch.arange(features.shape[1], device=mask.device) < segments.to(mask.device).unsqueeze(-1)
    found = iter(decode(captioner, features[real], mask[real], options))
    return [[next(found) for _ in range(count)] for count in segments.tolist()]


def _one_after_another(
    captioner: ParagraphCaptioner,
    features: Tensor,
    mask: Tensor,
    segments: Tensor,
    options: DecodingOptions,
) -> list[list[list[Hypothesis]]]:
    paragraphs: list[list[list[Hypothesis]]] = [[] for _ in range(len(features))]
    counts = segments.tolist()
    rows = [video for video, count in enumerate(counts) if count]
    carried: Carried | None = None
    for segment in range(max(counts, default=0)):
        chosen = torch.tensor(rows, device=features.device)
        state = captioner.encode(features[chosen, segment], mask[chosen, segment], carried)
        found = sentences(captioner, state, len(rows), options)
        for video, hypotheses in zip(rows, found, strict=True):
            paragraphs[video].append(hypotheses)
        going = [place for place, video in enumerate(rows) if counts[video] > segment + 1]
        if not going:
            break
        best = as_tokens([hypotheses[0].tokens for hypotheses in found], features.device)
        carried = captioner.remember(state, best)
        if len(going) < len(rows):
            on = torch.tensor(going, device=features.device)
            carried = {name: tensor.index_select(0, on) for name, tensor in carried.items()}
        rows = [rows[place] for place in going]
    return paragraphs


def as_tokens(captions: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Give captions as tokens (B, L) from the start token on, padded with 0."""
    rows = [torch.tensor([BOS, *caption]) for caption in captions]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
