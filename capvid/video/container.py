"""Container inspection from a file's first bytes and boxes, before any decoder touches it."""

from __future__ import annotations

import errno
import math
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from capvid.errors import (
    EmptyVideoError,
    MissingVideoError,
    NotAVideoError,
    NoVideoStreamError,
    TruncatedVideoError,
    UnsupportedCodecError,
    VideoError,
)
from capvid.utils.files import open_regular
from capvid.utils.limits import limits

_HEAD = 1 << 16
_MAX_BOXES = 1_000_000  # a day of fragmented video has fewer
_TS_PACKETS = 16
_MP4_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp"}
_CODECS = {
    "h264": (b"avc1", b"avc3", b"H264", b"h264", b"x264", b"V_MPEG4/ISO/AVC"),
    "hevc": (b"hvc1", b"hev1", b"V_MPEGH/ISO/HEVC"),
    "av1": (b"av01", b"V_AV1"),
    "vp9": (b"vp09", b"V_VP9"),
    "vp8": (b"vp08", b"V_VP8"),
    "mpeg4": (b"mp4v", b"XVID", b"xvid", b"DIVX", b"divx", b"DX50", b"FMP4", b"V_MPEG4/ISO/ASP"),
    "mpeg2": (b"V_MPEG2",),
    "mpeg1": (b"V_MPEG1",),
    "mjpeg": (b"jpeg", b"MJPG"),
    "prores": (b"apch", b"apcn", b"apcs", b"apco"),
    "theora": (b"V_THEORA", b"theora"),
}


def kind_of(path: Path) -> str:
    """Return the container kind of a regular file: mp4, matroska, avi, and so on.

    Raises:
        MissingVideoError, EmptyVideoError, NotAVideoError: no such file, or no video.
        TruncatedVideoError: an MP4 that ends before its index.
        VideoError: the file cannot be read, or its index is larger than the limit.
    """
    try:  # examined by name alone: opening a pipe would wait forever for its other end
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: a NUL in the name
        raise MissingVideoError(path, "no such file", remedy="check the name") from error
    except OSError as error:
        reason, remedy = f"cannot be read ({error.strerror})", "see whether its folder can be"
        if error.errno == errno.ELOOP:
            reason, remedy = "is a link that leads back to itself", "give the file itself"
        raise VideoError(path, reason, remedy=remedy) from error
    if stat.S_ISDIR(mode):
        raise VideoError(path, "is a folder")
    if not stat.S_ISREG(mode):
        raise VideoError(path, "is a pipe, socket or device", remedy="save the video in a file first")
    if not os.access(path, os.R_OK):
        raise VideoError(path, "may not be read by this user", remedy="change its permissions")
    head = _head(path)
    if not head:
        raise EmptyVideoError(path, "the file is empty", remedy="get it again")
    kind = _sniff(head)
    if kind is None:
        raise NotAVideoError(path, "not a video file", remedy="no known video format begins like this")
    if kind == "mp4":
        index = _index_box(path)
        if index is None:
            raise TruncatedVideoError(path, "the file ends before its index (moov)", remedy="get it again")
        _, length = index
        if length > limits().header_bytes:
            raise exceeds_limit(path, f"its index (moov) has {length} bytes", "header_bytes")
    return kind


def exceeds_limit(path: Path, reason: str, limit: str) -> VideoError:
    """Return the error for a file that exceeds ``limit``, a field of :class:`~capvid.utils.limits.Limits`."""
    return VideoError(
        path,
        f"{reason}, more than the limit of {getattr(limits(), limit)}",
        remedy=f"raise CAPVID_LIMIT_{limit.upper()} if you trust the file",
    )


def codec_of(path: Path, kind: str) -> str:
    """Return the video codec by the container's own tag, or "unknown"."""
    text = _index(path) if kind == "mp4" else _head(path)
    codecs = {at: name for name, tags in _CODECS.items() for tag in tags if (at := text.find(tag)) >= 0}
    return codecs[min(codecs)] if codecs else "unknown"


