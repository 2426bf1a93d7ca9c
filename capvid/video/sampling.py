"""Which frames of a video to look at, chosen by their presentation times."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from capvid.errors import UsageError
from capvid.video.source import Windows

MAX_FRAMES = 100_000  # of one video, or of a window and its stride

_Reduce = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Sampling(ABC):
    """What chooses the frames of a video.

    Attributes:
        clean: whether frames that show nothing new are left out of the chosen ones, as
            :func:`~capvid.video.clean.useful` finds the others once they are read.
    """

    clean: bool = field(default=False, kw_only=True)

    @abstractmethod
    def choose(self, times: np.ndarray) -> np.ndarray:
        """Choose frames by their presentation times ``times`` (N,) in seconds, ascending.

        Returns:
            indices, ascending and distinct.
        """

    def spec(self) -> str:
        """Give the sampling as text, as feature headers name it."""
        return self._spec() + ("+clean" if self.clean else "")

    @abstractmethod
    def _spec(self) -> str:
        """Likewise, without ``+clean``."""

    def windows(self, frames: int, reduce: _Reduce | None) -> Windows | None:
        """Give the sampling's own windows, if it goes by windows of so many ``frames``."""
        return None


@dataclass(frozen=True)
class UniformSampling(Sampling):
    """K frames evenly spread over the time of a video.

    Attributes:
        num_frames: K.
    """

    num_frames: int

    def __post_init__(self) -> None:
        if self.num_frames < 1:
            raise UsageError(f"{self.num_frames} frames cannot be sampled", remedy="take at least 1")
        if self.num_frames > MAX_FRAMES:
            raise UsageError(
                f"{self.num_frames} frames cannot be sampled", remedy=f"take at most {MAX_FRAMES}"
            )

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Choose frames by their presentation times ``times`` (N,) in seconds, ascending.

        The time from the first frame to the end of the last is cut into K equal slices; of each, the frame
        whose time is nearest to its middle is taken. A video of at most K frames gives all of them, once;
        where frames are so uneven that slices share a frame, it is taken once as well.

        Returns:
            indices, ascending and distinct, at most K.
        """
        if len(times) <= self.num_frames:
            return np.arange(len(times))
        return _middles(times, (_end(times) - times[0]) / self.num_frames, self.num_frames)

    def _spec(self) -> str:
        return f"uniform:{self.num_frames}"


@dataclass(frozen=True)
class RateSampling(Sampling):
    """Frames at a fixed rate: 2 a second for the features of MART (Lei et al. 2020).

    Attributes:
        fps: frames a second.
    """

    fps: float

    def __post_init__(self) -> None:
        if not 0 < self.fps <= 1000:
            raise UsageError(
                f"{self.fps:g} frames a second cannot be sampled", remedy="take more than 0, at most 1000"
            )

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Choose frames by their presentation times ``times`` (N,) in seconds, ascending.

        Of each 1 / fps seconds, from the first frame on, the frame whose time is nearest to the middle is
        taken, once where several share it; an incomplete part at the end counts from its half on. Of a
        shorter video the middle is taken.

        Returns:
            indices, ascending and distinct; at least one if there is a frame.
        """
        if len(times) <= 1:
            return np.arange(len(times))
        duration = _end(times) - float(times[0])
        parts = max(1, int(duration * self.fps + 0.5))
        return _middles(times, min(1 / self.fps, duration), parts)

    def _spec(self) -> str:
        return f"fps:{self.fps:g}"


@dataclass(frozen=True)
class WindowSampling(Sampling):
    """Windows of neighbouring frames: 16, every 6 frames, in DenseLSTM (Zhu and Jiang 2019).

    Networks of single frames see the middle frame of each window, networks of clips that take as many
    neighbouring frames see the window.

    Attributes:
        size: frames of a window.
        stride: frames from the beginning of a window to that of the next.
    """

    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise UsageError(
                f"windows of {self.size} frames every {self.stride} cannot be sampled",
                remedy="take at least 1",
            )
        if max(self.size, self.stride) > MAX_FRAMES:
            raise UsageError(
                f"windows of {self.size} frames every {self.stride} cannot be sampled",
                remedy=f"take at most {MAX_FRAMES}",
            )

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Choose the middle frame of each window of the video with frame times ``times`` (N,).

        Only whole windows count; a video that is shorter than one gives one, its last frame repeated.

        Returns:
            indices (T,), ascending and distinct.
        """
        if len(times) < self.size:
            return np.arange(len(times))[(len(times) - 1) // 2 :][:1]
        stride = min(self.stride, len(times))  # a longer one gives the same, but may not fit an integer
        return np.arange(self.size // 2, len(times) - self.size + self.size // 2 + 1, stride)

    def windows(self, frames: int, reduce: _Reduce | None) -> Windows | None:
        """Give the sampling's own windows, if they are of so many ``frames``."""
        return _Whole(size=self.size, reduce=reduce) if frames == self.size else None

    def _spec(self) -> str:
        return f"windows:{self.size}/{self.stride}"


