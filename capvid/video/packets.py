"""Inspection of a video's packets without decoding, with PyAV.

FFmpeg conceals damage as best it can and seldom marks the pictures that it made up. Its log is what reveals
damage reliably, so it is captured around every call that can log.

Notation for array shapes: N packets of the video stream, in the order of decoding.
"""

from __future__ import annotations

import logging
import os
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import av
import av.logging
import numpy as np

from capvid.errors import (
    EmptyVideoError,
    NoVideoStreamError,
    TruncatedVideoError,
    UnsupportedCodecError,
    VideoError,
)
from capvid.utils.limits import limits
from capvid.video.container import breaks_off, exceeds_limit, missing_bytes

_NAMES = {"mpeg1video": "mpeg1", "mpeg2video": "mpeg2", "libdav1d": "av1"}
_REORDERED = ("h264", "hevc")  # codecs whose pictures AVI cannot time: FFmpeg makes times up for them
_STEADY = ("mpeg-ts", "mpeg-ps")  # in damaged ones a gap between times means lost packets
_GAP = 1.5  # frame durations

_DEMUXERS = {  # FFmpeg's name for each kind of container
    "asf": "asf",
    "avi": "avi",
    "flv": "flv",
    "gif": "gif",
    "h264": "h264",
    "matroska": "matroska",
    "mp4": "mov",
    "mpeg": "mpegvideo",
    "mpeg-ps": "mpeg",
    "mpeg-ts": "mpegts",
    "ogg": "ogg",
    "webp": "webp_pipe",
}
_NONE = -(1 << 63)  # time or position that the container does not know
_FAR = 1 << 61  # ticks; differences between times within it do not overflow
_TOO_MANY_PIXELS = re.compile(r"Picture size (\d+)x(\d+) exceeds")

Messages = list[tuple[int, str, str]]  # level, source, text

logging.getLogger("libav").addHandler(logging.NullHandler())  # nothing reaches stderr by itself


@contextmanager
def listening() -> Iterator[Messages]:
    """Collect FFmpeg's error messages of this thread instead of printing them."""
    av.logging.set_level(av.logging.ERROR)
    av.logging.set_skip_repeated(False)
    with av.logging.Capture() as messages:
        yield messages


@dataclass(frozen=True, kw_only=True)
class Packets:
    """The packets of a video's best video stream.

    Attributes:
        path: the file.
        kind: container kind.
        codec: name of the codec.
        pts: presentation times (N,) in ``unit``, None where the container does not know them.
        dts: decoding times (N,) in ``unit``, or None.
        keys: whether decoding can begin at a packet, (N,).
        shown: whether its picture is ever shown, (N,); edit lists and invisible pictures exclude some.
        unit: seconds per tick.
        start: start of the stream, in ``unit``.
        fps: nominal frame rate.
        promised: pictures to be shown by the file's own headers, at least those of ``shown``.
        suspects: packets that are incomplete or next to missing ones.
        damaged: whether the file is not as its writer left it.
    """

    path: Path
    kind: str
    codec: str
    pts: np.ndarray | None
    dts: np.ndarray | None
    keys: np.ndarray
    shown: np.ndarray
    unit: float
    start: int
    fps: float
    promised: int
    suspects: frozenset[int]
    damaged: bool

    @cached_property
    def order(self) -> np.ndarray | None:
        """Numbers of the shown packets in presentation order; None if unknown."""
        if self.pts is None:
            return None
        shown = np.flatnonzero(self.shown)
        return shown[np.argsort(self.pts[shown], kind="stable")]

    @cached_property
    def _by_pts(self) -> np.ndarray:
        assert self.pts is not None
        return np.argsort(self.pts, kind="stable")

    def number_of(self, pts: int | None) -> int:
        """Return the number of the packet with this presentation time, or -1."""
        if self.pts is None or pts is None:
            return -1
        rank = int(np.searchsorted(self.pts, pts, sorter=self._by_pts))
        number = int(self._by_pts[rank]) if rank < len(self.pts) else -1
        return number if number >= 0 and self.pts[number] == pts else -1

    def times(self, numbers: np.ndarray | None = None) -> np.ndarray:
        """Return the presentation times in seconds of packets, by default all shown ones, ascending.

        Without presentation times the rate is constant; decoding times then reveal omitted pictures. Times
        have decord's precision, so that both readers agree.
        """
        numbers = np.flatnonzero(self.shown) if numbers is None else numbers
        if self.pts is not None:
            seconds = (np.sort(self.pts[numbers]) - self.start) * self.unit
            return seconds.astype(np.float32).astype(np.float64)
        if self.dts is None:
            return np.sort(numbers) / self.fps
        steps = np.sort(self.dts[numbers]) - self.dts.min()
        return np.round(steps * self.unit * self.fps, 3) / self.fps


