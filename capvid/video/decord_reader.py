"""The decord reader.

decord's random access (``get_batch``, ``seek_accurate``, ``skip_frames``) silently returns wrong frames: in
every H.264 AVI (its packets have no presentation times to seek by), at open groups of pictures, with intra
refresh, in WMV. Decoding from the first frame with ``next`` is correct in all of these, so this reader never
seeks. Nor does it let decord repeat a frame in place of one that cannot be decoded.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import numpy as np

from capvid.errors import TruncatedVideoError, VideoError
from capvid.utils.validation import limits
from capvid.video.container_kind import kind_of, limit_error, missing_bytes
from capvid.video.frame_source import FrameSource
from capvid.video.probe import (
    aspect_of,
    codec_error,
    codec_of,
    damage_error,
    ffmpeg_log,
    is_mirrored,
    open_container,
    time_zero,
)
from capvid.video.sdr import TRANSFERS

_MAX_TIME = 1e8  # seconds; decord marks missing times with larger ones


class DecordSource(FrameSource):
    """Frame source on decord, with one decoding thread per video; decord applies the file's rotation.

    Raises:
        VideoError: the file cannot be opened; its ``kind`` says why.
    """

    def __init__(self, path: Path, *, why: str = "requested") -> None:
        kind = kind_of(path)
        if kind == "mpeg-ts":
            reason = "decord loses frames of MPEG transport streams"
            raise VideoError(path, reason, remedy="use the reader pyav", kind="unsupported-codec")
        if missing := missing_bytes(path, kind):
            raise TruncatedVideoError(path, f"the file ends {missing} bytes too early", remedy="get it again")
        # decord's FFmpeg has no whitelists of formats and protocols, so PyAV's checks the file first
        with ffmpeg_log():
            container, stream = open_container(path, None)
            self._codec, rotation = codec_of(stream), 0
            mirrored, aspect, own = False, aspect_of(stream), stream.start_time or 0
            start = float((own - min(own, time_zero(kind, container, stream))) * stream.time_base)
            hdr = stream.codec_context.color_trc in TRANSFERS
            if kind == "mp4":  # the only kind that decord rotates
                with suppress(av.FFmpegError, StopIteration):
                    image = next(container.decode(stream))
                    rotation, mirrored = -round(image.rotation / 90) * 90 % 360, is_mirrored(image)
            container.close()
        if hdr or mirrored or aspect != 1:
            problem = "decord shows HDR, mirrored frames and pixels that are not square as they are stored"
            raise VideoError(path, problem, remedy="use the reader pyav", kind="unsupported-codec")
        self._path = path
        self._reader = self._open()
        count, max_frames = len(self._reader), limits().video_frames
        if not count:
            raise VideoError(path, "has no frames", remedy="get it again", kind="empty")
        if count > max_frames:
            raise limit_error(path, f"it has over {max_frames} frames", "video_frames")
        try:
            spans = np.asarray(self._reader.get_frame_timestamp(list(range(count))), np.float64)
        except IndexError as error:  # decord has no times at all
            raise damage_error(path) from error
        times = repair_times(spans, float(self._reader.get_avg_fps()))
        if kind == "mp4":  # decord omits the frames before the edit list's start, which are never displayed
            times = times[times > -1e-4]
        if not len(times):
            raise VideoError(path, "none of its frames is ever shown", remedy="get it again", kind="empty")
        self._first = self._next().asnumpy()
        self._describe(
            times + start,
            self._first,
            path=path,
            reader="decord",
            codec=self._codec,
            rotation=rotation,
            why=why,
        )

    def _open(self) -> Any:
        """Open the file at its first frame."""
        try:
            import decord
        except ImportError as error:  # no wheel for this platform
            problem = "decord, which reads videos, is not installed"
            raise VideoError(
                self._path, problem, remedy="pip install decord", kind="unsupported-codec"
            ) from error
        decord.logging.set_level(decord.logging.QUIET)
        self._position = 0  # index of the frame that the decoder returns next
        try:
            # An absolute path, since decord takes text before a colon for a protocol; and a tolerance so
            # small that one frame repeated for a damaged one is an error.
            return decord.VideoReader(os.path.abspath(self._path), num_threads=1, fault_tol=1e-9)  # noqa: PTH100
        except (decord.DECORDError, RuntimeError, OSError) as error:
            if "cannot find video stream" in str(error):
                raise codec_error(self._path, self._codec) from error
            if "broken metadata" in str(error):
                raise VideoError(self._path, "has no frames", remedy="get it again", kind="empty") from error
            problem = "the file is damaged and cannot be opened"
            raise TruncatedVideoError(self._path, problem, remedy="get it again") from error

    def _decode(self, index: int) -> np.ndarray:
        """Decode frame ``index``, (H, W, 3), from the start of the file if the decoder is past it."""
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
            problem = "the frame size changes within the video"
            raise VideoError(self._path, problem, remedy="convert it, for example with ffmpeg")
        return frame

    def _next(self) -> Any:
        """Decode the next frame, without copying its pixels."""
        import decord
        from decord._ffi.base import DECORDLimitReachedError  # raised for repeated frames

        try:
            frame = self._reader.next()
        except (decord.DECORDError, DECORDLimitReachedError, RuntimeError, StopIteration) as error:
            raise damage_error(self._path) from error
        self._position += 1
        return frame

    def close(self) -> None:
        """Release the file and the decoder."""
        self._reader = None


def repair_times(spans: np.ndarray, fps: float) -> np.ndarray:
    """Return presentation times (N,) from decord's start and end times of the frames, (N, 2).

    Some containers (AVI, MPEG program streams) omit the times of some frames, and decord puts the entries of
    those frames first, whatever their position. Such files have a constant rate, ``fps``, which is used.
    """
    starts = spans[:, 0]
    if (np.abs(starts) < _MAX_TIME).all():
        return np.maximum.accumulate(starts)
    return np.arange(len(starts)) / (fps if 0 < fps < _MAX_TIME else 25.0)
