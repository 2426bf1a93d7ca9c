"""The frames of videos as training reads them: when a batch needs them, and once if they fit into memory.

Notation for tensor shapes: T frames, D feature width; feature maps have their locations before D.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from capvid.data.captions import Segment
from capvid.errors import DataError, FeatureFileError
from capvid.features.store import FeatureStore

SHARE = 0.25  # of the memory that is free at the beginning
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")


class FrameReader:
    """Reads the features of videos through a memory map, and keeps them as long as there is room.

    Any number of threads may read.

    Args:
        store: the features.
        memory: bytes of features that are kept; None takes a quarter of the memory that is free.
    """

    def __init__(self, store: FeatureStore, *, memory: int | None = None) -> None:
        self.store = store
        self.memory = int(SHARE * free_memory()) if memory is None else memory
        self._kept: dict[str, Tensor] = {}

    def length(self, video: str) -> int:
        """The number of frames of a video, known without reading them."""
        return self.store.length(video)

    def __call__(self, video: str) -> Tensor:
        """The frames of a video, (T, D) or (T, L, D) float16.

        Raises:
            FeatureFileError: they cannot be read, or are not those that were there at the beginning.
        """
        frames = self._kept.get(video)
        if frames is None:
            frames = torch.from_numpy(self.store.get(video).concatenated().astype(np.float16))
            if len(frames) != self.length(video):
                raise FeatureFileError(
                    f"{video}: {len(frames)} frames of features, {self.length(video)} when opened",
                    remedy="leave features alone while they are in use",
                )
            size = frames.numel() * frames.element_size()
            if size <= self.memory:  # threads that ask at once may each count it: no harm
                self.memory -= size
                self._kept[video] = frames
        return frames


def free_memory() -> int:
    """Bytes of memory that can be had, of the machine or of the container if that has less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        return min(free, int(_LIMIT.read_text()) - int(_USED.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def segment_rows(video: str, segments: Sequence[Segment], store: FeatureStore) -> tuple[Tensor, ...]:
    """The numbers (T,) of the frames of every segment; of one that lies between two frames there are none.

    Raises:
        DataError: a segment of frames ends beyond the last one, or seconds are given and the features do not
            know their times.
    """
    times = store.times(video) if any(segment.unit == "seconds" for segment in segments) else None
    length = store.length(video)
    rows = []
    for segment in segments:
        if segment.unit == "seconds":
            if times is None:
                raise DataError(
                    f"{video}: segments in seconds, and features that do not know their times",
                    remedy="extract the features with capvid, or give segments in frames",
                )
            rows.append(torch.from_numpy(np.flatnonzero((times >= segment.start) & (times < segment.end))))
        elif segment.end > length:
            raise DataError(
                f"{video}: a segment ends at frame {segment.end:g}, the features at {length}",
                remedy="extract the frames that the segments count",
            )
        else:
            rows.append(torch.arange(int(segment.start), int(segment.end)))
    return tuple(rows)
