"""Inspection of the packets of a video before they are decoded.

FFmpeg conceals damage as well as it can and seldom marks the images that it has reconstructed. Only its log
reveals damage reliably, so it is captured around every call that can log.

Notation for array shapes: N packets of the video stream, in the order of decoding.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import av
import av.logging
import numpy as np
from av.sidedata.sidedata import Type
from av.stream import Disposition

from capvid.errors import TruncatedVideoError, VideoError
from capvid.utils.validation import limits
from capvid.video.container_kind import (
    DEMUXERS,
    RAW,
    boxes,
    composition_offsets,
    index_of_mp4,
    limit_error,
    missing_bytes,
)
from capvid.video.remote_file import stream_of

_NAMES = {"mpeg1video": "mpeg1", "mpeg2video": "mpeg2", "libdav1d": "av1"}
_REORDERED = ("h264", "hevc")  # codecs for which AVI has no presentation times; FFmpeg makes them up
_MIN_GAP = 1.5  # frame durations
_MPEG = ("mpeg-ts", "mpeg-ps", "flv")  # kinds in which fields may have packets of their own
_UNKNOWN = -(1 << 63)  # time or position that the container lacks
_MAX_TICKS = 1 << 61  # differences between times within it do not overflow
_CLAP = re.compile(rb"\0\0\0\x28clap(.{16})", re.DOTALL)
_MAX_ASPECT = 10
_MIN_INDEXED = 16 << 20  # bytes of a file from which on its index saves time
_CHECKED = 8  # packets that must agree with the index
_TOO_MANY_PIXELS = re.compile(r"Picture size (\d+)x(\d+) exceeds")

Messages = list[tuple[int, str, str]]  # level, source, text

logging.getLogger("libav").addHandler(logging.NullHandler())  # keeps its messages from stderr


@contextmanager
def ffmpeg_log() -> Iterator[Messages]:
    """Collect FFmpeg's error messages in this thread instead of printing them."""
    av.logging.set_level(av.logging.ERROR)
    av.logging.set_skip_repeated(False)
    with av.logging.Capture() as messages:
        yield messages


@dataclass(frozen=True, kw_only=True)
class Packets:
    """The packets of a video's best video stream."""

    path: Path
    kind: str  # of the container
    codec: str
    pts: np.ndarray | None  # presentation times (N,) in ``unit``; None if the container lacks them
    dts: np.ndarray | None  # decoding times (N,) in ``unit``; None if the container lacks them
    keys: np.ndarray  # (N,): whether decoding can start at the packet
    visible: np.ndarray  # (N,): whether its image is displayed, which edit lists may prevent
    unit: float  # seconds per tick
    start: int  # time zero of the file, in ``unit``
    fps: float  # nominal frame rate
    expected: int  # number of images to be displayed, according to the file's headers
    suspects: frozenset[int]  # numbers of packets that are incomplete or next to missing ones
    damaged: bool  # whether data are missing or wrong
    uncertain: bool  # whether only decoding tells which packets give images
    aspect: Fraction  # width of a stored pixel / its height
    clean_aperture: tuple[int, int] | None  # width and height that the container wants shown

    @cached_property
    def order(self) -> np.ndarray | None:
        """Numbers of the visible packets in presentation order; None if it is unknown."""
        if self.pts is None:
            return None
        visible = np.flatnonzero(self.visible)
        return visible[np.argsort(self.pts[visible], kind="stable")]

    def number_of(self, pts: int | None) -> int:
        """Return the number of the packet with this presentation time, or -1."""
        if self.pts is None or pts is None:
            return -1
        numbers = np.flatnonzero(self.pts == pts)
        return int(numbers[0]) if len(numbers) else -1

    def times(self, numbers: np.ndarray | None = None) -> np.ndarray:
        """Return the presentation times of packets, by default all visible ones, in seconds, ascending.

        If there are none, a constant rate is assumed, with gaps where decoding times have gaps.
        """
        numbers = np.flatnonzero(self.visible) if numbers is None else numbers
        if self.pts is not None:
            seconds = self._from_zero(self.pts[numbers]) * self.unit
            # where two frames are equally near to a sampled time, this rounding decides between them, as it
            # did for the features that captioners were trained on
            return seconds.astype(np.float32).astype(np.float64)
        if self.dts is None:
            return (np.sort(numbers) - min(numbers, default=0)) / self.fps
        return np.round(self._from_zero(self.dts[numbers]) * self.unit * self.fps, 3) / self.fps

    def _from_zero(self, stamps: np.ndarray) -> np.ndarray:
        """Return ascending times in ticks, none of them before 0, which FFmpeg may place too late."""
        stamps = np.sort(stamps)
        return stamps - min(self.start, int(stamps[0]) if len(stamps) else 0)


