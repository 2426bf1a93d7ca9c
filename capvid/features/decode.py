"""One video, from its file to what the backbones look at. Imports no deep learning library.

So worker processes, in which this runs, start quickly and stay small.
Notation for array shapes: T sampled frames, C frames of the window around each that a network of clips sees,
h and w height and width of a network's input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from capvid.errors import MissingVideoError, VideoError
from capvid.features.augment import Augmentation
from capvid.features.preprocess import prepare, shrink
from capvid.features.registry import BackboneEntry, Clip, Preprocess
from capvid.features.thumbnails import as_jpeg, reduced
from capvid.storage import Blob, StorageError, VideoPath, local_copy
from capvid.video.clean import useful
from capvid.video.sampling import Sampling
from capvid.video.source import Windows, memory_errors, open_video, read_frames


@dataclass(frozen=True, kw_only=True)
class View:
    """What of a video a backbone looks at; backbones that look at the same share it.

    Attributes:
        preprocess: how frames are cut and resized.
        clip: what a network of clips sees at once; ``None`` for single frames.
        augmentation: how each frame is seen, of single frames only; ``None`` as it is.
    """

    preprocess: Preprocess
    clip: Clip | None = None
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and self.augmentation is not None:
            raise ValueError("the frames of a clip are not augmented one by one")

    @classmethod
    def of(cls, entry: BackboneEntry) -> View:
        """Give what this backbone looks at."""
        return cls(preprocess=entry.preprocess, clip=entry.clip)

    def windows(self, sampling: Sampling) -> Windows | None:
        """Say what is read around each sampled frame; ``None`` if all frames are looked at together first.

        If the sampling is by windows of as many neighbouring frames as a network of clips sees at once, it
        sees these; otherwise the frames around the sampled one, its own interval apart.
        """
        if self.preprocess.trim or self.augmentation is not None:
            return None
        reduce = partial(prepare, how=self.preprocess)
        if self.clip is None:
            return _Stills(reduce=reduce)
        if self.clip.stride == 1 and (whole := sampling.windows(self.clip.frames, reduce)):
            return whole
        return Windows(offsets=self.clip.offsets, reduce=reduce)

    def prepare(self, frames: np.ndarray) -> np.ndarray:
        """Cut and resize the sampled frames (T, H, W, 3) of a video, all together: (T, h, w, 3) uint8."""
        if self.augmentation is not None:
            return self.augmentation.prepare(frames, self.preprocess)
        return prepare(frames, self.preprocess)


@dataclass(frozen=True, kw_only=True)
class _Stills(Windows):
    """Windows of the sampled frame alone."""

    offsets: tuple[float, ...] = (0.0,)

    def choose(self, times: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Give the sampled frames (T,) as windows (T, 1)."""
        return sampled[:, None]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Sampled frames of one video, as the backbones look at them.

    Attributes:
        crops: for each view uint8 (T, h, w, 3), or (T, C, h, w, 3) for a network of clips.
        times: presentation times (T,) in seconds.
        reader: name of the reader.
        lost: how many of the video's frames cannot be decoded.
        duration: of the video, in seconds.
        pictures: the frames, small and as JPEG files, if they were asked for.
    """

    crops: tuple[np.ndarray, ...]
    times: np.ndarray
    reader: str
    lost: int
    duration: float
    pictures: tuple[bytes, ...] = ()


def decode_video(
    path: VideoPath, sampling: Sampling, views: Sequence[View], reader: str, pictures: bool = False
) -> Decoded:
    """Read, cut and resize what backbones with these ``views`` see of a video; it is decoded once.

    With ``pictures``, small pictures of the frames are kept as well.

    Raises:
        VideoError: it cannot be read; the subclass says why.
    """
    with fetched(path) as file, memory_errors(file):
        return _decode(file, sampling, views, reader, pictures)


def _decode(path: Path, sampling: Sampling, views: Sequence[View], reader: str, pictures: bool) -> Decoded:
    windows = [view.windows(sampling) for view in views]
    whole = sampling.clean or None in windows  # else only what the views see is kept
    sampled = read_frames(
        path,
        sampling,
        reader=reader,
        reduce=shrink if whole else _nothing,
        windows=[*(found for found in windows if found), *([_Stills(reduce=reduced)] if pictures else [])],
    )
    if sampling.clean:
        sampled = sampled.take(useful(sampled.frames))
    rest = iter(sampled.windows)
    crops = []
    for view, window in zip(views, windows, strict=True):
        seen = next(rest) if window else view.prepare(sampled.frames)
        crops.append(seen[:, 0] if isinstance(window, _Stills) else seen)
    return Decoded(
        crops=tuple(crops),
        times=sampled.times,
        reader=sampled.info.reader,
        lost=sampled.info.lost,
        duration=sampled.info.duration,
        pictures=as_jpeg(next(rest)[:, 0]) if pictures else (),
    )


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When the frames of a video are shown.

    Attributes:
        times: (N,) in seconds, ascending.
        duration: in seconds.
        jumps: whether frames far into it can be had without decoding all before them.
    """

    times: np.ndarray
    duration: float
    jumps: bool


@contextmanager
def fetched(path: VideoPath, *, max_bytes: int | None = None, timeout: float | None = None) -> Iterator[Path]:
    """Give the file of a video, fetched from where it is if need be, while the block runs.

    Args:
        path: of the video.
        max_bytes: that may be fetched; None takes the limit for remote objects.
        timeout: seconds for fetching it; None waits for ever.

    Raises:
        VideoError: it cannot be fetched; errors of the block name the video, not its copy.
    """
    if not isinstance(path, Blob):
        yield path
        return
    try:
        with local_copy(path, max_bytes=max_bytes, timeout=timeout) as file:
            try:
                yield file
            except VideoError as error:
                error.message = error.message.replace(str(file), str(path))
                error.path = path
                raise
    except FileNotFoundError as error:
        raise MissingVideoError(path, "there is nothing at this address") from error
    except StorageError as error:
        failed = VideoError(path, error.message.removeprefix(f"{path.url}: "), remedy=error.remedy)
        failed.kind = error.kind
        raise failed from error


def read_timeline(path: VideoPath, reader: str) -> Timeline:
    """Open a video to see when its frames are shown.

    Raises:
        VideoError: it cannot be opened; the subclass says why.
    """
    with fetched(path) as file, open_video(file, reader=reader) as source:
        return Timeline(times=source.frame_times(), duration=source.info.duration, jumps=source.jumps)


def _nothing(frames: np.ndarray) -> np.ndarray:
    return frames[:, :0, :0]