def without_decodable_stream(path: Path, kind: str) -> VideoError:
    """Return the error for a file without video stream, or with one that the reader cannot decode."""
    marks = {"mp4": b"vide", "matroska": b"V_", "avi": b"vids"}
    text = _index(path) if kind == "mp4" else _head(path)
    if kind in marks and marks[kind] not in text:
        return NoVideoStreamError(path, "has no video stream", remedy="give a file with pictures")
    codec = codec_of(path, kind)
    return UnsupportedCodecError(
        path, f"its codec ({codec}) cannot be decoded here", remedy="convert it to H.264, say with ffmpeg"
    )


def missing_bytes(path: Path, kind: str) -> int:
    """Return how many bytes a file lacks by its own headers; 0 if complete or unknown."""
    size = path.stat().st_size
    head = _head(path)
    if kind == "mp4":
        return max([0, *(at + length - size for at, length, name in _boxes(path) if name == b"mdat")])
    if kind == "avi":
        declared = int.from_bytes(head[4:8], "little")
        missing = declared + 8 - size if declared < 0xFFFFFFF0 else 0
        return missing if missing > 1 else 0  # a pad byte at the end is often left out
    at = head.find(b"\x18\x53\x80\x67", 0, 256) if kind == "matroska" else -1  # the segment
    if at < 0 or len(head) < at + 12 or not head[at + 4]:
        return 0
    width = 9 - head[at + 4].bit_length()
    unknown = (1 << 7 * width) - 1
    length = int.from_bytes(head[at + 4 : at + 4 + width], "big") & unknown
    return max(0, at + 4 + width + length - size) if length != unknown else 0


def rotation_of(path: Path, kind: str) -> int:
    """Return the clockwise rotation that an MP4 demands: 0, 90, 180 or 270 degrees."""
    index = _index(path) if kind == "mp4" else b""
    for track in index.split(b"trak")[1:]:
        at = track.find(b"tkhd")
        if b"vide" not in track or at < 0:
            continue
        at += 56 if track[at + 4] == 1 else 44  # version 1 has longer times
        across, down = struct.unpack(">2i", track[at : at + 8].ljust(8, b"\0"))
        return round(math.degrees(math.atan2(down, across)) / 90) * 90 % 360
    return 0


def breaks_off(path: Path, kind: str) -> bool:
    """Return whether a fragmented MP4 has garbage in place of a box; reading it ends there."""
    names = [name for _, _, name in _boxes(path)] if kind == "mp4" else []
    return b"moof" in names and not all(name.isalnum() for name in names)


def _head(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_HEAD)
    except OSError as error:
        raise VideoError(path, f"cannot be read ({error.strerror})") from error


def _sniff(head: bytes) -> str | None:
    # a styp box of 16 MiB is bogus: FFmpeg could take its text for a session description (SDP)
    if head[4:8] in _MP4_BOXES and not (head[4:8] == b"styp" and head[0]):
        return "mp4"
    starts = {
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
    for start, kind in starts.items():
        if head.startswith(start):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    for size, first in ((188, 0), (192, 4)):  # MPEG transport streams: packets of constant size
        marks = head[first::size][:_TS_PACKETS]
        # damage may hit some packets, but text with two G in the right places is no stream
        if marks.startswith(b"GG") and 2 * marks.count(b"G") >= len(marks):
            return "mpeg-ts"
    return None


def _boxes(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield offset, declared length and name of an MP4's outermost boxes."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        at = 0
        for _ in range(_MAX_BOXES):
            if at + 8 > size:
                break
            file.seek(at)
            header = file.read(16)
            length, name = int.from_bytes(header[:4], "big"), header[4:8]
            if length == 1:
                length = int.from_bytes(header[8:16], "big")
            elif length == 0:
                length = size - at
            if length < 8:
                break
            yield at, length, name
            at += length


def _index_box(path: Path) -> tuple[int, int] | None:
    """Return offset and length of an MP4's first ``moov`` or ``moof`` box, if it is complete."""
    size = path.stat().st_size
    for at, length, name in _boxes(path):
        if name in (b"moov", b"moof"):
            return (at, length) if at + length <= size else None
    return None


def _index(path: Path) -> bytes:
    """Return the bytes of an MP4's index, as far as the limit allows; none if the box is cut off."""
    box = _index_box(path)
    if box is None:
        return b""
    at, length = box
    with path.open("rb") as file:
        file.seek(at)
        return file.read(min(length, limits().header_bytes))