def open_container(path: Path, kind: str | None) -> Any:
    """Open a file with PyAV, and return the container and its best video stream, decoded by one thread.

    FFmpeg may open only this file, with a demuxer that follows no references, and allocate frames up to the
    limit. If ``kind`` is None, it chooses among the known kinds.

    Raises:
        VideoError: there is no video stream, it cannot be decoded, or its frames are larger than the limit.
        TruncatedVideoError: the file is too damaged to be opened.
    """
    # FFmpeg counts padded lines, so its own limit has to be higher
    max_pixels = {"max_pixels": str(min(2 * limits().frame_pixels, (1 << 31) - 1))}
    demuxer = None if kind is None else DEMUXERS[kind]
    formats = demuxer or ",".join(DEMUXERS.values())
    whitelists = {"protocol_whitelist": "file", "format_whitelist": formats}
    with av.logging.Capture() as messages:
        try:
            # FFmpeg takes text before a colon for a protocol, except in absolute paths
            container = av.open(
                stream_of(path) or os.path.abspath(path),  # noqa: PTH100
                format=demuxer,
                options=whitelists | max_pixels,
                metadata_errors="replace",
            )
        except MemoryError:
            raise
        except (av.FFmpegError, OSError, ValueError) as error:
            reason = "the file is damaged and cannot be opened"
            raise TruncatedVideoError(path, reason, remedy="get it again") from error
    try:
        stream = container.streams.best("video")
        if stream is None:
            problem = "has sound, but no video" if container.streams.audio else "has no video stream"
            raise VideoError(path, problem, remedy="give a file with images", kind="no-video-stream")
        if stream.disposition & Disposition.attached_pic:
            problem = "has sound and a cover image, but no video"
            raise VideoError(path, problem, remedy="give a video", kind="no-video-stream")
        if stream.codec_context is None:
            raise codec_error(path)
        context: Any = stream.codec_context
        width, height = context.width, context.height
        refused = [match for _, _, text in messages if (match := _TOO_MANY_PIXELS.search(text))]
        if not width * height and refused:  # the container lacks the size, but the decoder has read it
            width, height = int(refused[0][1]), int(refused[0][2])
        if width * height > limits().frame_pixels:
            raise limit_error(path, f"its frames have {width} x {height} pixels", "frame_pixels")
    except VideoError:
        container.close()
        raise
    context.options = max_pixels
    context.thread_type = "NONE"
    context.thread_count = 1
    return container, stream


