"""Sampling of frames by presentation time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from capvid.errors import UsageError

MAX_FRAMES = 100_000  # sampled from one video; also the maximum size and stride of windows


Reduce = Callable[[np.ndarray], np.ndarray]  # frames (n, H, W, 3) uint8, one by one, to (n, ...)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of C frames around each sampled frame, for clip networks; C = 1 is the frame itself."""

    offsets: tuple[float, ...] = ()  # times (C,) of the frames in seconds, relative to the sampled frame
    size: int | None = None  # number C of consecutive frames, whatever their times, instead of ``offsets``
    reduce: Reduce | None = None  # applied to the frames before they are stored

    def choose(self, times: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Return the frames (T, C) of the windows around sampled frames (T,) in a video with times (N,).

        The first and the last frame are repeated beyond the ends of the video.
        """
        if self.size is not None:
            starts = np.maximum(sampled[:, None] - self.size // 2, 0)
            return np.minimum(starts + np.arange(self.size), len(times) - 1)
        targets = times[sampled][:, None] + np.asarray(self.offsets)  # (T, C)
        after = np.searchsorted(times, targets).clip(min(1, len(times) - 1), len(times) - 1)
        before = np.maximum(after - 1, 0)
        return np.where(targets - times[before] < times[after] - targets, before, after)


@dataclass(frozen=True)
class Sampling(ABC):
    """Rule that chooses frames of a video.

    With ``clean``, chosen frames that show nothing new are dropped after they are read
    (:func:`~capvid.video.frame_filter.useful_frames`).
    """

    clean: bool = field(default=False, kw_only=True)
    form: ClassVar[str]  # format of the text form

    @abstractmethod
    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return distinct ascending indices of frames with presentation times (N,) in seconds, ascending."""

    def spec(self) -> str:
        """Return the text form, such as ``uniform:28``."""
        return self.form.format(self) + ("+clean" if self.clean else "")

    def windows(self, size: int, reduce: Reduce | None) -> Windows | None:
        """Return the sampling's own windows, if it has windows of ``size`` frames."""
        return None


@dataclass(frozen=True)
class UniformSampling(Sampling):
    """K = ``num_frames`` frames, evenly spaced in time."""

    num_frames: int
    form = "uniform:{0.num_frames}"

    def __post_init__(self) -> None:
        if not 1 <= self.num_frames <= MAX_FRAMES:
            remedy = f"take at least 1, at most {MAX_FRAMES}"
            raise UsageError(f"{self.num_frames} frames cannot be sampled", remedy=remedy)

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return the distinct frames nearest to the middles of K equal slices of the video's duration.

        A video of at most K frames gives all of them.
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
            problem = f"{self.fps:g} frames per second cannot be sampled"
            raise UsageError(problem, remedy="take more than 0, at most 1000")

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return the distinct frames nearest to the middles of intervals of 1 / fps seconds.

        An incomplete interval at the end counts if it has at least half this length. A video shorter than one
        interval gives its middle frame.
        """
        if len(times) <= 1:
            return np.arange(len(times))
        duration = _end(times) - float(times[0])
        num_intervals = max(1, int(duration * self.fps + 0.5))
        return _middles(times, min(1 / self.fps, duration), num_intervals)


@dataclass(frozen=True)
class WindowSampling(Sampling):
    """Windows of consecutive frames: 16 frames, every 6 frames, in DenseLSTM (Zhu and Jiang 2019).

    Image networks take the middle frame of each window; clip networks of the same length take the window.
    """

    size: int  # frames per window
    stride: int  # frames from the start of one window to the next
    form = "windows:{0.size}/{0.stride}"

    def __post_init__(self) -> None:
        if not 1 <= min(self.size, self.stride) <= max(self.size, self.stride) <= MAX_FRAMES:
            problem = f"windows of {self.size} frames every {self.stride} cannot be sampled"
            raise UsageError(problem, remedy=f"take at least 1, at most {MAX_FRAMES}")

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return the middle frame of each complete window.

        A video shorter than a window gives one window, in which its last frame is repeated.
        """
        if len(times) < self.size:
            return np.arange(len(times))[(len(times) - 1) // 2 :][:1]
        stride = min(self.stride, len(times))  # the result is the same, but a long stride may overflow
        return np.arange(self.size // 2, len(times) - self.size + self.size // 2 + 1, stride)

    def windows(self, size: int, reduce: Reduce | None) -> Windows | None:
        """Return the sampling's own windows, if they have ``size`` frames."""
        return Windows(size=size, reduce=reduce) if size == self.size else None


@dataclass(frozen=True)
class ChosenTimes(Sampling):
    """Frames nearest to given times, which ``original`` has chosen in an earlier pass over the video."""

    times: tuple[float, ...]  # in seconds, ascending
    original: Sampling  # gives the windows
    form = "times"

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return the frames nearest to the given times."""
        return nearest(np.asarray(self.times), times)

    def windows(self, size: int, reduce: Reduce | None) -> Windows | None:
        """Return the windows of the original sampling."""
        return self.original.windows(size, reduce)


@dataclass(frozen=True)
class LimitedSampling(Sampling):
    """At most ``max_frames`` of the frames that ``original`` chooses."""

    original: Sampling
    max_frames: int
    form = "limited"

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Return evenly spread frames of those of the original sampling."""
        chosen = self.original.choose(times)
        return chosen[spread(len(chosen), self.max_frames)]

    def windows(self, size: int, reduce: Reduce | None) -> Windows | None:
        """Return the windows of the original sampling."""
        return self.original.windows(size, reduce)


def spread(count: int, max_frames: int | None) -> np.ndarray:
    """Return the indices of at most ``max_frames`` of ``count`` frames: the middles of equal slices."""
    if max_frames is None or count <= max_frames:
        return np.arange(count)
    return (2 * np.arange(max_frames) + 1) * count // (2 * max_frames)


def nearest(targets: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the distinct ascending indices of the ``times`` (N,) nearest to ``targets``; ties go later."""
    if len(times) <= 1:
        return np.arange(len(times))
    after = np.searchsorted(times, targets).clip(1, len(times) - 1)
    return np.unique(np.where(targets - times[after - 1] < times[after] - targets, after - 1, after))


def _end(times: np.ndarray) -> float:
    """Return the end time of the last frame, assuming that it has the median duration."""
    return float(times[-1] + np.median(np.diff(times)))


def _middles(times: np.ndarray, length: float, num_intervals: int) -> np.ndarray:
    """Return the frames nearest to the middles of consecutive intervals of ``length`` seconds."""
    if num_intervals <= 4 * len(times):
        numbers = np.arange(num_intervals)
    else:
        # A distant timestamp makes countless intervals, almost all nearest to the frames beside the gap.
        # The first interval nearest to each frame suffices; its neighbours allow for rounding.
        midpoints = (times[:-1] + times[1:]) / 2  # between frames; from there on the next frame is nearer
        first = np.ceil((midpoints - times[0]) / length - 0.5)
        numbers = np.concatenate([[0.0], first - 1, first, first + 1])
        numbers = np.unique(numbers.clip(0, num_intervals - 1))
    return nearest(times[0] + (numbers + 0.5) * length, times)


def parse_sampling(text: str) -> Sampling:
    """Parse a sampling such as ``uniform:28``, ``fps:2``, ``windows:16/6``, optionally with ``+clean``.

    Raises:
        UsageError: the form is unknown, or a number is out of range.
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
    except ValueError:  # a rate with two decimal points, or a number with thousands of digits
        pass
    remedy = "write uniform:28, fps:2 or windows:16/6, optionally with +clean"
    raise UsageError(f"{text}: no such sampling", remedy=remedy)
