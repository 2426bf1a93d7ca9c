"""The decord reader.

decord's random access (``get_batch``, ``seek_accurate``, ``skip_frames``) silently returns wrong frames: in
every H.264 AVI (its packets have no presentation times to seek by), at open groups of pictures, with intra
refresh, in WMV. Decoding from the first frame with ``next`` returns the right ones in all of these, so this
reader never seeks. Nor does it let decord repeat a frame in place of one that cannot be decoded.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import numpy as np

from capvid.errors import EmptyVideoError, TruncatedVideoError, UnsupportedCodecError, VideoError
from capvid.utils.validation import limits
from capvid.video.frame_source import FrameSource
from capvid.video.probe import (
    codec_of,
    damaged_data,
    exceeds_limit,
    kind_of,
    listening,
    missing_bytes,
    open_container,
    unsupported_codec,
)

_LONGEST = 1e8  # seconds; larger times are the decoder's mark for "none"


class DecordSource(FrameSource):
    """Frame source on decord, one decoding thread per video; decord turns frames as the file demands.

    Raises:
        VideoError: the file cannot be opened; the subclass says why.
    """

    def __init__(self, path: Path, *, why: str = "asked for") -> None:
        kind = kind_of(path)
        if kind == "mpeg-ts":
            reason = "decord loses frames of MPEG transport streams"
            raise UnsupportedCodecError(path, reason, remedy="use the reader pyav")
        if missing := missing_bytes(path, kind):
            raise TruncatedVideoError(path, f"the file ends {missing} bytes too early", remedy="get it again")
        # decord's FFmpeg knows no whitelists: PyAV's looks first what it would take the file for
        with listening():
            container, stream = open_container(path, None)
            self._codec, rotation = codec_of(stream), 0
            if kind == "mp4":  # the only kind that decord turns
                with suppress(av.FFmpegError, StopIteration):
                    rotation = -round(next(container.decode(stream)).rotation / 90) * 90 % 360
            container.close()
        self._path = path
        self._reader = self._open()
        count, max_frames = len(self._reader), limits().video_frames
        if not count:
            raise EmptyVideoError(path, "has no frames", remedy="get it again")
        if count > max_frames:
            raise exceeds_limit(path, f"it has over {max_frames} frames", "video_frames")
        spans = np.asarray(self._reader.get_frame_timestamp(list(range(count))), np.float64)
        times = repaired_times(spans, float(self._reader.get_avg_fps()))
        if kind == "mp4":  # decord omits the frames before the edit list's start: they are never displayed
            times = times[times > -1e-4]
        if not len(times):
            raise EmptyVideoError(path, "no frame of it is ever shown", remedy="get it again")
        self._first = self._next().asnumpy()
        self._describe(
            times, self._first, path=path, reader="decord", codec=self._codec, rotation=rotation, why=why
        )

    def _open(self) -> Any:
        """Open the file, from its first frame on."""
        try:
            import decord
        except ImportError as error:  # no wheel for this platform
            problem = "decord, which reads videos, is not installed"
            raise UnsupportedCodecError(self._path, problem, remedy="pip install decord") from error
        decord.logging.set_level(decord.logging.QUIET)
        self._position = 0  # of the frame that the decoder returns next
        try:
            # An absolute path, since decord takes what is before a colon for a protocol; and a tolerance
            # so small that one frame repeated for a damaged one is an error.
            return decord.VideoReader(os.path.abspath(self._path), num_threads=1, fault_tol=1e-9)  # noqa: PTH100
        except (decord.DECORDError, RuntimeError, OSError) as error:
            if "cannot find video stream" in str(error):
                raise unsupported_codec(self._path, self._codec) from error
            if "broken metadata" in str(error):
                raise EmptyVideoError(self._path, "has no frames", remedy="get it again") from error
            problem = "the file is damaged and cannot be opened"
            raise TruncatedVideoError(self._path, problem, remedy="get it again") from error

    def _decode(self, index: int) -> np.ndarray:
        """Decode frame ``index``, (H, W, 3), from the start again if the decoder is past it."""
        if self._reader is None:
            raise VideoError(self._path, "the reader is closed already")
        if index == 0:
            return self._first
        if index < self._position:
            self._reader = self._open()
        while self._position < index:
            self._next()
        frame: np.ndarray = self._next().asnumpy()
        if frame.shape != self._first.shape:
            raise VideoError(self._path, "its frame size changes", remedy="convert it, say with ffmpeg")
        return frame

    def _next(self) -> Any:
        """Decode one more frame, whose pixels are not copied yet."""
        import decord
        from decord._ffi.base import DECORDLimitReachedError  # raised for repeated frames

        try:
            frame = self._reader.next()
        except (decord.DECORDError, DECORDLimitReachedError, RuntimeError, StopIteration) as error:
            raise damaged_data(self._path) from error
        self._position += 1
        return frame

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
