"""Which frames of a video to look at, chosen by their presentation times."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from capvid.errors import UsageError


@dataclass(frozen=True)
class UniformSampling:
    """K frames evenly spread over the time of a video.

    Attributes:
        num_frames: K.
        clean: whether frames that show nothing new are left out of these K, as
            :func:`~capvid.video.clean.useful` finds the others once they are read.
    """

    num_frames: int
    clean: bool = False

    def __post_init__(self) -> None:
        if self.num_frames < 1:
            raise UsageError(f"{self.num_frames} frames cannot be sampled", remedy="take at least 1")

    def choose(self, times: np.ndarray) -> np.ndarray:
        """Choose frames by their presentation times ``times`` (N,) in seconds, ascending.

        The time from the first frame to the end of the last is cut into K equal slices; of each, the frame
        whose time is nearest to its middle is taken. A video of at most K frames gives all of them, once;
        where frames are so uneven that slices share a frame, it is taken once as well.

        Returns:
            indices, ascending and distinct, at most K.
        """
        count = len(times)
        if count <= self.num_frames:
            return np.arange(count)
        # The last frame is shown as long as frames are shown usually.
        end = times[-1] + float(np.median(np.diff(times)))
        middles = times[0] + (np.arange(self.num_frames) + 0.5) * (end - times[0]) / self.num_frames
        after = np.searchsorted(times, middles).clip(1, count - 1)
        nearest = np.where(middles - times[after - 1] < times[after] - middles, after - 1, after)
        return np.unique(nearest)

    def spec(self) -> str:
        """Give the sampling as text, as feature headers name it."""
        return f"uniform:{self.num_frames}" + ("+clean" if self.clean else "")


def parse_sampling(text: str) -> UniformSampling:
    """Read a sampling such as ``uniform:28`` or ``uniform:28+clean``.

    Raises:
        UsageError: it is not understood.
    """
    match = re.fullmatch(r"uniform:([0-9]+)(\+clean)?", text)
    if match is None:
        raise UsageError(f"{text}: no such sampling", remedy="write uniform:28 or uniform:28+clean, say")
    return UniformSampling(int(match[1]), clean=match[2] is not None)
