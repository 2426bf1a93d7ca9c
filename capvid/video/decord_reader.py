"""The decord reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from capvid.errors import EmptyVideoError, TruncatedVideoError, UnsupportedCodecError, VideoError
from capvid.video.container import codec_of, kind_of, without_decodable_stream
from capvid.video.source import VideoInfo

_LONGEST = 1e8  # seconds; times beyond are the decoder's mark for "none"


class DecordSource:
    """A :class:`~capvid.video.source.FrameSource` on decord, one decoding thread per video.

    decord turns frames by the rotation that the file asks for.

    Raises:
        VideoError: the file cannot be opened; the subclass says why.
    """

    def __init__(self, path: Path) -> None:
        kind = kind_of(path)
        self._path = path
        self._reader: Any = self._open(kind)
        count = len(self._reader)
        if not count:
            raise EmptyVideoError(path, "has no frames", remedy="get it again")
        self._times = repaired_times(
            np.asarray(self._reader.get_frame_timestamp(list(range(count))), np.float64),
            float(self._reader.get_avg_fps()),
        )
        height, width = self._decode([0]).shape[1:3]
        duration = float(self._times[-1] - self._times[0] + _frame_duration(self._times))
        self._info = VideoInfo(
            path=path,
            reader="decord",
            codec=codec_of(path, kind),
            width=width,
            height=height,
            num_frames=count,
            duration=duration,
            fps=count / duration if duration else 0.0,
        )

    def _open(self, kind: str) -> Any:
        try:
            import decord
        except ImportError as error:  # no wheel for this platform
            raise UnsupportedCodecError(
                self._path, "decord, which reads videos, is not installed", remedy="pip install decord"
            ) from error
        decord.logging.set_level(decord.logging.QUIET)
        try:
            return decord.VideoReader(str(self._path), num_threads=1)
        except (decord.DECORDError, RuntimeError, OSError) as error:
            if "cannot find video stream" in str(error):
                raise without_decodable_stream(self._path, kind) from error
            if "broken metadata" in str(error):
                raise EmptyVideoError(self._path, "has no frames", remedy="get it again") from error
            raise TruncatedVideoError(
                self._path, "the file is damaged and cannot be opened", remedy="get it again"
            ) from error

    @property
    def info(self) -> VideoInfo:
        """What is known about the video."""
        return self._info

    def frame_times(self) -> np.ndarray:
        """Presentation times (N,) of all frames in seconds, ascending."""
        return self._times

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode frames by index: (T, H, W, 3) uint8 RGB, in the order asked for."""
        distinct, back = np.unique(np.asarray(indices, np.int64), return_inverse=True)
        frames = self._decode(distinct.tolist())
        return frames if len(distinct) == len(indices) and (np.diff(back) == 1).all() else frames[back]

    def _decode(self, indices: list[int]) -> np.ndarray:
        import decord

        if self._reader is None:
            raise VideoError(self._path, "the reader is closed already")
        try:
            return self._reader.get_batch(indices).asnumpy()
        except (decord.DECORDError, RuntimeError) as error:
            raise TruncatedVideoError(
                self._path, "the video's data are damaged or end too early", remedy="get it again"
            ) from error

    def close(self) -> None:
        """Let go of the file and the decoder."""
        self._reader = None

    def __enter__(self) -> DecordSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _frame_duration(times: np.ndarray) -> float:
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def repaired_times(spans: np.ndarray, fps: float) -> np.ndarray:
    """Presentation times (N,) from the start and end (N, 2) that decord gives for each frame.

    Some containers (AVI, MPEG program streams) leave out the times of some frames, and decord puts those
    frames' entries first, whatever their place. Such files have a constant rate, ``fps``, which then says
    when frames are shown.
    """
    starts = spans[:, 0]
    if (np.abs(starts) < _LONGEST).all():
        return np.maximum.accumulate(starts)
    return np.arange(len(starts)) / (fps if 0 < fps < _LONGEST else 25.0)
