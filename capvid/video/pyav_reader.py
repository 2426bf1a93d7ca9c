"""The PyAV reader: exact frames, salvage of damaged files, and jumps in long ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.frame import PictureType

from capvid.errors import TruncatedVideoError, UnsupportedCodecError, VideoError
from capvid.video.container import kind_of
from capvid.video.frame_source import SequentialSource
from capvid.video.packets import Packets, listening, opened, scan

_MIN_JUMP = 30  # packets that a jump must skip to pay off
_LATE = 32  # pictures after which a missing one will not come any more
_MAX_SEEK = 1000  # packets to look through for the target of a jump


class PyAVSource(SequentialSource):
    """Frame source on PyAV, one decoding thread per video.

    Frames equal those of decoding from the first packet on. Where the container knows when packets are shown,
    jumps to key packets shorten long ways; anything unusual behind a jump is decoded again from the start.
    Frames are turned by the rotation that the file demands. A damaged file is decoded once when it is opened,
    and has only the frames that come out right.

    Args:
        path: the video.
        why: reason for this reader, for :class:`~capvid.video.frame_source.VideoInfo`.
        packets: packets of the video, if known.
        careful: whether to treat the file as damaged, even if its packets look well.

    Raises:
        VideoError: the file cannot be opened; the subclass says why.
    """

    def __init__(
        self,
        path: Path,
        *,
        why: str = "asked for",
        packets: Packets | None = None,
        careful: bool = False,
    ) -> None:
        self._path = path
        kind = kind_of(path)
        try:
            self._packets = scan(path, kind) if packets is None else packets
        except TruncatedVideoError as error:
            raise _undecodable(path, kind) from error
        self._decoder: Decoder | None = None
        careful = careful or self._packets.damaged
        if not careful:
            try:
                self._start(self._packets.times(), self._packets.order, careful=False)
            except TruncatedVideoError:
                careful = True
        lost = 0
        if careful:
            intact = survey(self._packets)
            lost = intact.lost
            if not len(intact.numbers):
                raise _undecodable(path, kind)
            self._start(intact.times, intact.numbers, careful=True)
        self._info = self._make_info(
            path=path,
            reader="pyav",
            codec=self._packets.codec,
            rotation=-90 * self._turns % 360,
            lost=lost,
            why=why,
        )

    def _start(self, times: np.ndarray, order: np.ndarray | None, *, careful: bool) -> None:
        """Begin to read the frames of the packets ``order``, None for all in the order of decoding."""
        self.close()
        self._times = times
        self.careful = careful  # whether the file is treated as damaged, so that only right frames count
        self._order = order
        self._places: np.ndarray | None = None  # frame of each packet; -1 for packets without
        if order is not None:
            self._places = np.full(int(order.max(initial=-1)) + 1, -1)
            self._places[order] = np.arange(len(order))
        self._may_jump = order is not None and not careful
        self._size: tuple[int, int] | None = None
        self._closed = False
        self._restart()
        self._first = self._decode(0)

    @property
    def jumps(self) -> bool:
        """Whether the container knows its packets' times, and is not damaged."""
        return self._may_jump

    def _frame(self, index: int) -> np.ndarray:
        """Decode frame ``index``, (H, W, 3)."""
        return self._first if index == 0 else self._decode(index)

    def _decode(self, index: int) -> np.ndarray:
        if self._closed:
            raise VideoError(self._path, "the reader is closed already")
        if not self._jump(index) and index <= self._last:
            self._restart()
        while True:
            try:
                return self._picture(self._find(index))
            except TruncatedVideoError:
                if self._landed < 0:
                    raise
            self._may_jump = False  # behind a jump this may mean nothing
            self._restart()

    def _restart(self) -> None:
        """Go back to the first packet."""
        if self._decoder is not None:
            self._decoder.close()
        self._decoder = Decoder(self._packets)
        self._ready: list[Any] = []  # decoded pictures that were not examined
        self._count = 0  # pictures examined
        self._last = -1  # the last frame examined
        self._landed = -1  # frame of the key packet that was jumped to

    def _jump(self, index: int) -> bool:
        """Jump to the last key packet shown at or before frame ``index``, if that pays off."""
        order, places, decoder, pts = self._order, self._places, self._decoder, self._packets.pts
        if not self._may_jump or order is None or places is None or decoder is None or pts is None:
            return False
        if 0 < index - self._last < _MIN_JUMP:
            return False
        wanted = int(order[index])
        earlier = np.flatnonzero(self._packets.keys & self._packets.shown & (pts <= pts[wanted]))
        # skipped from here or, to go back, from the first packet
        position = decoder.number if index > self._last else 0
        if not len(earlier) or (key := int(earlier[-1])) - position < _MIN_JUMP:
            return False
        if not decoder.jump(key):
            self._may_jump = False
            self._restart()
            return False
        self._ready = []
        self._landed = int(places[key])
        self._last = self._landed - 1
        return True

    def _find(self, index: int) -> Any:
        """Decode until the picture of frame ``index`` comes out.

        Raises:
            TruncatedVideoError: it does not come out, or something before it is damaged.
        """
        begun = self._landed < 0 or self._last >= self._landed
        while (frame := self._next_picture()) is not None:
            place = self._place(frame)
            if place is None or place < self._landed:
                continue
            if not begun:
                # decoding begins anew only with a picture that is made from no other
                if place != self._landed or frame.pict_type != PictureType.I:
                    break
                begun = True
            self._last = max(self._last, place)
            if place == index:
                return frame
            if place > index + _LATE:
                break
        raise TruncatedVideoError(
            self._path, "the video's data are damaged or end too early", remedy="get it again"
        )

    def _next_picture(self) -> Any:
        """Return the next decoded picture; None at the end, or where the data are damaged."""
        assert self._decoder is not None
        while not self._ready:
            frames = self._decoder.step()
            if frames is None or (self._decoder.trouble and not self._is_harmless(self._decoder.number)):
                return None
            self._ready = frames
        return self._ready.pop(0)

    def _is_harmless(self, number: int) -> bool:
        """Return whether complaints about this packet mean nothing.

        Its picture may be shown before the one that was jumped to, and made from pictures not decoded.
        """
        if self.careful or self._places is None:
            return self.careful
        place = self._frame_of(number)
        return place is None or place < self._landed

    def _place(self, frame: Any) -> int | None:
        """Return the frame index of a picture; None if it is never shown."""
        if self._places is not None:
            return self._frame_of(frame.pts)
        if not self._packets.shown[frame.pts]:
            return None
        self._count += 1
        return self._count - 1

    def _frame_of(self, number: int | None) -> int | None:
        """Return the frame index of a packet; None if it holds none."""
        assert self._places is not None
        if number is None or not 0 <= number < len(self._places):
            return None
        place = int(self._places[number])
        return None if place < 0 else place

    def _picture(self, frame: Any) -> np.ndarray:
        """Convert a picture to RGB, upright, (H, W, 3), and of the size of the first one."""
        if self._size is None:
            self._size = frame.width, frame.height
            self._turns = round(frame.rotation / 90) % 4  # counterclockwise
        width, height = self._size
        with listening():
            picture = frame.reformat(width=width, height=height, format="rgb24", threads=1).to_ndarray()
        return np.ascontiguousarray(np.rot90(picture, self._turns))

    def close(self) -> None:
        """Release the file and the decoder."""
        self._closed = True
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
            self._ready = []