def demux(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream, and an empty one at the end."""
    # PyAV raises IndexError at the end, instead of the empty packet, if streams appeared after opening
    with suppress(IndexError):
        yield from container.demux(stream)


def aspect_of(stream: Any) -> Fraction:
    """Return the width of a stored pixel / its height; 1 if it is unknown or absurd."""
    aspect = stream.sample_aspect_ratio
    return aspect if aspect and 1 / _MAX_ASPECT <= aspect <= _MAX_ASPECT else Fraction(1)


def is_mirrored(image: Any) -> bool:
    """Return whether an image has to be mirrored, top to bottom, before it is rotated."""
    try:
        a, b, _, c, d = struct.unpack_from("=5i", bytes(image.side_data[Type.DISPLAYMATRIX]))
    except (KeyError, ValueError):  # ValueError: beside data of a kind that PyAV does not know
        return False
    return bool(a * d < b * c)


def _clean_aperture(index: bytes) -> tuple[int, int] | None:
    """Return width and height of the clean aperture in the index of an MP4, which PyAV does not show."""
    if match := _CLAP.search(index):
        width, w, height, h = struct.unpack(">4I", match[1])
        return (width // w, height // h) if w and h else None
    return None


def codec_error(path: Path, codec: str = "") -> VideoError:
    """Return the error for a codec that the reader lacks."""
    problem = f"its codec{codec and f' ({codec})'} cannot be decoded here"
    return VideoError(
        path, problem, remedy="convert it to H.264, for example with ffmpeg", kind="unsupported-codec"
    )


def damage_error(path: Path) -> VideoError:
    """Return the error for frames that cannot be decoded."""
    return TruncatedVideoError(path, "the video's data are damaged or end too early", remedy="get it again")


def codec_of(stream: Any) -> str:
    """Return the name of a stream's codec."""
    name = str(stream.codec_context.name)
    return _NAMES.get(name, name)


def scan(path: Path, kind: str, *, trust: bool = True) -> Packets:
    """List the packets of a video in a container of this kind.

    The index of a large MP4 is believed if ``trust`` is set and the file is not cut off, so that damage is
    found when frames are decoded. In all other cases every packet is read.

    Raises:
        VideoError: the file cannot be opened, or has no frames.
    """
    index = index_of_mp4(path) if kind == "mp4" else b""
    with ffmpeg_log() as messages:
        if trust and index and path.stat().st_size >= _MIN_INDEXED:
            container, stream = open_container(path, kind)
            with container:
                if (table := _index_table(path, index, container, stream)) is not None:
                    return _examine(path, kind, container, stream, table, set(), index)
        container, stream = open_container(path, kind)
        with container:
            messages.clear()
            table, suspects = _read_packets(path, kind, container, stream, messages)
            return _examine(path, kind, container, stream, table, suspects, index)


def _index_table(path: Path, index: bytes, container: Any, stream: Any) -> np.ndarray | None:
    """Return the table of :func:`_read_packets` from the index of an MP4; None if it is not reliable.

    FFmpeg's index has decoding times after edit lists were applied, and no presentation times, whose offsets
    are taken from the box ``ctts``. The first packets must confirm them.
    """
    entries = stream.index_entries
    count, max_frames = len(entries), limits().video_frames
    if count > max_frames:
        raise limit_error(path, f"it has over {max_frames} frames", "video_frames")
    if not count or any(name == b"moof" for _, _, name in boxes(path)):
        return None
    offsets = composition_offsets(index, stream.id, count)
    if offsets is None:
        return None
    rows = [
        (entry.timestamp, entry.pos, entry.is_keyframe, not entry.is_discard, entry.size) for entry in entries
    ]
    dts, positions, keys, visible, sizes = np.array(rows, np.int64).T
    if (positions + sizes).max() > path.stat().st_size or not (sizes > 0).all():
        return None
    pts = dts + offsets + max(0, -int(offsets.min()))
    checked = list(islice((packet for packet in demux(container, stream) if packet.size), _CHECKED))
    if [(packet.pts, packet.dts) for packet in checked] != list(
        zip(pts[:_CHECKED].tolist(), dts[:_CHECKED].tolist(), strict=True)
    ):
        return None
    return np.stack([pts, dts, positions, keys, visible])


def _read_packets(
    path: Path, kind: str, container: Any, stream: Any, messages: Messages
) -> tuple[np.ndarray, set[int]]:
    """Return pts, dts, position, key and visible, (5, N), of all packets, and the numbers of suspects."""
    max_frames = limits().video_frames
    codec, parser = stream.codec_context.name, codec_of(stream)
    table, suspects, number = array("q"), set(), 0
    try:
        for packet in demux(container, stream):
            if number > max_frames:
                raise limit_error(path, f"it has over {max_frames} frames", "video_frames")
            # a parser's message concerns this packet, a container's message a gap after the last one
            sources = {name for _, name, _ in messages}
            messages.clear()
            if codec in sources or parser in sources:
                suspects.add(number)
            if any(DEMUXERS[kind] in name.split(",") for name in sources):
                suspects.add(number - 1)
            if not packet.size:
                continue
            if packet.is_corrupt:
                suspects.add(number)
            # VP8 has images that serve only as references for others
            hidden = codec == "vp8" and not memoryview(packet)[0] & 0x10
            stamps = (packet.pts, packet.dts, packet.pos)
            table.extend(_UNKNOWN if stamp is None else stamp for stamp in stamps)
            table.extend((packet.is_keyframe, not (packet.is_discard or hidden)))
            number += 1
    except MemoryError:
        raise
    except (av.FFmpegError, OSError, ValueError):
        suspects.add(number - 1)
    return np.array(table, np.int64).reshape(-1, 5).T.copy(), suspects


def _examine(
    path: Path,
    kind: str,
    container: Any,
    stream: Any,
    table: np.ndarray,
    suspects: set[int],
    index: bytes,
) -> Packets:
    """Return the packets of a table (5, N), with corrected times and signs of damage."""
    keys, visible = table[3:].astype(bool)
    count = len(keys)
    unknown = [((stamps < -_MAX_TICKS) | (stamps > _MAX_TICKS)).any() for stamps in table[:2]]
    pts = None if unknown[0] or len(np.unique(table[0])) < count else table[0]
    dts = None if unknown[1] else table[1]
    if kind == "mp4" and pts is not None:
        visible &= (
            pts >= 0
        )  # in fragmented files, FFmpeg leaves it to players to hide what an edit list hides
    if not (num_visible := int(visible.sum())):
        reason = "none of its frames is ever shown" if count else "has no frames"
        raise VideoError(path, reason, remedy="get it again", kind="empty")
    missing = missing_bytes(path, kind) > 0
    if kind == "mp4" and missing and stream.index_entries:  # the box may be longer than what is in it
        missing = max(entry.pos + entry.size for entry in stream.index_entries) > path.stat().st_size
    if missing:
        suspects.add(count - 1)
    facts = _Facts(path, container, stream, table, pts, dts, num_visible, missing, suspects)
    pts, dts, expected = _EXAMINERS.get(kind, _examine_other)(facts)
    suspects = {number for number in suspects if 0 <= number < count}
    rate = stream.average_rate
    return Packets(
        path=path,
        kind=kind,
        codec=codec_of(stream),
        pts=pts,
        dts=dts,
        keys=keys,
        visible=visible,
        unit=float(stream.time_base or 1),
        start=time_zero(kind, container, stream),
        fps=float(rate or stream.guessed_rate or 25),
        expected=max(num_visible, expected),
        suspects=frozenset(suspects),
        damaged=bool(suspects) or expected > num_visible,
        uncertain=kind in RAW or (kind in _MPEG and pts is not None and _fields(pts, stream)),
        aspect=aspect_of(stream),
        clean_aperture=_clean_aperture(index),
    )


def _fields(pts: np.ndarray, stream: Any) -> bool:
    """Return whether packets are half an image's duration apart: each field has one of its own."""
    rate = stream.average_rate
    steps = np.diff(np.sort(pts))
    return bool(rate and len(steps) and np.median(steps) * float(stream.time_base * rate) < 0.75)


def time_zero(kind: str, container: Any, stream: Any) -> int:
    """Return the time zero of a file in ticks of a stream.

    As for players and ``ffmpeg -ss``, it is the start of the stream that starts first, often the sound, or
    the first image if that is earlier than what this returns.
    """
    own = stream.start_time or 0
    start = own if container.start_time is None else container.start_time / av.time_base / stream.time_base
    if abs(start - own) * stream.time_base < 2e-6:  # the container's time is rounded to microseconds
        start = own
    if kind != "mp4" and len(container.streams) == 1:
        return _MAX_TICKS  # a lone stream starts with its first image, whatever FFmpeg makes of its delay
    if kind == "mp4":
        start = max(0, start)  # what is before zero, such as the lead-in of a sound, is not played
    return max(-_MAX_TICKS, min(_MAX_TICKS, round(start)))


class _Facts(NamedTuple):
    """What the packets of a video say, before it is known what its container lies about."""

    path: Path
    container: Any
    stream: Any
    table: np.ndarray  # pts, dts, position, key and visible, (5, N)
    pts: np.ndarray | None  # (N,); None if some are unknown or equal
    dts: np.ndarray | None  # (N,); None if some are unknown
    num_visible: int
    missing: bool  # whether the file is shorter than its headers say
    suspects: set[int]  # numbers of packets; the functions below add to them


_Examined = tuple[np.ndarray | None, np.ndarray | None, int]  # pts, dts, and expected number of images


def _examine_other(facts: _Facts) -> _Examined:
    """Believe the packets."""
    return facts.pts, facts.dts, facts.num_visible


def _examine_mp4(facts: _Facts) -> _Examined:
    """MP4: the index counts all images, also hidden ones; reading fragments ends at a damaged box."""
    names = [name for _, _, name in boxes(facts.path)]
    count = facts.table.shape[1]
    if b"moof" in names and not all(name.isalnum() for name in names):
        facts.suspects.add(count - 1)
    return facts.pts, facts.dts, len(facts.stream.index_entries) - (count - facts.num_visible)


def _examine_matroska(facts: _Facts) -> _Examined:
    """Matroska: nothing but the duration says how many images there were."""
    duration, rate = facts.container.duration, facts.stream.average_rate
    if facts.suspects and duration and rate:
        return facts.pts, facts.dts, round(duration / av.time_base * float(rate))
    return _examine_other(facts)


def _examine_avi(facts: _Facts) -> _Examined:
    """AVI: its index has the right decoding times even after lost packets, and no presentation times."""
    stream, table, suspects = facts.stream, facts.table, facts.suspects
    dts, lost = facts.dts, 0
    index = {entry.pos + 8: entry.timestamp for entry in stream.index_entries if entry.size}
    times = [index.get(position) for position in table[2].tolist()]
    if dts is not None and None not in times and len(index) > len(times):
        ranks = {time: rank for rank, time in enumerate(sorted(index.values()))}
        gaps, lost = _find_gaps(np.array([ranks[time] for time in times]), 1.0)
        suspects |= gaps
        dts = np.array(times, np.int64)
    # FFmpeg makes presentation times up, which are right if images are shown in decoding order
    pts = dts if np.array_equal(*table[:2]) and codec_of(stream) not in _REORDERED else None
    if suspects and not lost:
        return pts, dts, int(stream.frames)
    return pts, dts, facts.num_visible + lost


def _examine_mpeg(facts: _Facts) -> _Examined:
    """MPEG streams: a gap between decoding times beside other signs of damage means lost packets."""
    dts, lost = facts.dts, 0
    if facts.suspects and dts is not None and len(dts) > 2:
        gaps, lost = _find_gaps(dts, float(np.median(np.diff(dts))))
        # the rest of the last packet is prepended to the next one
        facts.suspects.update(gaps, (number + 1 for number in gaps))
    return facts.pts, dts, facts.num_visible + lost


_EXAMINERS = {
    "mp4": _examine_mp4,
    "matroska": _examine_matroska,
    "avi": _examine_avi,
    "mpeg-ts": _examine_mpeg,
    "mpeg-ps": _examine_mpeg,
}


def _find_gaps(stamps: np.ndarray, step: float) -> tuple[set[int], int]:
    """Return the packets before gaps in the stamps (N,), and how many packets are missing there."""
    steps = np.diff(stamps)
    if step <= 0:  # most packets have the same time, so that no distance means a gap
        return set(), 0
    gaps = np.flatnonzero(np.abs(steps) > _MIN_GAP * step)
    lost = sum(max(0, round(float(steps[number]) / step) - 1) for number in gaps)
    return {int(number) for number in gaps}, lost
