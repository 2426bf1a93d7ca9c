"""Decoding packets one by one with PyAV, and finding out which pictures of a damaged video are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from av.video.frame import PictureType

from capvid.video.packets import Packets, listening, opened

_SEEK = 1000  # packets to look through for the one that was sought


class Decoder:
    """Decodes a video from its first packet on, or from a key packet.

    Pictures carry the number of their packet as ``pts``, whatever the container knows about times.

    Attributes:
        number: of the packet that was decoded last.
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
        """Decode one more packet and give the pictures that are ready; ``None`` behind the last packet."""
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
        """Go to a key packet of a video with known times; tells whether it was found there."""
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
            for _ in range(_SEEK):
                packet, _ = self._read()
                found = -1 if packet is None else self._packets.number_of(packet.pts)
                if found == number:
                    self._held, self.number = packet, number - 1
                    return True
                if packet is None or found > number:
                    return False
        return False

    def _read(self) -> tuple[Any, bool]:
        """The next packet with data, or ``None``, and whether the file broke off."""
        try:
            return next((packet for packet in self._demux if packet.size), None), False
        except MemoryError:
            raise
        except (av.FFmpegError, OSError, ValueError):
            return None, True

    def close(self) -> None:
        """Let go of the file and the decoder."""
        with listening():
            self._container.close()


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Which pictures of a damaged video are right.

    Attributes:
        numbers: of the packets of right pictures (K,), in the order of showing.
        times: when these are shown, (K,) in seconds.
        lost: how many pictures the file promises besides.
    """

    numbers: np.ndarray
    times: np.ndarray
    lost: int


def survey(packets: Packets) -> Survey:
    """Decode a whole video, without keeping any picture, to find those that are right.

    From where the decoder or the container complains, pictures are not trusted until decoding begins anew:
    at a packet that is a key packet, whose own picture is intra coded. Nor are those behind such a
    packet that are shown before it, since they are made from pictures before it as well.
    """
    suspects = set(packets.suspects)
    emitted: dict[int, int] = {}  # by each picture's packet: the packet that was decoded when it came out
    intra = set()
    decoder = Decoder(packets)
    try:
        for frame in _all_frames(decoder, suspects):
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
    late: set[int] = set()  # pictures that came out when things had already gone wrong
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


def _all_frames(decoder: Decoder, suspects: set[int]) -> Iterator[Any]:
    """All pictures as they come out; packets about which the decoder complains become suspects."""
    while (frames := decoder.step()) is not None:
        if decoder.trouble:
            suspects.add(decoder.number)
        suspects.update(frame.pts for frame in frames if frame.is_corrupt)
        yield from frames
