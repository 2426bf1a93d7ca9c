"""Kinds of containers by content, and the reason why a file is not a video that can be read."""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import av
import av.logging
import numpy as np

from capvid.errors import TruncatedVideoError, VideoError
from capvid.utils.files import open_regular
from capvid.utils.validation import limits

_HEAD_BYTES = 1 << 16
_MAX_BOXES = 1_000_000  # a day of fragmented video has fewer
_TS_PACKETS = 16  # number of transport packets to check
_MP4_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"meta", b"jP  "}
_SEGMENT_BOXES = {b"moof", b"sidx", b"emsg", b"prft"}  # at the start of a segment of a fragmented MP4
_STARTS = {
    b"\x1a\x45\xdf\xa3": "matroska",
    b"FLV\x01": "flv",
    b"OggS": "ogg",
    b"\x00\x00\x01\xba": "mpeg-ps",
    b"\x00\x00\x01\xb3": "mpeg",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "asf",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"\xff\xd8\xff": "image",
    b"BM": "image",
}
RAW = ("h264", "hevc", "vvc")  # streams without times
_PROBED = (*RAW, "apng", "dv", "flic", "ivf", "mxf", "nut", "obu", "rm", "swf", "wtv", "yuv4mpegpipe")
DEMUXERS = {  # FFmpeg's name for each kind of container
    **{kind: kind for kind in ("asf", "avi", "flv", "gif", "matroska", "ogg", *_PROBED)},
    "mp4": "mov",
    "mpeg": "mpegvideo",
    "mpeg-ps": "mpeg",
    "mpeg-ts": "mpegts",
}
_DOWNLOAD = "download the video itself"
_TEXTS = (  # what text files begin with: the reason and the remedy
    (rb"version https://git-lfs", "is a Git LFS pointer, not the video itself", "run git lfs pull"),
    (
        rb"<!doctype html|<html|<head",
        "is a web page (HTML), not a video",
        f"{_DOWNLOAD}; it may ask for a login",
    ),
    (rb"#EXTM3U", "is a playlist (HLS), not a video", f"{_DOWNLOAD}, for example with ffmpeg"),
    (rb"", "is a text file, not a video", _DOWNLOAD),
)
_OTHERS = {  # what other files begin with
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"Rar!": "a RAR archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"%PDF": "a PDF document",
    b"ID3": "a sound file (MP3)",
    b"fLaC": "a sound file (FLAC)",
    b"FWS": "a Flash animation (SWF)",
    b"CWS": "a Flash animation (SWF)",
    b"DRACO": "a 3D model (Draco)",
    b"II*\0": "an image (TIFF)",
    b"MM\0*": "an image (TIFF)",
    b"8BPS": "an image (Photoshop)",
}
_ENCRYPTION = {
    "matroska": re.compile(rb"\x6d\x80.{1,16}\x62\x40.{1,64}\x50\x35", re.DOTALL),  # ContentEncryption
    "asf": re.compile(rb"\xfb\xb3\x11\x22\x23\xbd\xd2\x11|\x14\xe6\x8a\x29\x22\x26\x17\x4c"),
}


def kind_of(path: Path) -> str:
    """Return the container kind of a regular file: mp4, matroska, avi, and so on, or ``image``.

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
    kind = _sniff(head) or _probe(path)
    return _mp4_kind(path) if kind == "mp4" else kind


def _probe(path: Path) -> str:
    """Return the kind that FFmpeg recognises; raise VideoError if it is none of those that capvid reads."""
    options = {"protocol_whitelist": "file", "format_whitelist": ",".join(DEMUXERS.values())}
    with av.logging.Capture() as messages:
        av.logging.set_level(av.logging.ERROR)
        try:
            # FFmpeg takes text before a colon for a protocol, except in absolute paths
            with av.open(os.path.abspath(path), options=options, metadata_errors="replace") as container:  # noqa: PTH100
                names = container.format.name.split(",")
            return next(kind for kind, demuxer in DEMUXERS.items() if demuxer in names)
        except MemoryError:
            raise
        except (av.FFmpegError, OSError, ValueError) as error:
            refused = [name for _, name, text in messages if text.startswith("Format not on whitelist")]
            remedy = "no known video format begins like this"
            if refused:
                remedy = f"its format ({refused[0].removesuffix('_pipe')}) is none that capvid reads"
            raise VideoError(path, "not a video file", remedy=remedy, kind="not-a-video") from error


def _mp4_kind(path: Path) -> str:
    """Return ``mp4``, or ``image`` for a still image in an MP4's boxes; raise if the index is missing."""
    size, end, names = path.stat().st_size, 0, set()
    for at, length, name in boxes(path):
        end = at + length
        names.add(name)
        if name == b"moof":
            problem = "is a segment of a video without its initialization segment"
            remedy = "put the initialization segment before it: cat init.mp4 segment.m4s > video.mp4"
            raise VideoError(path, problem, remedy=remedy, kind="incomplete")
        if name == b"moov":
            if end > size:
                break
            if length > limits().header_bytes:
                raise limit_error(path, f"its index (moov) has {length} bytes", "header_bytes")
            return "mp4"
    if b"meta" in names and b"moov" not in names:
        return "image"
    if b"moov" not in names and size - end >= 8:
        problem = f"the file is damaged at byte {end}, before its index (moov)"
        raise TruncatedVideoError(path, problem, remedy="get it again")
    raise TruncatedVideoError(path, "the file ends before its index (moov)", remedy="get it again")


