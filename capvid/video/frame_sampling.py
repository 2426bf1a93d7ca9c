"""Sampling of frames by their presentation times."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from capvid.errors import UsageError
from capvid.video.frame_source import Reduce, Windows

MAX_FRAMES = 100_000  # of one video, or of a window and its stride


@dataclass(frozen=True)
class Sampling(ABC):
    """Rule that chooses the frames of a video.

    With ``clean``, chosen frames that show nothing new are dropped once they are read
    (:func:`~capvid.video.frame_filter.useful`).
    """

    clean: bool = field(default=False, kw_only=True)
    form: ClassVar[str]  # the sampling as text, with its fields in braces

    @abstractmethod
    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return distinct ascending indices for presentation times (N,) in seconds, ascending."""

    def spec(self) -> str:
        """Return the sampling as text, as in feature headers."""
        return self.form.format(self) + ("+clean" if self.clean else "")

    def windows(self, frames: int, reduce: Reduce | None) -> Windows | None:
        """Return the sampling's own windows, if it has windows of ``frames`` frames."""
        return None


@dataclass(frozen=True)
class UniformSampling(Sampling):
    """K = ``num_frames`` frames evenly spread over the time of a video."""

    num_frames: int
    form = "uniform:{0.num_frames}"

    def __post_init__(self) -> None:
        if not 1 <= self.num_frames <= MAX_FRAMES:
            remedy = f"take at least 1, at most {MAX_FRAMES}"
            raise UsageError(f"{self.num_frames} frames cannot be sampled", remedy=remedy)

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return the frames nearest to the middles of K equal slices of the video's time, at most K.

        A video of at most K frames gives all of them; a frame that slices share is taken once.
        """
        if len(times) <= self.num_frames:
            return np.arange(len(times))
        return _middles(times, (_end(times) - times[0]) / self.num_frames, self.num_frames)


@dataclass(frozen=True)
class RateSampling(Sampling):
    """Frames at a fixed rate: 2 frames per second for the features of MART (Lei et al. 2020)."""

    fps: float
    form = "fps:{0.fps:g}"

    def __post_init__(self) -> None:
        if not 0 < self.fps <= 1000:
            problem = f"{self.fps:g} frames a second cannot be sampled"
            raise UsageError(problem, remedy="take more than 0, at most 1000")

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return the frames nearest to the middle of each 1 / fps seconds, at least one if there is a frame.

        A frame that intervals share is taken once; an incomplete interval at the end counts from half its
        length on. A shorter video gives its middle frame.
        """
        if len(times) <= 1:
            return np.arange(len(times))
        duration = _end(times) - float(times[0])
        parts = max(1, int(duration * self.fps + 0.5))
        return _middles(times, min(1 / self.fps, duration), parts)


@dataclass(frozen=True)
class WindowSampling(Sampling):
    """Windows of neighbouring frames: 16, every 6 frames, in DenseLSTM (Zhu and Jiang 2019).

    Image networks see the middle frame of each window, clip networks of the same length see the window.
    """

    size: int  # frames per window
    stride: int  # frames between the starts of windows
    form = "windows:{0.size}/{0.stride}"

    def __post_init__(self) -> None:
        if not 1 <= min(self.size, self.stride) <= max(self.size, self.stride) <= MAX_FRAMES:
            problem = f"windows of {self.size} frames every {self.stride} cannot be sampled"
            raise UsageError(problem, remedy=f"take at least 1, at most {MAX_FRAMES}")

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return the middle frame of each complete window.

        A video shorter than one window gives one window, its last frame repeated.
        """
        if len(times) < self.size:
            return np.arange(len(times))[(len(times) - 1) // 2 :][:1]
        stride = min(self.stride, len(times))  # a longer one gives the same, but may overflow an integer
        return np.arange(self.size // 2, len(times) - self.size + self.size // 2 + 1, stride)

    def windows(self, frames: int, reduce: Reduce | None) -> Windows | None:
        """Return the sampling's own windows, if they have ``frames`` frames."""
        return Windows(size=self.size, reduce=reduce) if frames == self.size else None


@dataclass(frozen=True)
class ChosenTimes(Sampling):
    """Frames nearest to certain times, chosen by ``like`` in an earlier pass over the video."""

    times: tuple[float, ...]  # in seconds, ascending
    like: Sampling  # whose windows are kept
    form = "times:{0.num_frames}"

    @property
    def num_frames(self) -> int:
        """Number of times, and of frames at most."""
        return len(self.times)

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return the frames nearest to the wanted times."""
        return nearest(np.asarray(self.times), times) if len(times) else np.arange(0)

    def windows(self, frames: int, reduce: Reduce | None) -> Windows | None:
        """Return the windows of the other sampling."""
        return self.like.windows(frames, reduce)


def nearest(wanted: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return distinct ascending indices of the ``times`` (N,) nearest to ``wanted``; ties go later."""
    if len(times) <= 1:
        return np.arange(len(times))
    after = np.searchsorted(times, wanted).clip(1, len(times) - 1)
    return np.unique(np.where(wanted - times[after - 1] < times[after] - wanted, after - 1, after))


def _end(times: np.ndarray) -> float:
    """Return when the last frame ends, assuming the median duration."""
    return float(times[-1] + np.median(np.diff(times)))


def _middles(times: np.ndarray, length: float, parts: int) -> np.ndarray:
    """Return the frames nearest to the middles of ``parts`` intervals of ``length`` seconds."""
    if parts <= 4 * len(times):
        numbers = np.arange(parts)
    else:
        # A distant timestamp makes countless intervals, almost all nearest to the frames beside the gap.
        # The first interval nearest to each frame suffices; its neighbors allow for rounding.
        turns = (times[:-1] + times[1:]) / 2  # from where on the next frame is nearer
        first = np.ceil((turns - times[0]) / length - 0.5)
        numbers = np.concatenate([[0.0], first - 1, first, first + 1])
        numbers = np.unique(numbers.clip(0, parts - 1))
    return nearest(times[0] + (numbers + 0.5) * length, times)


def parse_sampling(text: str) -> Sampling:
    """Parse a sampling such as ``uniform:28``, ``fps:2``, ``windows:16/6``, optionally with ``+clean``.

    Raises:
        UsageError: unknown form, or a number out of range.
    """
    match = re.fullmatch(r"(?:uniform:([0-9]+)|fps:([0-9.]+)|windows:([0-9]+)/([0-9]+))(\+clean)?", text)
    try:
        if match is not None:
            num_frames, fps, size, stride, clean = match.groups()
            if num_frames:
                return UniformSampling(int(num_frames), clean=bool(clean))
            if fps:
                return RateSampling(float(fps), clean=bool(clean))
            return WindowSampling(int(size), int(stride), clean=bool(clean))
    except ValueError:  # a rate with two points, or a number with thousands of digits
        pass
    remedy = "write uniform:28, fps:2 or windows:16/6, perhaps with +clean"
    raise UsageError(f"{text}: no such sampling", remedy=remedy)
