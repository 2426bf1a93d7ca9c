"""Agreement of captions with the videos themselves: CLIPScore and EMScore over an image-text encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from capvid.errors import CapvidError, DataError, VideoError
from capvid.features.extraction import TIMEOUT, extract
from capvid.metrics.clip_score import (
    PROMPT,
    clip_score,
    em_score,
    idf_weights,
    ref_clip_score,
    video_embedding,
)
from capvid.scoring.predictions import match_ids
from capvid.utils.device import resolve_device
from capvid.video.frame_sampling import parse_sampling
from capvid.video.input_set import find_videos
from capvid.vlm.image_text import DEFAULT_ENCODER, ImageTextEncoder, load_encoder

SAMPLING = "uniform:16"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Agreement of the captions of several systems with the videos.

    Attributes:
        encoder: name and revision of the image-text encoder.
        sampling: sampling of the frames.
        systems: scores of each video by system: CLIPScore, RefCLIPScore, EMScore (mean of EMScore-c and
            EMScore-f), and EMScoreRef.
        errors: why videos have no scores.
        num_shortened: number of captions that were cut to the encoder's maximum length.
        max_tokens: this length in tokens.
    """

    encoder: str
    sampling: str
    systems: Sequence[Mapping[str, Mapping[str, float]]]
    errors: Mapping[str, CapvidError]
    num_shortened: int
    max_tokens: int

    def corpus(self, system: int) -> dict[str, float]:
        """Return the means over videos of a system's scores."""
        rows = list(self.systems[system].values())
        return {name: float(np.mean([row[name] for row in rows])) for name in (rows[0] if rows else ())}


def score_agreement(
    systems: Sequence[Mapping[str, str]],
    references: Mapping[str, Sequence[str]],
    folder: Path | str,
    encoder: ImageTextEncoder | str = DEFAULT_ENCODER,
    *,
    sampling: str = SAMPLING,
    device: str = "auto",
    workers: int = 2,
    timeout: float | None = TIMEOUT,
) -> Agreement:
    """Score captions against the frames of their videos, which are decoded once for all systems.

    Words are weighted by IDF over all references. An empty caption scores 0. Videos that are missing or
    broken have no scores.

    Args:
        systems: caption by video, of each system.
        references: reference captions of each video.
        folder: folder of the videos, whose file names are the ids.
        encoder: the encoder, or its name for :func:`~capvid.vlm.image_text.load_encoder`.
        sampling: frames to sample.
        device: device of an encoder given by name.
        workers: processes that decode videos.
        timeout: seconds before a file is abandoned; None disables the limit.

    Raises:
        DataError: none of the videos can be scored; the message says why the first cannot.
        CapvidError: the encoder cannot be loaded, or an option is unknown.
    """
    errors: dict[str, CapvidError] = {}
    files = {video.key: video for video in find_videos([folder])}
    matches = match_ids(files, references)
    for video in references:
        if video not in matches.videos:
            errors[video] = VideoError(Path(folder, video), "the folder has no such video", kind="missing")
    inputs = {name: files[matches.videos[name]] for name in references if name in matches.videos}
    parse_sampling(sampling)
    if isinstance(encoder, str):
        encoder = load_encoder(encoder, device=resolve_device(device))
    corpus = [ids for captions in references.values() for ids in encoder.tokenize(captions)]
    idf = idf_weights(corpus)
    scores: list[dict[str, Mapping[str, float]]] = [{} for _ in systems]
    results = extract(
        inputs.values(), encoder.images, sampling, workers=workers, timeout=timeout, dtype="float32"
    )
    for video, result in zip(inputs, results, strict=True):
        if result.features is None:
            assert result.error is not None
            errors[video] = result.error
            continue
        captions, frames = [system.get(video, "") for system in systems], result.features.streams[0]
        rows = _score_video(encoder, frames, captions, references[video], idf, len(corpus))
        for system, row in zip(scores, rows, strict=True):
            system[video] = row
    if errors and not scores[0]:
        first = next(iter(errors.values()))
        raise DataError(f"no video can be scored: {first.message}", remedy=first.remedy)
    return Agreement(
        encoder=encoder.name,
        sampling=sampling,
        systems=scores,
        errors=errors,
        num_shortened=encoder.num_shortened,
        max_tokens=encoder.max_tokens,
    )


def _score_video(
    encoder: ImageTextEncoder,
    frames: np.ndarray,
    captions: Sequence[str],
    references: Sequence[str],
    idf: Mapping[int, float],
    count: int,
) -> list[dict[str, float]]:
    """Return the scores of the captions of a video with frame embeddings (T, D), one per system."""
    texts = [*captions, *references]
    plain = encoder.embed(texts)
    prompted = [text.sentence for text in encoder.embed([PROMPT + text for text in texts])]
    own, others = plain[: len(captions)], plain[len(captions) :]
    video = video_embedding(frames)
    rows = []
    for caption, text, sentence in zip(captions, own, prompted, strict=False):
        score = clip_score(sentence, video)
        row = {"CLIPScore": score, "RefCLIPScore": ref_clip_score(score, sentence, prompted[len(captions) :])}
        row |= em_score(text, frames, others, idf, count)
        rows.append(row if caption.strip() else dict.fromkeys(row, 0.0))
    return rows