def _undecodable(path: Path, kind: str) -> VideoError:
    """Return the error for a file without decodable frame."""
    if kind == "webp":
        return UnsupportedCodecError(
            path, "animated WebP cannot be decoded", remedy="convert it to GIF, or its frames to a zip file"
        )
    return TruncatedVideoError(path, "the file is damaged: no frame can be decoded", remedy="get it again")


class Decoder:
    """Decoder of a video from its first packet on, or from a key packet.

    Pictures carry the number of their packet as ``pts``, whatever the container knows about times.

    Attributes:
        number: number of the packet decoded last.
        trouble: whether the decoder complained about it.
    """

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        with listening():
            self._container, self._stream = opened(packets.path, packets.kind)
        self._demux = self._container.demux(self._stream)
        self._held: Any = None  # a packet that is read and not decoded
        self._ended = False
        self.number = -1
        self.trouble = False

    def step(self) -> list[Any] | None:
        """Decode one more packet and return the pictures that are ready; None behind the last packet."""
        if self._ended:
            return None
        with listening() as messages:
            packet, broken = self._held, False
            self._held = None
            if packet is None:
                packet, broken = self._read()
            messages.clear()  # what the container says is known from the scan
            if packet is None:
                self._ended = True
            else:
                self.number += 1
                packet.pts = self.number
            try:
                frames = list(self._stream.codec_context.decode(packet))
            except MemoryError:
                raise
            except av.FFmpegError:
                frames, broken = [], packet is not None
            self.trouble = broken or bool(messages) or any(frame.is_corrupt for frame in frames)
        return frames

    def jump(self, number: int) -> bool:
        """Jump to a key packet of a video with known times; return success."""
        pts, dts = self._packets.pts, self._packets.dts
        assert pts is not None
        with listening():
            try:
                self._container.seek(int((pts if dts is None else dts)[number]), stream=self._stream)
            except MemoryError:
                raise
            except (av.FFmpegError, OSError, OverflowError):
                return False
            self._demux = self._container.demux(self._stream)
            self._ended = False
            for _ in range(_MAX_SEEK):
                packet, _ = self._read()
                reached = -1 if packet is None else self._packets.number_of(packet.pts)
                if reached == number:
                    self._held, self.number = packet, number - 1
                    return True
                if packet is None or reached > number:
                    return False
        return False

    def _read(self) -> tuple[Any, bool]:
        """Return the next packet with data, or None, and whether the file broke off."""
        try:
            return next((packet for packet in self._demux if packet.size), None), False
        except MemoryError:
            raise
        except (av.FFmpegError, OSError, ValueError):
            return None, True

    def close(self) -> None:
        """Release the file and the decoder."""
        with listening():
            self._container.close()


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The intact pictures of a damaged video.

    Attributes:
        numbers: packet numbers (K,), in presentation order.
        times: presentation times in seconds, (K,).
        lost: number of other pictures that the file promises.
    """

    numbers: np.ndarray
    times: np.ndarray
    lost: int


def survey(packets: Packets) -> Survey:
    """Decode a video completely, without keeping any picture, to find the intact ones.

    From where the decoder or the container complains, pictures are not trusted until decoding begins anew:
    at a key packet whose own picture is intra coded. Nor are those behind such a packet that are shown before
    it, since they are made from pictures before it as well.
    """
    suspects = set(packets.suspects)
    emitted: dict[int, int] = {}  # for each picture's packet: the packet decoded when it came out
    intra = set()
    decoder = Decoder(packets)
    try:
        while (frames := decoder.step()) is not None:
            if decoder.trouble:
                suspects.add(decoder.number)
            for frame in frames:
                if frame.is_corrupt:
                    suspects.add(frame.pts)
                emitted[frame.pts] = decoder.number
                if frame.pict_type == PictureType.I:
                    intra.add(frame.pts)
    finally:
        decoder.close()
    shown = np.array([number for number in emitted if packets.shown[number]], np.int64)
    if packets.pts is not None:  # the order in which damaged pictures come out means nothing
        shown = shown[np.argsort(packets.pts[shown])]
    place = {int(number): i for i, number in enumerate(shown)}
    wrong: set[int] = set()
    late: set[int] = set()  # pictures that came out after the damage
    run: list[int] = []  # packets since decoding began anew
    astray, before = False, False
    for number in range(len(packets.keys)):
        if packets.keys[number] and number in intra and number not in suspects:
            run, before, astray = [], astray, False
        if number in suspects and not astray:
            astray = True
            late.update(n for n in run if emitted.get(n, -1) >= number)
        run.append(number)
        if astray or (before and place.get(number, 0) < place.get(run[0], 0)):
            wrong.add(number)
    if packets.pts is None:  # and their place is not known otherwise
        wrong |= late
    kept = np.array([n not in wrong for n in shown], bool)
    # a file may have more packets than pictures without being damaged: one for each field, say
    lost = packets.promised - int(kept.sum()) if suspects or packets.damaged else 0
    return Survey(numbers=shown[kept], times=packets.times(shown)[kept], lost=lost)