def opened(path: Path, kind: str | None) -> Any:
    """Open a file with PyAV, and its best video stream decoded by one thread: (container, stream).

    FFmpeg may open this file alone, with a demuxer that refers to no other file or address, and allocates
    frames up to the limit.

    Args:
        path: the file.
        kind: container kind, which decides on the demuxer; None lets FFmpeg choose one of the known kinds.

    Raises:
        NoVideoStreamError, UnsupportedCodecError: no stream, or none that can be decoded.
        TruncatedVideoError: the file is too damaged to be opened.
        VideoError: its frames are larger than the limit.
    """
    # FFmpeg counts padded lines, so its own limit has to be higher
    max_pixels = {"max_pixels": str(min(2 * limits().frame_pixels, (1 << 31) - 1))}
    demuxer = None if kind is None else _DEMUXERS[kind]
    whitelists = {
        "protocol_whitelist": "file",
        "format_whitelist": demuxer or ",".join(_DEMUXERS.values()),
    }
    with av.logging.Capture() as messages:
        try:
            # an absolute path, since FFmpeg takes text before a colon for a protocol
            container = av.open(os.path.abspath(path), format=demuxer, options=whitelists | max_pixels)  # noqa: PTH100
        except MemoryError:
            raise
        except (av.FFmpegError, OSError, ValueError) as error:
            raise TruncatedVideoError(
                path, "the file is damaged and cannot be opened", remedy="get it again"
            ) from error
    try:
        stream = container.streams.best("video")
        if stream is None:
            raise NoVideoStreamError(path, "has no video stream", remedy="give a file with pictures")
        if stream.codec_context is None:
            raise UnsupportedCodecError(
                path, "its codec cannot be decoded here", remedy="convert it to H.264, say with ffmpeg"
            )
        context: Any = stream.codec_context
        width, height = context.width, context.height
        refused = [match for _, _, text in messages if (match := _TOO_MANY_PIXELS.search(text))]
        if not width * height and refused:  # the container does not know, but the decoder does
            width, height = int(refused[0][1]), int(refused[0][2])
        if width * height > limits().frame_pixels:
            raise exceeds_limit(path, f"its frames have {width} x {height} pixels", "frame_pixels")
    except VideoError:
        container.close()
        raise
    context.options = max_pixels
    context.thread_type = "NONE"
    context.thread_count = 1
    return container, stream


def scan(path: Path, kind: str) -> Packets:
    """Read all packets of a video in a container of ``kind``.

    Raises:
        VideoError: the file cannot be opened, or has no frames.
    """
    with listening() as messages:
        container, stream = opened(path, kind)
        try:
            messages.clear()
            return _Scan(path, kind, container, stream, messages).packets()
        finally:
            container.close()


