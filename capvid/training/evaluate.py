"""Captions of a split by a captioner, and what they score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from capvid.captioners import Captioner
from capvid.captioners.checkpoint import Checkpoint
from capvid.data.batches import spread
from capvid.data.captions import CaptionedVideo
from capvid.decoding import DecodingOptions, decode
from capvid.decoding.search import pad_frames
from capvid.errors import DataError
from capvid.features.store import FeatureStore
from capvid.metrics import score
from capvid.text.vocabulary import Vocabulary

VIDEOS_AT_ONCE = 64


@dataclass(frozen=True)
class Evaluation:
    """What a captioner says about a split, and how it scores (fractions, not percentages)."""

    scores: dict[str, float]
    captions: dict[str, str]


def caption_frames(
    captioner: Captioner,
    vocabulary: Vocabulary,
    frames: Sequence[torch.Tensor],
    *,
    max_frames: int,
    options: DecodingOptions,
) -> list[str]:
    """The best caption of each video's ``frames`` (T, D); at most ``max_frames`` of them are looked at."""
    device = next(captioner.parameters()).device
    captions: list[str] = []
    for first in range(0, len(frames), VIDEOS_AT_ONCE):
        clips = [spread(clip, max_frames).float() for clip in frames[first : first + VIDEOS_AT_ONCE]]
        features, mask = pad_frames(clips)
        for hypotheses in decode(captioner, features.to(device), mask.to(device), options):
            captions.append(" ".join(vocabulary.decode(hypotheses[0].tokens)))
    return captions


def evaluate(
    checkpoint: Checkpoint,
    videos: Sequence[CaptionedVideo],
    store: FeatureStore,
    options: DecodingOptions,
) -> Evaluation:
    """Caption ``videos`` from their features and score against their captions.

    Raises:
        DataError: there is no video, or one without features.
        FeatureMismatchError: the features are not of the kind that the captioner was trained on.
    """
    checkpoint.header.checked(store.header)
    missing = [video.id for video in videos if video.id not in store]
    if missing or not videos:
        raise DataError(
            f"{len(missing)} of {len(videos)} videos to evaluate on have no features",
            remedy="give the features file that holds them",
        )
    frames = [torch.from_numpy(store.get(video.id).concatenated()) for video in videos]
    captions = caption_frames(
        checkpoint.captioner,
        checkpoint.vocabulary,
        frames,
        max_frames=int(checkpoint.info["max_frames"]),
        options=options,
    )
    said = {video.id: caption for video, caption in zip(videos, captions, strict=True)}
    scores = score(said, {video.id: list(video.captions) for video in videos})
    return Evaluation(dict(scores.corpus), said)