@dataclass(frozen=True, kw_only=True)
class _Whole(Windows):
    """The windows of :class:`WindowSampling`."""

    offsets: tuple[float, ...] = ()
    size: int

    def choose(self, times: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Give the frames (T, C) of each window; beyond the video's end its last frame."""
        starts = np.maximum(sampled[:, None] - self.size // 2, 0)
        return np.minimum(starts + np.arange(self.size), len(times) - 1)


@dataclass(frozen=True)
class ChosenTimes(Sampling):
    """The frames shown at certain times, of a video that was looked at before.

    Attributes:
        times: in seconds, ascending.
        like: the sampling whose windows are kept.
    """

    times: tuple[float, ...]
    like: Sampling

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Choose the frames nearest to the wanted times by their own, ``times`` (N,) in seconds, ascending.

        Returns:
            indices, ascending and distinct.
        """
        return nearest(np.asarray(self.times), times) if len(times) else np.arange(0)

    def windows(self, frames: int, reduce: _Reduce | None) -> Windows | None:
        """Give the windows of the other sampling."""
        return self.like.windows(frames, reduce)

    def _spec(self) -> str:
        return f"times:{len(self.times)}"


def nearest(wanted: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Frames by their ``times`` (N,), ascending, nearest to the ``wanted`` ones; of equals the later.

    Returns:
        indices, ascending and distinct.
    """
    if len(times) <= 1:
        return np.arange(len(times))
    after = np.searchsorted(times, wanted).clip(1, len(times) - 1)
    return np.unique(np.where(wanted - times[after - 1] < times[after] - wanted, after - 1, after))


def _end(times: np.ndarray) -> float:
    """When the last frame ends: it is shown as long as frames are shown usually."""
    return float(times[-1] + np.median(np.diff(times)))


def _middles(times: np.ndarray, length: float, parts: int) -> np.ndarray:
    """Frames nearest to the middles of so many ``parts``, each of ``length`` seconds; of equals the later."""
    numbers = np.arange(parts) if parts <= 4 * len(times) else _sparse_parts(times, length, parts)
    return nearest(times[0] + (numbers + 0.5) * length, times)


def _sparse_parts(times: np.ndarray, length: float, parts: int) -> np.ndarray:
    """Return the numbers of parts to which every frame that is nearest to some middle is nearest.

    A timestamp far away makes parts without number, almost all of them nearest to the frames at the ends of
    a gap. The first part nearest to each frame suffices; its neighbors allow for rounding.
    """
    turns = (times[:-1] + times[1:]) / 2  # from where on the next frame is nearer
    first = np.ceil((turns - times[0]) / length - 0.5)
    numbers = np.concatenate([[0.0], first - 1, first, first + 1])
    return np.unique(numbers.clip(0, parts - 1))


def parse_sampling(text: str) -> Sampling:
    """Read a sampling such as ``uniform:28``, ``fps:2``, ``windows:16/6``, each perhaps with ``+clean``.

    Raises:
        UsageError: it is not understood.
    """
    match = re.fullmatch(r"(uniform|fps|windows):([0-9.]+)(?:/([0-9]+))?(\+clean)?", text)
    try:
        if match is not None:
            kind, number, stride, clean = match[1], match[2], match[3], match[4] is not None
            if kind == "windows" and stride:
                return WindowSampling(size=int(number), stride=int(stride), clean=clean)
            if kind == "fps" and not stride:
                return RateSampling(fps=float(number), clean=clean)
            if kind == "uniform" and not stride:
                return UniformSampling(num_frames=int(number), clean=clean)
    except ValueError:
        pass
    raise UsageError(
        f"{text}: no such sampling", remedy="write uniform:28, fps:2 or windows:16/6, perhaps with +clean"
    )