def explain(error: VideoError) -> VideoError:
    """Return the true reason why a file cannot be read, or the error itself where that is the reason."""
    path = Path(error.path)
    if error.kind not in ("not-a-video", "truncated", "empty", "unreadable") or not path.is_file():
        return error
    head = _head(path)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, name in _OTHERS.items():
        if head.startswith(start):
            return VideoError(path, f"is {name}, not a video", remedy=_DOWNLOAD, kind="not-a-video")
    if error.kind == "not-a-video" and _is_text(head):
        start, problem, remedy = next(row for row in _TEXTS if re.match(row[0], text, re.IGNORECASE))
        return VideoError(path, problem, remedy=remedy, kind="not-a-video")
    kind = _sniff(head) or ""
    index = index_of_mp4(path) if kind == "mp4" else b""
    if b"encv" in index or (kind in _ENCRYPTION and _ENCRYPTION[kind].search(head)):
        remedy = "capvid cannot decrypt it; get a copy without protection"
        return VideoError(path, "is encrypted (DRM)", remedy=remedy, kind="encrypted")
    if error.kind == "empty" and b"mvex" in index:
        problem = "is an initialization segment without any media"
        remedy = "put its segments behind it: cat init.mp4 segment.m4s > video.mp4"
        return VideoError(path, problem, remedy=remedy, kind="incomplete")
    return error


def _is_text(head: bytes) -> bool:
    """Return whether a file begins with UTF-8 text."""
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        return "\0" not in decoder.decode(head, final=len(head) < _HEAD_BYTES)
    except UnicodeDecodeError:
        return False


def index_of_mp4(path: Path) -> bytes:
    """Return the box ``moov`` of an MP4; empty if there is none, or if it is larger than the limit."""
    for at, length, name in boxes(path):
        if name == b"moov" and length <= limits().header_bytes:
            with path.open("rb") as file:
                file.seek(at)
                return file.read(length)
    return b""


def limit_error(path: Path, reason: str, limit: str) -> VideoError:
    """Return the error for a file that exceeds ``limit``, a field of ``Limits``."""
    problem = f"{reason}, more than the limit of {getattr(limits(), limit)}"
    return VideoError(path, problem, remedy=f"raise CAPVID_LIMIT_{limit.upper()} if you trust the file")


def missing_bytes(path: Path, kind: str) -> int:
    """Return how many bytes are missing according to the file's headers; 0 if complete or unknown."""
    size = path.stat().st_size
    head = _head(path)
    if kind == "mp4":
        return max([0, *(at + length - size for at, length, name in boxes(path) if name == b"mdat")])
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
    if head[4:8] in _MP4_BOXES | _SEGMENT_BOXES and not (head[4:8] == b"styp" and head[0]):
        return "mp4"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "apng" if b"acTL" in head[: max(0, head.find(b"IDAT"))] else "image"
    for start, kind in _STARTS.items():
        if head.startswith(start):
            return kind
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"WEBP"):
        return "avi" if head[8:12] == b"AVI " else "image"
    for size, first in ((188, 0), (192, 4)):  # MPEG transport streams: packets of constant size
        sync_bytes = head[first::size][:_TS_PACKETS]
        # some packets may be damaged, but text may contain two G at the right offsets as well
        if sync_bytes.startswith(b"GG") and 2 * sync_bytes.count(b"G") >= len(sync_bytes):
            return "mpeg-ts"
    return None


def boxes(path: Path) -> Iterator[tuple[int, int, bytes]]:
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


def composition_offsets(index: bytes, track: int, count: int) -> np.ndarray | None:
    """Return the offsets (N,) from decoding to presentation times of a track in an MP4's index.

    None if the track does not have ``count`` samples, or if its tables are damaged.
    """
    for name, trak in _children(index[8:]):
        header = next((body for child, body in _children(trak) if child == b"tkhd"), b"")
        at = 20 if header[:1] == b"\1" else 12
        if name != b"trak" or int.from_bytes(header[at : at + 4], "big") != track:
            continue
        table = trak
        for level in (b"mdia", b"minf", b"stbl"):
            table = next((body for child, body in _children(table) if child == level), b"")
        tables = dict(_children(table))
        sizes, shifts = tables.get(b"stsz", b""), tables.get(b"ctts")
        if int.from_bytes(sizes[8:12], "big") != count:
            return None
        if shifts is None:
            return np.zeros(count, np.int64)
        pairs = np.frombuffer(shifts, ">i4", offset=8, count=len(shifts) // 4 - 2)
        runs, values = pairs[: len(pairs) // 2 * 2].reshape(-1, 2).astype(np.int64).T
        if (runs < 0).any() or runs.sum() != count:
            return None
        return np.repeat(values, runs)
    return None


def _children(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and the content of each box in the content of an MP4's box."""
    at = 0
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if length < 8:
            return
        yield data[at + 4 : at + 8], data[at + 8 : at + length]
        at += length
