"""The PyAV reader: exact frames, salvage of damaged files, and jumps in long ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.frame import PictureType

from capvid.errors import TruncatedVideoError, UnsupportedCodecError, VideoError
from capvid.video.frame_source import FrameSource
from capvid.video.probe import Packets, damaged_data, kind_of, listening, open_container, scan

_MIN_JUMP = 30  # packets that a jump must skip to pay off
_MAX_DELAY = 32  # images after which a missing one will not come any more
_MAX_SEEK = 1000  # packets to look through for the target of a jump


class PyAVSource(FrameSource):
    """Frame source on PyAV, one decoding thread per video.

    Frames equal those of decoding from the first packet on. Where the container knows when packets are
    displayed, jumps to key packets shorten long ways; anything unusual behind a jump is decoded again from
    the start. Frames are turned by the rotation that the file demands. A damaged file is decoded once when it
    is opened, and has only the frames that come out right; ``careful`` treats any file as damaged.

    Raises:
        VideoError: the file cannot be opened; the subclass says why.
    """

    def __init__(
        self, path: Path, *, why: str = "asked for", packets: Packets | None = None, careful: bool = False
    ) -> None:
        self._path = path
        kind = kind_of(path)
        try:
            self._packets = packets or scan(path, kind)
        except TruncatedVideoError as error:
            raise _undecodable(path, kind) from error
        self._decoder: Decoder | None = None
        times, lost = self._packets.times(), 0
        self.careful = careful or self._packets.damaged  # then only frames that are right for certain count
        if not self.careful:
            try:
                self._start(self._packets.order)
            except TruncatedVideoError:
                self.careful = True
        if self.careful:
            numbers, times, lost = find_intact(self._packets)
            if not len(numbers):
                raise _undecodable(path, kind)
            self._start(numbers)
        codec, rotation = self._packets.codec, -90 * self._turns % 360
        self._describe(
            times, self._first, path=path, reader="pyav", codec=codec, rotation=rotation, lost=lost, why=why
        )

    def _start(self, order: np.ndarray | None) -> None:
        """Begin to read the frames of the packets ``order``, None for all in the order of decoding."""
        self._order = order
        self._frames: np.ndarray | None = None  # frame of each packet; -1 for packets without
        if order is not None:
            self._frames = np.full(int(order.max(initial=-1)) + 1, -1)
            self._frames[order] = np.arange(len(order))
        self.jumps = order is not None and not self.careful
        self._size: tuple[int, int] | None = None
        self._restart()
        self._first = self._convert(self._find(0))

    def _restart(self) -> None:
        """Go back to the first packet."""
        self.close()
        self._decoder = Decoder(self._packets)
        self._ready: list[Any] = []  # decoded images that were not examined
        self._count = 0  # images examined
        self._last = -1  # the last frame examined
        self._landed = -1  # frame of the key packet that was jumped to

    def _decode(self, index: int) -> np.ndarray:
        if self._decoder is None:
            raise VideoError(self._path, "the reader is closed already")
        if index == 0:
            return self._first
        if not self._jump(index) and index <= self._last:
            self._restart()
        image = self._find(index)
        if image is None and self._landed >= 0:  # behind a jump this may mean nothing
            self.jumps = False
            self._restart()
            image = self._find(index)
        return self._convert(image)

    def _jump(self, index: int) -> bool:
        """Jump to the last key packet displayed at or before frame ``index``, if that pays off."""
        if not self.jumps or 0 < index - self._last < _MIN_JUMP:
            return False
        packets, order, frames, decoder = self._packets, self._order, self._frames, self._decoder
        assert packets.pts is not None and order is not None and frames is not None and decoder is not None
        wanted = int(order[index])
        earlier = np.flatnonzero(packets.keys & packets.visible & (packets.pts <= packets.pts[wanted]))
        # skipped from here or, to go back, from the first packet
        position = decoder.number if index > self._last else 0
        if not len(earlier) or (key := int(earlier[-1])) - position < _MIN_JUMP:
            return False
        self.jumps = decoder.jump(key)
        if not self.jumps:
            self._restart()
            return False
        self._ready = []
        self._landed = int(frames[key])
        self._last = self._landed - 1
        return True

    def _find(self, index: int) -> Any:
        """Return the image of frame ``index``; None if it, or something before it, is damaged."""
        begun = self._landed < 0 or self._last >= self._landed
        while (image := self._next_image()) is not None:
            if self._frames is not None:
                frame = self._frame_of(image.pts)
            elif self._packets.visible[image.pts]:
                frame = self._count
                self._count += 1
            else:
                frame = -1
            if frame < max(0, self._landed):
                continue
            if not begun:
                # decoding begins anew only with an image that is made from no other
                if frame != self._landed or image.pict_type != PictureType.I:
                    break
                begun = True
            self._last = max(self._last, frame)
            if frame == index:
                return image
            if frame > index + _MAX_DELAY:
                break
        return None

    def _next_image(self) -> Any:
        """Return the next decoded image; None at the end, or where the data are damaged."""
        assert self._decoder is not None
        while not self._ready:
            images = self._decoder.step()
            if images is None:
                return None
            # behind a jump, images displayed before its target may be made from images that were not decoded
            if (self._decoder.trouble and not self.careful) and (
                self._frames is None or self._frame_of(self._decoder.number) >= max(0, self._landed)
            ):
                return None
            self._ready = images
        return self._ready.pop(0)

    def _frame_of(self, number: int | None) -> int:
        """Return the frame index of a packet in a known order; -1 if it holds none."""
        assert self._frames is not None
        return int(self._frames[number]) if number is not None and 0 <= number < len(self._frames) else -1

    def _convert(self, image: Any) -> np.ndarray:
        """Convert an image to RGB, upright, (H, W, 3), and of the size of the first one.

        Raises:
            TruncatedVideoError: there is no image.
        """
        if image is None:
            raise damaged_data(self._path)
        if self._size is None:
            self._size = image.width, image.height
            self._turns = round(image.rotation / 90) % 4  # counterclockwise
        width, height = self._size
        with listening():
            pixels = image.reformat(width=width, height=height, format="rgb24", threads=1).to_ndarray()
        return np.ascontiguousarray(np.rot90(pixels, self._turns))

    def close(self) -> None:
        """Release the file and the decoder."""
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
            self._ready = []


def _undecodable(path: Path, kind: str) -> VideoError:
    """Return the error for a file without decodable frame."""
    if kind == "webp":
        remedy = "convert it to GIF, or its frames to a zip file"
        return UnsupportedCodecError(path, "animated WebP cannot be decoded", remedy=remedy)
    return TruncatedVideoError(path, "the file is damaged: no frame can be decoded", remedy="get it again")


class Decoder:
    """Decoder of a video from its first packet on, or from a key packet.

    Images carry the number of their packet as ``pts``, whatever the container knows about times.
    """

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        with listening():
            self._container, self._stream = open_container(packets.path, packets.kind)
        self._demux = self._container.demux(self._stream)
        self._held: Any = None  # a packet that is read and not decoded
        self._ended = False
        self.number = -1  # of the packet decoded last
        self.trouble = False  # whether the decoder complained about it

    def step(self) -> list[Any] | None:
        """Decode one more packet and return the images that are ready; None behind the last packet."""
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
                images = list(self._stream.codec_context.decode(packet))
            except MemoryError:
                raise
            except av.FFmpegError:
                images, broken = [], packet is not None
            self.trouble = broken or bool(messages) or any(image.is_corrupt for image in images)
        return images

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


def find_intact(packets: Packets) -> tuple[np.ndarray, np.ndarray, int]:
    """Decode a damaged video completely, without keeping any image, to find the intact ones.

    From where the decoder or the container complains, images are not trusted until decoding begins anew: at a
    key packet whose own image is intra coded. Nor are those behind such a packet that are displayed before
    it, since they are made from images before it as well. The result is the packet numbers (K,) of the intact
    images in presentation order, their times (K,) in seconds, and the number of other, promised images.
    """
    suspects = set(packets.suspects)
    emitted: dict[int, int] = {}  # for each image's packet: the packet decoded when it came out
    intra = set()
    decoder = Decoder(packets)
    try:
        while (images := decoder.step()) is not None:
            if decoder.trouble:
                suspects.add(decoder.number)
            for image in images:
                if image.is_corrupt:
                    suspects.add(image.pts)
                emitted[image.pts] = decoder.number
                if image.pict_type == PictureType.I:
                    intra.add(image.pts)
    finally:
        decoder.close()
    visible = np.array([number for number in emitted if packets.visible[number]], np.int64)
    if packets.pts is not None:  # the order in which damaged images come out means nothing
        visible = visible[np.argsort(packets.pts[visible])]
    ranks = {int(number): rank for rank, number in enumerate(visible)}
    wrong: set[int] = set()
    late: set[int] = set()  # images that came out after the damage
    run: list[int] = []  # packets since decoding began anew
    astray, before = False, False
    for number in range(len(packets.keys)):
        if packets.keys[number] and number in intra and number not in suspects:
            run, before, astray = [], astray, False
        if number in suspects and not astray:
            astray = True
            late.update(n for n in run if emitted.get(n, -1) >= number)
        run.append(number)
        if astray or (before and ranks.get(number, 0) < ranks.get(run[0], 0)):
            wrong.add(number)
    if packets.pts is None:  # and their rank is not known otherwise
        wrong |= late
    intact = np.array([n not in wrong for n in visible], bool)
    # a file may have more packets than images without being damaged: one for each field, say
    lost = packets.promised - int(intact.sum()) if suspects or packets.damaged else 0
    return visible[intact], packets.times(visible)[intact], lost