class _Scan:
    """State of :func:`scan`: columns of packet properties."""

    def __init__(self, path: Path, kind: str, container: Any, stream: Any, messages: Messages) -> None:
        self._path, self._kind, self._container, self._stream = path, kind, container, stream
        self._messages = messages
        self._codec = stream.codec_context.name
        self._pts, self._dts, self._positions = array("q"), array("q"), array("q")
        self._keys, self._shown = bytearray(), bytearray()
        self._suspects: set[int] = set()
        self._lost = 0  # packets missing between others
        self._demux()

    def _demux(self) -> None:
        max_frames = limits().video_frames
        try:
            for packet in self._container.demux(self._stream):
                number = len(self._keys)
                if number > max_frames:
                    raise exceeds_limit(self._path, f"it has over {max_frames} frames", "video_frames")
                # a parser complains about this packet, the container about a gap that begins in the last one
                sources = {name for _, name, _ in self._messages}
                self._messages.clear()
                if self._codec in sources or _NAMES.get(self._codec) in sources:
                    self._suspects.add(number)
                if any(_DEMUXERS[self._kind] in name.split(",") for name in sources):
                    self._suspects.add(number - 1)
                if not packet.size:
                    continue
                if packet.is_corrupt:
                    self._suspects.add(number)
                # VP8 has pictures that serve only as references for others
                hidden = self._codec == "vp8" and not memoryview(packet)[0] & 0x10
                self._pts.append(_NONE if packet.pts is None else packet.pts)
                self._dts.append(_NONE if packet.dts is None else packet.dts)
                self._positions.append(_NONE if packet.pos is None else packet.pos)
                self._keys.append(packet.is_keyframe)
                self._shown.append(not (packet.is_discard or hidden))
        except MemoryError:
            raise
        except (av.FFmpegError, OSError, ValueError):
            self._suspects.add(len(self._keys) - 1)

    def packets(self) -> Packets:
        count = len(self._keys)
        if not count:
            raise EmptyVideoError(self._path, "has no frames", remedy="get it again")
        pts, dts = np.array(self._pts, np.int64), np.array(self._dts, np.int64)
        keys, shown = np.array(self._keys, bool), np.array(self._shown, bool)
        if not shown.any():
            raise EmptyVideoError(self._path, "no frame of it is ever shown", remedy="get it again")
        decoding = _complete(dts)
        showing = _complete(pts, distinct=True)
        if self._kind == "avi":
            # AVI knows the times only where pictures are shown in the order of decoding
            in_order = np.array_equal(pts, dts) and self._codec not in _REORDERED
            decoding = self._by_index(decoding)
            showing = decoding if in_order else None
        if self._suspects and self._kind in _STEADY and decoding is not None and len(decoding) > 2:
            self._note_gaps(decoding, float(np.median(np.diff(decoding))))
        missing = missing_bytes(self._path, self._kind) > 0
        if missing or breaks_off(self._path, self._kind):
            self._suspects.add(count - 1)
        suspects = frozenset(number for number in self._suspects if 0 <= number < count)
        num_shown = int(shown.sum())
        promised = self._promised(num_shown, count - num_shown, bool(missing or suspects))
        stream = self._stream
        return Packets(
            path=self._path,
            kind=self._kind,
            codec=_NAMES.get(self._codec, self._codec),
            pts=showing,
            dts=decoding,
            keys=keys,
            shown=shown,
            unit=float(stream.time_base or 1),
            start=max(-_FAR, min(_FAR, stream.start_time or 0)),
            fps=float(stream.average_rate or stream.guessed_rate or 25),
            promised=promised,
            suspects=suspects,
            damaged=missing or bool(suspects) or promised > num_shown,
        )

    def _by_index(self, decoding: np.ndarray | None) -> np.ndarray | None:
        """Return decoding times of an AVI by its index, which is right also behind lost packets."""
        index = {entry.pos + 8: entry.timestamp for entry in self._stream.index_entries if entry.size}
        times = [index.get(position) for position in self._positions]
        if decoding is None or any(time is None for time in times) or len(index) <= len(times):
            return decoding
        ranks = {time: rank for rank, time in enumerate(sorted(index.values()))}
        self._note_gaps(np.array([ranks[time] for time in times]), 1.0)
        return np.array(times, np.int64)

    def _note_gaps(self, decoding: np.ndarray, step: float) -> None:
        for number in np.flatnonzero(np.abs(np.diff(decoding)) > _GAP * step):
            self._suspects.add(int(number))
            if self._kind in _STEADY:  # the rest of the last packet is put in front of the next one
                self._suspects.add(int(number) + 1)
            self._lost += max(0, round(float(decoding[number + 1] - decoding[number]) / step) - 1)

    def _promised(self, count: int, hidden: int, damaged: bool) -> int:
        """Return the pictures to be shown, by the index, or by the duration if data are missing."""
        if self._kind == "avi" and self._lost:
            return count + self._lost
        if self._kind == "mp4":  # its index includes pictures that the edit list excludes
            return max(count, len(self._stream.index_entries) - hidden)
        if self._kind == "avi" and damaged:
            return max(count, int(self._stream.frames))
        if self._kind == "matroska" and damaged and self._container.duration and self._stream.average_rate:
            seconds = self._container.duration / av.time_base
            return max(count, round(seconds * float(self._stream.average_rate)))
        return count + self._lost


def _complete(stamps: np.ndarray, *, distinct: bool = False) -> np.ndarray | None:
    """Return the stamps (N,) if all are known and in a sane range, and distinct if required, else None."""
    if (stamps < -_FAR).any() or (stamps > _FAR).any() or (distinct and len(np.unique(stamps)) < len(stamps)):
        return None
    return stamps
