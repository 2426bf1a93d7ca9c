"""How videos are known by their paths, and which of very many were seen: some sixteen bytes for each."""

from __future__ import annotations

import hashlib

import numpy as np

from capvid.escaping import utf8_text
from capvid.storage import VideoPath

_RECENT = 1 << 16  # that are kept otherwise, before they are sorted into the others


def shown(text: VideoPath | str) -> str:
    r"""Give a path, or a text with paths in it, as text that can be written as UTF-8.

    What is no text in a file name becomes ``\xff``, so that different names stay different.
    """
    return utf8_text(text)


def identity(path: VideoPath | str) -> bytes:
    """Give the digest (16 bytes) by which a path or address is known, as it is written in records."""
    return hashlib.blake2b(shown(path).encode(), digest_size=16).digest()


class Digests:
    """A set of digests."""

    def __init__(self) -> None:
        self._sorted = np.empty((0, 2), np.uint64)  # by the first column
        self._recent: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, digest: bytes) -> bool:
        if digest in self._recent:
            return True
        first, second = np.frombuffer(digest, np.uint64)
        at = int(np.searchsorted(self._sorted[:, 0], first))
        while at < len(self._sorted) and self._sorted[at, 0] == first:
            if self._sorted[at, 1] == second:
                return True
            at += 1
        return False

    def add(self, digest: bytes) -> bool:
        """Add a digest; whether it is new."""
        if digest in self:
            return False
        self._recent.add(digest)
        if len(self._recent) > max(_RECENT, len(self._sorted) // 4):
            recent = np.frombuffer(b"".join(self._recent), np.uint64).reshape(-1, 2)
            together = np.concatenate([self._sorted, recent])
            self._sorted = together[np.argsort(together[:, 0], kind="stable")]
            self._recent.clear()
        return True


class Part:
    """One of several parts into which any inputs are divided: a video is always in the same one.

    The digest of its path decides, so that neither other inputs nor their order matter.

    Args:
        number: of the part, from 1.
        parts: how many there are.
    """

    def __init__(self, number: int, parts: int) -> None:
        self.number, self.parts = number, parts

    def __contains__(self, digest: bytes) -> bool:
        return int.from_bytes(digest[:8], "big") % self.parts == self.number - 1
