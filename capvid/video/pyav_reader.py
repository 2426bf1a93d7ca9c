"""The PyAV reader: reads what decord cannot, saves what damaged files still have, and jumps in long ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from av.video.frame import PictureType

from capvid.errors import TruncatedVideoError, UnsupportedCodecError, VideoError
from capvid.video.container import kind_of
from capvid.video.decoding import Decoder, survey
from capvid.video.packets import Packets, listening, scan
from capvid.video.source import FrameSource, VideoInfo, frame_duration

_PAYS = 30  # packets that a jump must skip
_LATE = 32  # pictures after which one that is missing will not come any more


class PyAVSource(FrameSource):
    """A :class:`~capvid.video.source.FrameSource` on PyAV, one decoding thread per video.

    Pictures are those of decoding from the first packet on. Where the container knows when packets are shown,
    long ways are cut short by jumping to a key packet; whatever looks unusual behind a jump is decoded again
    from the start. Pictures are turned by the rotation that the file asks for.

    A file that is damaged is decoded once when it is opened, and has only the frames that come out right.

    Args:
        path: the video.
        why: why this reader, for :class:`~capvid.video.source.VideoInfo`.
        packets: of the video, if they are known.
        careful: whether to take the file for damaged, even if its packets look well.

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
        self._packets = _scan(path, kind) if packets is None else packets
        self._decoder: Decoder | None = None
        if not (careful or self._packets.damaged):
            try:
                self._start(self._packets.times(), self._packets.order, careful=False)
            except TruncatedVideoError:
                careful = True
        lost = 0
        if careful or self._packets.damaged:
            found = survey(self._packets)
            lost = found.lost
            if not len(found.numbers):
                raise _undecodable(path, kind)
            self._start(found.times, found.numbers, careful=True)
        duration = float(self._times[-1] - self._times[0] + frame_duration(self._times))
        height, width = self._first.shape[:2]
        self._info = VideoInfo(
            path=path,
            reader="pyav",
            codec=self._packets.codec,
            width=width,
            height=height,
            num_frames=len(self._times),
            duration=duration,
            fps=len(self._times) / duration if duration else 0.0,
            rotation=-90 * self._turns % 360,
            lost=lost,
            why=why,
        )

    def _start(self, times: np.ndarray, order: np.ndarray | None, *, careful: bool) -> None:
        """Begin to read frames of packets in this ``order``, of all if it is not known."""
        self.close()
        self._times = times
        self._careful = careful
        self._order = order
        self._places = None if order is None else _inverse(order)
        self._may_jump = order is not None and not careful
        self._size: tuple[int, int] | None = None
        self._closed = False
        self._restart()
        self._first = self._frame(0)

    @property
    def info(self) -> VideoInfo:
        """What is known about the video."""
        return self._info

    @property
    def jumps(self) -> bool:
        """Whether the container knows its packets' times, and is not damaged."""
        return self._may_jump

    @property
    def careful(self) -> bool:
        """Whether the file is taken for damaged, so that only right frames are counted."""
        return self._careful

    def frame_times(self) -> np.ndarray:
        """Presentation times (N,) of all frames in seconds, ascending."""
        return self._times

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Decode frames by index: (T, H, W, 3) uint8 RGB, in the order asked for.

        Raises:
            TruncatedVideoError: the data are damaged; opened as ``careful``, the video has only frames that
                can be read.
            IndexError: an index is outside the video.
        """
        asked = np.asarray(indices, np.int64).reshape(-1)  # (T,)
        if len(asked) and not (asked.min() >= 0 and asked.max() < len(self._times)):
            raise IndexError(f"frame indices go from 0 to {len(self._times) - 1}")
        distinct, back = np.unique(asked, return_inverse=True)
        frames = np.empty((len(distinct), *self._first.shape), np.uint8)
        for row, index in enumerate(distinct):
            frames[row] = self._first if index == 0 else self._frame(int(index))
        return frames if np.array_equal(distinct, asked) else frames[back.reshape(-1)]

    def _frame(self, index: int) -> np.ndarray:
        """Decode on to frame ``index``, (H, W, 3)."""
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
        self._ready: list[Any] = []  # pictures that have come out and were not looked at
        self._count = 0  # of pictures that were looked at
        self._last = -1  # the last frame that was looked at
        self._landed = -1  # the frame of the key packet that was jumped to

    def _jump(self, index: int) -> bool:
        """Go to the last key packet shown at or before frame ``index``, if that is possible and pays."""
        order, places, decoder, pts = self._order, self._places, self._decoder, self._packets.pts
        if not self._may_jump or order is None or places is None or decoder is None or pts is None:
            return False
        if 0 < index - self._last < _PAYS:
            return False
        wanted = int(order[index])
        earlier = np.flatnonzero(self._packets.keys & self._packets.shown & (pts <= pts[wanted]))
        # the way there, from here or, to go back, from the first packet
        position = decoder.number if index > self._last else 0
        if not len(earlier) or (key := int(earlier[-1])) - position < _PAYS:
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
        """Decode on until the picture of frame ``index`` comes out.

        Raises:
            TruncatedVideoError: it does not come, or something before it is damaged.
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
        """The next picture that comes out; ``None`` at the end, or where the data are damaged."""
        assert self._decoder is not None
        while not self._ready:
            frames = self._decoder.step()
            if frames is None or (self._decoder.trouble and not self._pardoned(self._decoder.number)):
                return None
            self._ready = frames
        return self._ready.pop(0)

    def _pardoned(self, number: int) -> bool:
        """Whether complaints about this packet mean nothing.

        Its picture may be shown before the one that was jumped to, and made from pictures not decoded.
        """
        if self._careful:
            return True
        if self._places is None:
            return False
        place = self._frame_of(number)
        return place is None or place < self._landed

    def _place(self, frame: Any) -> int | None:
        """Which frame of the video a picture is; ``None`` if it is none."""
        if self._places is not None:
            return self._frame_of(frame.pts)
        if not self._packets.shown[frame.pts]:
            return None
        self._count += 1
        return self._count - 1

    def _frame_of(self, number: int | None) -> int | None:
        """Which frame of the video a packet holds; ``None`` if it is none."""
        assert self._places is not None
        if number is None or not 0 <= number < len(self._places):
            return None
        place = int(self._places[number])
        return None if place < 0 else place

    def _picture(self, frame: Any) -> np.ndarray:
        """A picture in RGB, upright, (H, W, 3), and of the size of the first one."""
        if self._size is None:
            self._size = frame.width, frame.height
            self._turns = round(frame.rotation / 90) % 4  # counterclockwise
        width, height = self._size
        with listening():
            picture = frame.reformat(width=width, height=height, format="rgb24", threads=1).to_ndarray()
        return np.ascontiguousarray(np.rot90(picture, self._turns))

    def close(self) -> None:
        """Let go of the file and the decoder."""
        self._closed = True
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
            self._ready = []


def _inverse(order: np.ndarray) -> np.ndarray:
    """The place of each packet in the ``order`` of showing; -1 of those that are not in it."""
    places = np.full(int(order.max(initial=-1)) + 1, -1)
    places[order] = np.arange(len(order))
    return places


def _scan(path: Path, kind: str) -> Packets:
    try:
        return scan(path, kind)
    except TruncatedVideoError as error:
        raise _undecodable(path, kind) from error


def _undecodable(path: Path, kind: str) -> VideoError:
    """The error for a file of which no frame can be had."""
    if kind == "webp":
        return UnsupportedCodecError(
            path, "animated WebP cannot be decoded", remedy="convert it to GIF, or its frames to a zip file"
        )
    return TruncatedVideoError(path, "the file is damaged: no frame can be decoded", remedy="get it again")
