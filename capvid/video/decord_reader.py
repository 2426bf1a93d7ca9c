"""The decord reader.

decord's random access (``get_batch``, ``seek_accurate``, ``skip_frames``) silently returns wrong frames: in
every H.264 AVI (its packets have no presentation times to seek by), at open groups of pictures, with intra
refresh, in WMV. Decoding from the first frame with ``next`` returns the right ones in all of these, so this
reader never seeks. Nor does it let decord repeat a frame in place of one that cannot be decoded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from capvid.errors import EmptyVideoError, TruncatedVideoError, UnsupportedCodecError, VideoError
from capvid.utils.limits import limits
from capvid.video.container import (
    codec_of,
    exceeds_limit,
    kind_of,
    missing_bytes,
    rotation_of,
    without_decodable_stream,
)
from capvid.video.frame_source import SequentialSource
from capvid.video.packets import listening, opened

_LONGEST = 1e8  # seconds; larger times are the decoder's mark for "none"


class DecordSource(SequentialSource):
    """Frame source on decord, one decoding thread per video; decord turns frames as the file demands.

    Args:
        path: the video.
        why: reason for this reader, for :class:`~capvid.video.frame_source.VideoInfo`.

    Raises:
        VideoError: the file cannot be opened; the subclass says why.
    """

    def __init__(self, path: Path, *, why: str = "asked for") -> None:
        kind = kind_of(path)
        if kind == "mpeg-ts":
            raise UnsupportedCodecError(
                path,
                "decord loses frames of MPEG transport streams",
                remedy="use the reader pyav",
            )
        if missing := missing_bytes(path, kind):
            raise TruncatedVideoError(path, f"the file ends {missing} bytes too early", remedy="get it again")
        # decord's FFmpeg knows no whitelists: PyAV's looks first what it would take the file for
        with listening():
            opened(path, None)[0].close()
        self._path = path
        self._kind = kind
        self._position = 0  # of the frame that the decoder gives next
        self._reader: Any = self._open(kind)
        count = len(self._reader)
        if not count:
            raise EmptyVideoError(path, "has no frames", remedy="get it again")
        if count > (most := limits().video_frames):
            raise exceeds_limit(path, f"it has over {most} frames", "video_frames")
        self._times = repaired_times(
            np.asarray(self._reader.get_frame_timestamp(list(range(count))), np.float64),
            float(self._reader.get_avg_fps()),
        )
        if kind == "mp4":  # what comes before the start of the edit list is never shown, nor given by decord
            self._times = self._times[self._times > -1e-4]
        if not len(self._times):
            raise EmptyVideoError(path, "no frame of it is ever shown", remedy="get it again")
        self._first = self._next()
        self._info = self._make_info(
            path=path,
            reader="decord",
            codec=codec_of(path, kind),
            rotation=rotation_of(path, kind),
            why=why,
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
            # An absolute path, since decord takes what is before a colon for a protocol; and a tolerance
            # so small that one frame repeated for a damaged one is an error.
            return decord.VideoReader(os.path.abspath(self._path), num_threads=1, fault_tol=1e-9)  # noqa: PTH100
        except (decord.DECORDError, RuntimeError, OSError) as error:
            if "cannot find video stream" in str(error):
                raise without_decodable_stream(self._path, kind) from error
            if "broken metadata" in str(error):
                raise EmptyVideoError(self._path, "has no frames", remedy="get it again") from error
            raise TruncatedVideoError(
                self._path, "the file is damaged and cannot be opened", remedy="get it again"
            ) from error

    def _frame(self, index: int) -> np.ndarray:
        """Decode frame ``index``, (H, W, 3), from the start again if the decoder is past it."""
        if self._reader is None:
            raise VideoError(self._path, "the reader is closed already")
        if index == 0:
            return self._first
        if index < self._position:
            self._reader, self._position = self._open(self._kind), 0
        while self._position < index:
            self._next(keep=False)
        frame = self._next()
        if frame.shape != self._first.shape:
            raise VideoError(self._path, "its picture size changes", remedy="convert it, say with ffmpeg")
        return frame

    def _next(self, *, keep: bool = True) -> np.ndarray:
        """Decode one more frame; its pixels are copied only if ``keep``."""
        import decord
        from decord._ffi.base import DECORDLimitReachedError  # raised for repeated frames

        try:
            frame = self._reader.next()
        except (decord.DECORDError, DECORDLimitReachedError, RuntimeError, StopIteration) as error:
            raise TruncatedVideoError(
                self._path, "the video's data are damaged or end too early", remedy="get it again"
            ) from error
        self._position += 1
        return frame.asnumpy() if keep else np.empty(0, np.uint8)

    def close(self) -> None:
        """Release the file and the decoder."""
        self._reader = None


def repaired_times(spans: np.ndarray, fps: float) -> np.ndarray:
    """Return presentation times (N,) from decord's start and end times of the frames, (N, 2).

    Some containers (AVI, MPEG program streams) omit the times of some frames, and decord puts the entries of
    those frames first, whatever their position. Such files have a constant rate, ``fps``, used instead.
    """
    starts = spans[:, 0]
    if (np.abs(starts) < _LONGEST).all():
        return np.maximum.accumulate(starts)
    return np.arange(len(starts)) / (fps if 0 < fps < _LONGEST else 25.0)
