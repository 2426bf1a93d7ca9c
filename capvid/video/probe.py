"""Inspection of a video file before it is decoded: its first bytes and boxes, then its packets.

FFmpeg conceals damage as well as it can and seldom marks the images that it has reconstructed. Only its log
reveals damage reliably, so it is captured around every call that can log.

Notation for array shapes: N packets of the video stream, in the order of decoding.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import stat
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import av
import av.logging
import numpy as np
from av.sidedata.sidedata import Type

from capvid.errors import TruncatedVideoError, VideoError
from capvid.utils.files import open_regular
from capvid.utils.validation import limits

_HEAD_BYTES = 1 << 16
_MAX_BOXES = 1_000_000  # a day of fragmented video has fewer
_TS_PACKETS = 16  # number of transport packets to check
_MP4_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp"}
_STARTS = {
    b"\x1a\x45\xdf\xa3": "matroska",
    b"FLV\x01": "flv",
    b"OggS": "ogg",
    b"\x00\x00\x01\xba": "mpeg-ps",
    b"\x00\x00\x01\xb3": "mpeg",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "asf",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"\x00\x00\x00\x01\x67": "h264",
}
_NAMES = {"mpeg1video": "mpeg1", "mpeg2video": "mpeg2", "libdav1d": "av1"}
_REORDERED = ("h264", "hevc")  # codecs for which AVI has no presentation times; FFmpeg makes them up
_MIN_GAP = 1.5  # frame durations
_DEMUXERS = {  # FFmpeg's name for each kind of container
    **{kind: kind for kind in ("asf", "avi", "flv", "gif", "h264", "matroska", "ogg")},
    "mp4": "mov",
    "mpeg": "mpegvideo",
    "mpeg-ps": "mpeg",
    "mpeg-ts": "mpegts",
    "webp": "webp_pipe",
}
_UNKNOWN = -(1 << 63)  # time or position that the container lacks
_MAX_TICKS = 1 << 61  # differences between times within it do not overflow
_CLAP = re.compile(rb"\0\0\0\x28clap(.{16})", re.DOTALL)
_MAX_ASPECT = 10
_TOO_MANY_PIXELS = re.compile(r"Picture size (\d+)x(\d+) exceeds")

Messages = list[tuple[int, str, str]]  # level, source, text

logging.getLogger("libav").addHandler(logging.NullHandler())  # keeps its messages from stderr


def kind_of(path: Path) -> str:
    """Return the container kind of a regular file: mp4, matroska, avi, and so on.

    Raises:
        VideoError: the file is missing, unreadable or not a video, or its index is larger than the limit.
        TruncatedVideoError: the file is an MP4 that ends before its index.
    """
    try:  # without opening the file: a pipe would block until its other end is opened
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: a NUL in the name
        raise VideoError(path, "no such file", remedy="check the name", kind="missing") from error
    except OSError as error:
        reason, remedy = f"cannot be read ({error.strerror})", "check whether its folder can be read"
        if error.errno == errno.ELOOP:
            reason, remedy = "is a circular symbolic link", "give the file itself"
        raise VideoError(path, reason, remedy=remedy) from error
    if stat.S_ISDIR(mode):
        raise VideoError(path, "is a folder")
    if not stat.S_ISREG(mode):
        raise VideoError(path, "is a pipe, socket or device", remedy="save the video in a file first")
    if not os.access(path, os.R_OK):
        raise VideoError(path, "cannot be read by this user", remedy="change its permissions")
    head = _head(path)
    if not head:
        raise VideoError(path, "the file is empty", remedy="get it again", kind="empty")
    kind = _sniff(head)
    if kind is None:
        raise VideoError(
            path, "not a video file", remedy="no known video format begins like this", kind="not-a-video"
        )
    if kind == "mp4":
        boxes = ((at, length) for at, length, name in _boxes(path) if name in (b"moov", b"moof"))
        at, length = next(boxes, (0, math.inf))
        if at + length > path.stat().st_size:
            raise TruncatedVideoError(path, "the file ends before its index (moov)", remedy="get it again")
        if length > limits().header_bytes:
            raise limit_error(path, f"its index (moov) has {length} bytes", "header_bytes")
    return kind


def limit_error(path: Path, reason: str, limit: str) -> VideoError:
    """Return the error for a file that exceeds ``limit``, a field of ``Limits``."""
    problem = f"{reason}, more than the limit of {getattr(limits(), limit)}"
    return VideoError(path, problem, remedy=f"raise CAPVID_LIMIT_{limit.upper()} if you trust the file")


def missing_bytes(path: Path, kind: str) -> int:
    """Return how many bytes are missing according to the file's headers; 0 if complete or unknown."""
    size = path.stat().st_size
    head = _head(path)
    if kind == "mp4":
        return max([0, *(at + length - size for at, length, name in _boxes(path) if name == b"mdat")])
    if kind == "avi":
        declared = int.from_bytes(head[4:8], "little")
        missing = declared + 8 - size if declared < 0xFFFFFFF0 else 0
        return missing if missing > 1 else 0  # the padding byte at the end is often missing
    start = head.find(b"\x18\x53\x80\x67", 0, 256) + 4 if kind == "matroska" else 0  # the segment's size
    if start < 4 or len(head) < start + 8 or not head[start]:
        return 0
    width = 9 - head[start].bit_length()
    unknown = (1 << 7 * width) - 1
    length = int.from_bytes(head[start : start + width], "big") & unknown
    return max(0, start + width + length - size) if length != unknown else 0


