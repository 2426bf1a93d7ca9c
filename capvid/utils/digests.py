"""Digests that identify videos by path, and compact sets of them: about 16 bytes per video."""

from __future__ import annotations

import hashlib

import numpy as np

from capvid.utils.escaping import utf8_text
from capvid.utils.storage import VideoPath

_RECENT = 1 << 16  # digests kept in a plain set before they are merged into the sorted array


def shown(text: VideoPath | str) -> str:
    """Return a path, or a text with paths in it, as text that can be written as UTF-8."""
    return utf8_text(text)


def identity(path: VideoPath | str) -> bytes:
    """Return the digest (16 bytes) that identifies a path or address in records."""
    return hashlib.blake2b(utf8_text(path).encode(), digest_size=16).digest()


class Digests:
    """Compact set of 16-byte digests."""

    def __init__(self) -> None:
        self._sorted = np.empty((0, 2), np.uint64)  # by the first column
        self._recent: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, digest: bytes) -> bool:
        if digest in self._recent:
            return True
        first, second = np.frombuffer(digest, np.uint64)
        row = int(np.searchsorted(self._sorted[:, 0], first))
        while row < len(self._sorted) and self._sorted[row, 0] == first:
            if self._sorted[row, 1] == second:
                return True
            row += 1
        return False

    def add(self, digest: bytes) -> bool:
        """Add a digest and return whether it is new."""
        if digest in self:
            return False
        self._recent.add(digest)
        if len(self._recent) > max(_RECENT, len(self._sorted) // 4):
            recent = np.frombuffer(b"".join(self._recent), np.uint64).reshape(-1, 2)
            merged = np.concatenate([self._sorted, recent])
            self._sorted = merged[np.argsort(merged[:, 0], kind="stable")]
            self._recent.clear()
        return True


class Part:
    """Part ``number`` (from 1) of the inputs divided into ``parts``.

    The digest of a path alone decides, so that neither other inputs nor their order matter.
    """

    def __init__(self, number: int, parts: int) -> None:
        self.number, self.parts = number, parts

    def __contains__(self, digest: bytes) -> bool:
        return int.from_bytes(digest[:8], "big") % self.parts == self.number - 1
