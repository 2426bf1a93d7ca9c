"""The PyAV reader: exact frames, jumps in long files, and salvage of damaged files."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.frame import PictureType

from capvid.errors import TruncatedVideoError, VideoError
from capvid.utils.validation import limits
from capvid.video.container_kind import kind_of, limit_error
from capvid.video.frame_source import FrameSource
from capvid.video.probe import (
    Packets,
    damage_error,
    demux,
    ffmpeg_log,
    is_mirrored,
    open_container,
    scan,
)
from capvid.video.sdr import SdrConverter, color_of

# complaints about the list of reference images of streams that were cut, not about an image
_HARMLESS = re.compile("mmco: unref short failure|number of reference frames .* exceeds max")
_MIN_JUMP = 30  # packets that a jump must skip to be worthwhile
_MAX_DELAY = 32  # images after which a missing image will not follow any more
_MAX_SEEK = 1000  # packets to search for the target of a jump


class PyAVSource(FrameSource):
    """Frame source on PyAV, with one decoding thread per video.

    Frames are the same as when decoding from the first packet on. If the container has presentation times,
    the reader jumps to key packets over long distances; if anything is unusual after a jump, it decodes again
    from the start. Frames are as a player shows them: with square pixels, mirrored and rotated as the file
    specifies, and in SDR.

    A damaged file is decoded once when it is opened, and has only the frames that are intact; ``salvage``
    treats any file as damaged. So are streams without times, and those in which each field has
    a packet of its own.

    Raises:
        VideoError: the file cannot be opened; its ``kind`` says why.
    """

    # Invariants between calls of _decode:
    # - _order and _frames are inverse: frame f is the image of packet _order[f], and _frames[_order[f]] == f.
    #   Both are None if presentation times are unknown; then frames are counted in the order of decoding.
    # - _ready are images that the decoder has returned and nobody has looked at, in that order.
    # - _last is the largest frame index of the images looked at since the start or the last jump (-1: none).
    #   Frames after _last can be reached by decoding on; all others need a restart or a jump.
    # - _count is the number of visible images looked at, and is used only while _order is None.
    # - _target is the frame of the key packet that the last jump led to, -1 after a restart. Images of
    #   earlier frames are not trusted; _last >= _target - 1 always.
    # - jumps never becomes True again: a file in which one jump went wrong is decoded in order from then on.
    # - _size, _turns, _mirrored, _color and _sdr are those of frame 0, and apply to all frames.

    def __init__(
        self, path: Path, *, why: str = "requested", packets: Packets | None = None, salvage: bool = False
    ) -> None:
        self._path = path
        self._packets = packets or scan(path, kind_of(path), trust=not salvage)
        self._decoder: Decoder | None = None
        times, lost = self._packets.times(), 0
        # whether the video is decoded once to find out which packets give intact images
        self.salvage = salvage or self._packets.damaged or self._packets.uncertain
        if not self.salvage:
            try:
                self._start(self._packets.order)
            except TruncatedVideoError:
                self.salvage = True
                self._packets = scan(path, self._packets.kind, trust=False)
        if self.salvage:
            numbers, times, lost = find_intact(self._packets)
            if not len(numbers):
                raise _undecodable(path)
            self._start(numbers)
        self._describe(
            times,
            self._first,
            path=path,
            reader="pyav",
            codec=self._packets.codec,
            rotation=-90 * self._turns % 360,
            mirrored=self._mirrored,
            aspect=self._packets.aspect,
            clean_aperture=self._packets.clean_aperture,
            color="" if self._color is None else str(self._color),
            lost=lost,
            why=why,
        )

    def _start(self, order: np.ndarray | None) -> None:
        """Read the first of the frames of the packets ``order``; None takes all, in decoding order."""
        self._order = order
        self._frames: np.ndarray | None = None  # frame index of each packet; -1 for packets without frame
        if order is not None:
            self._frames = np.full(int(order.max(initial=-1)) + 1, -1)
            self._frames[order] = np.arange(len(order))
        self.jumps = order is not None and not self.salvage
        self._size: tuple[int, int] | None = None
        self._restart()
        self._first_image = self._find(0)
        self._first = self._convert(self._first_image)

    def shrink_hdr(self, side: int) -> None:
        """Return smaller HDR frames from now on, since converting them would take longer than decoding."""
        factor = min(self._size or (0, 0)) // side
        if self._sdr is not None and self._size is not None and factor > 1:
            self._size = self._size[0] // factor, self._size[1] // factor
            self._first = self._convert(self._first_image)
            self.info = replace(self.info, width=self._first.shape[1], height=self._first.shape[0])

    def _restart(self) -> None:
        """Go back to the first packet."""
        self.close()
        self._decoder = Decoder(self._packets)
        self._ready: list[Any] = []  # decoded images that have not been examined
        self._count = 0  # number of visible images examined, if the order is unknown
        self._last = -1  # index of the last frame examined
        self._target = -1  # frame index of the key packet that was jumped to

    def _decode(self, index: int) -> np.ndarray:
        if self._decoder is None:
            raise VideoError(self._path, "the reader is closed already")
        if index == 0:
            return self._first
        if not self._jump(index) and index <= self._last:
            self._restart()
        image = self._find(index)
        if image is None and self._target >= 0:  # the jump may be the reason
            self.jumps = False
            self._restart()
            image = self._find(index)
        return self._convert(image)

    def _jump(self, index: int) -> bool:
        """Jump to the last key packet displayed at or before frame ``index``, if that is worthwhile."""
        if not self.jumps or 0 < index - self._last < _MIN_JUMP:
            return False
        packets, order, frames, decoder = self._packets, self._order, self._frames, self._decoder
        assert packets.pts is not None and order is not None and frames is not None and decoder is not None
        pts = packets.pts[int(order[index])]
        earlier = np.flatnonzero(packets.keys & packets.visible & (packets.pts <= pts))
        # the alternative is to decode from here or, for an earlier frame, from the first packet
        position = decoder.number if index > self._last else 0
        if not len(earlier) or (key := int(earlier[-1])) - position < _MIN_JUMP:
            return False
        self.jumps = decoder.jump(key)
        if not self.jumps:
            self._restart()
            return False
        self._ready = []
        self._target = int(frames[key])
        self._last = self._target - 1
        return True

    def _find(self, index: int) -> Any:
        """Return the image of frame ``index``; None if it, or an image before it, is damaged."""
        target_reached = self._target < 0 or self._last >= self._target
        while (image := self._next_image()) is not None:
            if self._frames is not None:
                frame = self._frame_of(image.pts)
            elif self._packets.visible[image.pts]:
                frame = self._count
                self._count += 1
            else:
                frame = -1
            if frame < max(0, self._target):
                continue
            if not target_reached:
                # decoding can start only at an image that depends on no other
                if frame != self._target or image.pict_type != PictureType.I:
                    break
                target_reached = True
            self._last = max(self._last, frame)
            if frame == index:
                return image
            if frame > index + _MAX_DELAY:
                break
        return None

    def _next_image(self) -> Any:
        """Return the next decoded image; None at the end, or if the data are damaged."""
        assert self._decoder is not None
        while not self._ready:
            images = self._decoder.step()
            if images is None:
                return None
            # after a jump, images displayed before its target may depend on images that were not decoded
            if (self._decoder.complained and not self.salvage) and (
                self._frames is None or self._frame_of(self._decoder.number) >= max(0, self._target)
            ):
                return None
            self._ready = images
        return self._ready.pop(0)

    def _frame_of(self, number: int | None) -> int:
        """Return the frame index of a packet in a known order; -1 if it has no frame."""
        assert self._frames is not None
        return int(self._frames[number]) if number is not None and 0 <= number < len(self._frames) else -1

    def _convert(self, image: Any) -> np.ndarray:
        """Convert an image to RGB (H, W, 3) as it is shown, in the size of the first; raise if it is None."""
        if image is None:
            raise damage_error(self._path)
        if self._size is None:
            width = max(1, round(image.width * self._packets.aspect))
            if width * image.height > limits().frame_pixels:
                reason = f"its frames have {width} x {image.height} pixels when shown"
                raise limit_error(self._path, reason, "frame_pixels")
            self._size = width, image.height
            self._mirrored = is_mirrored(image)
            self._turns = round(image.rotation / 90) % 4  # counterclockwise
            self._color = color_of(image)
            self._sdr = SdrConverter(self._color, image) if self._color else None
        width, height = self._size
        with ffmpeg_log():
            if self._sdr:
                pixels = self._sdr.convert(image, width, height)
            else:
                pixels = image.reformat(width=width, height=height, format="rgb24", threads=1).to_ndarray()
        if self._mirrored:
            pixels = pixels[::-1]
        return np.ascontiguousarray(np.rot90(pixels, self._turns))

    def close(self) -> None:
        """Release the file and the decoder."""
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
            self._ready = []


def _undecodable(path: Path) -> VideoError:
    """Return the error for a file without a decodable frame."""
    return TruncatedVideoError(path, "the file is damaged: no frame can be decoded", remedy="get it again")


class Decoder:
    """Decoder of a video from its first packet on, or from a key packet.

    The ``pts`` of an image is the number of its packet, not a time.
    """

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        with ffmpeg_log():
            self._container, self._stream = open_container(packets.path, packets.kind)
        self._demux = demux(self._container, self._stream)
        self._next: Any = None  # packet that has been read but not decoded
        self._ended = False
        self.number = -1  # of the last packet decoded
        self.complained = False  # whether the decoder reported an error in it

    def step(self) -> list[Any] | None:
        """Decode one more packet and return the images that are ready; None after the last packet."""
        if self._ended:
            return None
        with ffmpeg_log() as messages:
            packet, broken = self._next, False
            self._next = None
            if packet is None:
                packet, broken = self._read()
            messages.clear()  # the container's messages are known from the scan
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
            errors = [text for _, _, text in messages if not _HARMLESS.search(text)]
            self.complained = broken or bool(errors) or any(image.is_corrupt for image in images)
        return images

    def jump(self, number: int) -> bool:
        """Jump to a key packet of a video with known times; return whether it succeeded."""
        pts, dts = self._packets.pts, self._packets.dts
        assert pts is not None
        with ffmpeg_log():
            try:
                self._container.seek(int((pts if dts is None else dts)[number]), stream=self._stream)
            except MemoryError:
                raise
            except (av.FFmpegError, OSError, OverflowError):
                return False
            self._demux = demux(self._container, self._stream)
            self._ended = False
            for _ in range(_MAX_SEEK):
                packet, _ = self._read()
                reached = -1 if packet is None else self._packets.number_of(packet.pts)
                if reached == number:
                    self._next, self.number = packet, number - 1
                    return True
                if packet is None or reached > number:
                    return False
        return False

    def _read(self) -> tuple[Any, bool]:
        """Return the next packet with data, None at the end, and whether reading failed."""
        try:
            return next((packet for packet in self._demux if packet.size), None), False
        except MemoryError:
            raise
        except (av.FFmpegError, OSError, ValueError):
            return None, True

    def close(self) -> None:
        """Release the file and the decoder."""
        with ffmpeg_log():
            self._container.close()


def find_intact(packets: Packets) -> tuple[np.ndarray, np.ndarray, int]:
    """Decode a damaged video completely, without storing images, to find the intact ones.

    After an error of the decoder or the container, images count as damaged up to the next key packet with an
    intact intra-coded image. Images that follow such a packet but are displayed before it count as damaged,
    too, since they also depend on images before it.

    Returns:
        Packet numbers (K,) of the intact images in presentation order, their times (K,) in seconds, and the
        number of lost images.
    """
    complaints: set[int] = set()  # packets in which the decoder found errors, or whose images are corrupt
    emitted: dict[int, int] = {}  # by packet of an image: the packet after which the decoder returned it
    intra = set()
    decoder = Decoder(packets)
    try:
        while (images := decoder.step()) is not None:
            if decoder.complained:
                complaints.add(decoder.number)
            for image in images:
                if image.is_corrupt:
                    complaints.add(image.pts)
                emitted[image.pts] = decoder.number
                if image.pict_type == PictureType.I:
                    intra.add(image.pts)
    finally:
        decoder.close()
    visible = np.array([number for number in emitted if packets.visible[number]], np.int64)
    if packets.pts is not None:  # damaged images may be returned in any order
        visible = visible[np.argsort(packets.pts[visible])]
    suspects = packets.suspects | complaints
    damaged = _damaged(packets, suspects, emitted, intra, visible)
    if damaged.issuperset(visible.tolist()):  # what the container finds odd may be whole all the same
        damaged = _damaged(packets, complaints, emitted, intra, visible)
    intact = np.array([number not in damaged for number in visible], bool)
    # an undamaged file may have more packets than images, such as one for each field
    lost = packets.expected - int(intact.sum()) if suspects or packets.damaged else 0
    return visible[intact], packets.times(visible)[intact], lost


def _damaged(
    packets: Packets, suspects: Set[int], emitted: dict[int, int], intra: set[int], visible: np.ndarray
) -> set[int]:
    """Return the packets whose images are damaged if those of ``suspects`` are."""
    ranks = {int(number): rank for rank, number in enumerate(visible)}
    damaged: set[int] = set()
    late: set[int] = set()  # images returned after an error in a later packet
    run: list[int] = []  # packets since the last restart, which is an intact key packet
    broken, broken_before = False, False  # since the last restart, and before it
    for number in range(len(packets.keys)):
        if packets.keys[number] and number in intra and number not in suspects:
            run, broken_before, broken = [], broken, False
        if number in suspects and not broken:
            broken = True
            late.update(n for n in run if emitted.get(n, -1) >= number)
        run.append(number)
        if broken or (broken_before and ranks.get(number, 0) < ranks.get(run[0], 0)):
            damaged.add(number)
    return damaged | late if packets.pts is None else damaged  # without times, their rank is uncertain