def _head(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise VideoError(path, f"cannot be read ({error.strerror})") from error


def _sniff(head: bytes) -> str | None:
    """Return the container kind by the first bytes of a file; None if it is unknown."""
    # a styp box of over 16 MiB is bogus: FFmpeg could take its text for a session description (SDP)
    if head[4:8] in _MP4_BOXES and not (head[4:8] == b"styp" and head[0]):
        return "mp4"
    for start, kind in _STARTS.items():
        if head.startswith(start):
            return kind
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"WEBP"):
        return head[8:12].decode().strip().lower()
    for size, first in ((188, 0), (192, 4)):  # MPEG transport streams: packets of constant size
        sync_bytes = head[first::size][:_TS_PACKETS]
        # some packets may be damaged, but text may contain two G at the right offsets as well
        if sync_bytes.startswith(b"GG") and 2 * sync_bytes.count(b"G") >= len(sync_bytes):
            return "mpeg-ts"
    return None


def _boxes(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield offset, declared length and name of an MP4's outermost boxes."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        offset = 0
        for _ in range(_MAX_BOXES):
            if offset + 8 > size:
                break
            file.seek(offset)
            header = file.read(16)
            length, name = int.from_bytes(header[:4], "big"), header[4:8]
            if length == 1:
                length = int.from_bytes(header[8:16], "big")
            elif length == 0:
                length = size - offset
            if length < 8:
                break
            yield offset, length, name
            offset += length


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
    fields: bool  # whether an image may take two packets, one for each field
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
            seconds = (np.sort(self.pts[numbers]) - self.start) * self.unit
            # where two frames are equally near to a sampled time, this rounding decides between them, as it
            # did for the features that captioners were trained on
            return seconds.astype(np.float32).astype(np.float64)
        if self.dts is None:
            return np.sort(numbers) / self.fps
        steps = np.sort(self.dts[numbers]) - self.start
        return np.round(steps * self.unit * self.fps, 3) / self.fps


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
    demuxer = None if kind is None else _DEMUXERS[kind]
    formats = demuxer or ",".join(_DEMUXERS.values())
    whitelists = {"protocol_whitelist": "file", "format_whitelist": formats}
    with av.logging.Capture() as messages:
        try:
            # FFmpeg takes text before a colon for a protocol, except in absolute paths
            container = av.open(os.path.abspath(path), format=demuxer, options=whitelists | max_pixels)  # noqa: PTH100
        except MemoryError:
            raise
        except (av.FFmpegError, OSError, ValueError) as error:
            reason = "the file is damaged and cannot be opened"
            raise TruncatedVideoError(path, reason, remedy="get it again") from error
    try:
        stream = container.streams.best("video")
        if stream is None:
            raise VideoError(
                path, "has no video stream", remedy="give a file with images", kind="no-video-stream"
            )
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


def _clean_aperture(path: Path) -> tuple[int, int] | None:
    """Return width and height of the clean aperture in an MP4 (``clap``), which PyAV does not show."""
    with path.open("rb") as file:
        for at, length, name in _boxes(path):
            if name == b"moov":
                file.seek(at)
                match = _CLAP.search(file.read(min(length, limits().header_bytes)))
                if match:
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


def scan(path: Path, kind: str) -> Packets:
    """Read all packets of a video in a container of this kind.

    Raises:
        VideoError: the file cannot be opened, or has no frames.
    """
    with ffmpeg_log() as messages:
        container, stream = open_container(path, kind)
        with container:
            messages.clear()
            table, suspects = _read_packets(path, kind, container, stream, messages)
            return _examine(path, kind, container, stream, table, suspects)


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
            if any(_DEMUXERS[kind] in name.split(",") for name in sources):
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
    path: Path, kind: str, container: Any, stream: Any, table: np.ndarray, suspects: set[int]
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
    if missing:
        suspects.add(count - 1)
    facts = _Facts(path, container, stream, table, pts, dts, num_visible, missing, suspects)
    pts, dts, expected = _EXAMINERS.get(kind, _examine_other)(facts)
    suspects = {number for number in suspects if 0 <= number < count}
    stamps = dts if pts is None else pts
    first = 0 if stamps is None else int(stamps[visible].min())
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
        start=time_zero(kind, container, stream, first),
        fps=float(rate or stream.guessed_rate or 25),
        expected=max(num_visible, expected),
        suspects=frozenset(suspects),
        damaged=bool(suspects) or expected > num_visible,
        fields=kind in ("mpeg-ts", "mpeg-ps") and pts is not None and _halves(pts, stream),
        aspect=aspect_of(stream),
        clean_aperture=_clean_aperture(path) if kind == "mp4" else None,
    )


def _halves(pts: np.ndarray, stream: Any) -> bool:
    """Return whether packets are half an image's duration apart."""
    rate = stream.average_rate
    steps = np.diff(np.sort(pts))
    return bool(rate and len(steps) and np.median(steps) * float(stream.time_base * rate) < 0.75)


def time_zero(kind: str, container: Any, stream: Any, first: int) -> int:
    """Return the time zero of a file in ticks of a stream, whose first image has the time ``first``.

    As for players and ``ffmpeg -ss``, it is the start of the stream that starts first, often the sound.
    """
    own = stream.start_time or 0
    start = own if container.start_time is None else container.start_time / av.time_base / stream.time_base
    if abs(start - own) * stream.time_base < 2e-6:  # the container's time is rounded to microseconds
        start = own
    if kind == "mp4":
        start = max(0, start)  # what is before zero, such as the lead-in of a sound, is not played
    return max(-_MAX_TICKS, min(_MAX_TICKS, first, round(start)))


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
    boxes = [name for _, _, name in _boxes(facts.path)]
    count = facts.table.shape[1]
    if b"moof" in boxes and not all(name.isalnum() for name in boxes):
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
