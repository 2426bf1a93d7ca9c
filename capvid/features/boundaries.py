"""Where a video's features change: segments of its events (``--segments auto``).

The boundaries come from the features that the captioner reads anyway, by ruptures' exact search for change
points with a linear penalty (Killick et al. 2012; Arlot et al. 2019): no frame is decoded for them alone,
and a cut that the backbone does not see is none for the captioner either. The penalty is the one by which
the boundaries between real clips, set end to end, are found best; for two different backbones it is the
same.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from capvid.errors import UsageError
from capvid.storage import VideoPath
from capvid.video.sampling import MAX_FRAMES, RateSampling, Sampling, UniformSampling
from capvid.video.segments import EqualSegments, Segmentation, Span, read_segments

RATE = 2.0  # frames a second that are looked at
LEAST = 28  # frames of a short video
SHORTEST = 2.0  # seconds of a segment
PENALTY = 7.0
COMPONENTS = 32
_BLOCK = 14400  # frames that are searched together: two hours


@dataclass(frozen=True)
class AutoSegments:
    """Segments between the changes of a video's features."""

    spec: str = "auto"

    def choose(self, path: VideoPath, times: np.ndarray, duration: float, sampling: Sampling) -> np.ndarray:
        """Choose frames evenly over the whole video, as often as the sampling does, if it goes by a rate."""
        if isinstance(sampling, RateSampling):
            return sampling.choose(times)
        if duration * RATE < LEAST:
            return UniformSampling(LEAST).choose(times)
        return RateSampling(RATE).choose(times)

    def spans(self, path: VideoPath, features: np.ndarray, times: np.ndarray, duration: float) -> list[Span]:
        """Cut between frames with different features, from the beginning to the end of the video."""
        cuts = changes(features, _frames_of(SHORTEST, times))
        inner = (float(times[cut - 1] + times[cut]) / 2 for cut in cuts)
        return list(pairwise([0.0, *sorted({time for time in inner if 0 < time < duration}), duration]))


def changes(features: np.ndarray, shortest: int) -> list[int]:
    """Find the frames with which something new begins.

    The features' 32 principal components, centred and of unit length, are cut so that their squared
    distances to the means of the segments, and :data:`PENALTY` for each segment, are least in sum.

    Args:
        features: (T, D), or maps (T, L, D), of which the mean over the locations counts.
        shortest: frames of a segment at least.

    Returns:
        indices, ascending, without the first frame.
    """
    vectors = features.mean(1) if features.ndim == 3 else features
    found: list[int] = []
    for start in range(0, len(vectors), _BLOCK):  # the search takes time by the square of the frames
        block = vectors[start : start + _BLOCK]
        found += [start, *(start + place for place in _changes_in(block, shortest))]
    return [place for place in found if place]


def _changes_in(vectors: np.ndarray, shortest: int) -> list[int]:
    from ruptures import KernelCPD

    if len(vectors) < 2 * shortest:
        return []
    signal = _components(vectors.astype(np.float64))
    found = KernelCPD(kernel="linear", min_size=shortest).fit(signal).predict(pen=PENALTY)
    return [int(place) for place in found[:-1]]


def _components(vectors: np.ndarray) -> np.ndarray:
    """The first principal components (T, at most 32) of vectors (T, D), each frame's of unit length."""
    centred = vectors - vectors.mean(0)
    if min(centred.shape) > COMPONENTS:
        _, axes = np.linalg.eigh(centred.T @ centred)
        centred = centred @ axes[:, -COMPONENTS:]
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)


def _frames_of(seconds: float, times: np.ndarray) -> int:
    """How many frames are sampled in so many seconds, at least 1."""
    if len(times) < 2 or times[-1] <= times[0]:
        return 1
    return max(1, round(seconds * (len(times) - 1) / (times[-1] - times[0])))


def parse_segments(text: str) -> Segmentation:
    """Read ``auto``, a number of equal segments, or the name of a file (:func:`read_segments`).

    Raises:
        UsageError: a number below 1, or no such file.
        DataError: the file's content is not understood.
    """
    if text == "auto":
        return AutoSegments()
    if re.fullmatch("[+-]?[0-9]{1,1000}", text):
        if int(text) < 1:
            raise UsageError(f"{text} segments cannot be made", remedy="ask for at least 1")
        if int(text) > MAX_FRAMES:
            raise UsageError(f"{text} segments cannot be made", remedy=f"ask for at most {MAX_FRAMES}")
        return EqualSegments(int(text))
    if not os.path.isfile(text):  # noqa: PTH113  # Path.is_file raises where a name is too long
        raise UsageError(
            f"{text}: no such file of segments", remedy="give a file, a number of equal segments, or auto"
        )
    return read_segments(Path(text))
