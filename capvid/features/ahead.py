"""Videos decoded by other processes, ahead of those who need them. Imports no deep learning library."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from capvid.errors import CapvidError, DecoderError
from capvid.features.augment import Augmentation
from capvid.features.decode import Decoded, Timeline, View, decode_video, read_timeline
from capvid.isolation import input_error
from capvid.storage import Blob, VideoPath, located
from capvid.video.sampling import Sampling
from capvid.video.workers import WorkerDiedError, WorkerPool, WorkerTimeoutError


class HasPath(Protocol):
    """An input that carries more than its path.

    A ``key``, if it has one, names the video; a ``sampling`` of its own comes before the common one. Its
    ``variants``, if it has some, say how often it is looked at and by which augmentation, ``None`` for none.
    """

    @property
    def path(self) -> VideoPath:
        """Where the video is."""


@dataclass(frozen=True, kw_only=True)
class FailedInput:
    """An input that failed before it could be decoded; it keeps its place among the others."""

    path: VideoPath
    key: str
    error: CapvidError


Input = str | VideoPath | HasPath
Variants = tuple[Augmentation | None, ...]


@dataclass(frozen=True, kw_only=True)
class Video:
    """One input: its decoded frames, or the error.

    Its crops are those of all views in its first variant, then those in its second, and so on. One that is
    decoded in several ``parts`` is so many of these, one after the other. What is ``stored`` is a file of
    features, of which nothing is decoded.
    """

    path: VideoPath
    name: str
    decoded: Decoded | None
    error: CapvidError | None
    variants: Variants = (None,)
    parts: int = 1
    stored: bool = False

    def __len__(self) -> int:
        return len(self.variants) * len(self.decoded.times) if self.decoded else 0


class Decoder:
    """Decodes videos in the processes of a pool.

    Args:
        pool: the processes.
        sampling: which frames to take.
        views: what is kept of them.
        reader: name of the video reader; ``auto`` goes on to the next where one fails.
        pictures: whether to keep small pictures of the frames.
        stored: whether to let files of features pass, for those who need them.
    """

    def __init__(
        self,
        pool: WorkerPool,
        *,
        sampling: Sampling,
        views: Sequence[View],
        reader: str = "auto",
        pictures: bool = False,
        stored: bool = False,
    ) -> None:
        self._stored = stored
        self._pool = pool
        self._sampling = sampling
        self._views = tuple(views)
        self._reader = reader
        self._pictures = pictures

    def videos(self, inputs: Iterable[Input], *, frames: int) -> Generator[Video, None, None]:
        """Decode in order; ahead are as many videos as make so many ``frames``, and one per process.

        Inputs are taken one by one as they are needed. When the iteration is given up, what has not begun
        is not decoded any more.
        """
        pending: deque[tuple[Input, Future[Decoded] | None]] = deque()
        videos, seen, fill = 0, 0, 1
        try:
            for item in inputs:
                pending.append(self._begin(item))
                while len(pending) > self._pool.size + fill:
                    video = self._outcome(*pending.popleft())
                    if video.decoded:
                        videos, seen = videos + 1, seen + len(video)
                        fill = max(1, min(frames, math.ceil(frames * videos / seen)))
                    yield video
            while pending:
                yield self._outcome(*pending.popleft())
        finally:
            for _, future in pending:
                if future is not None:
                    future.cancel()

    def _begin(self, item: Input) -> tuple[Input, Future[Decoded] | None]:
        if isinstance(item, FailedInput) or self._passes(item):
            return item, None
        try:
            return item, self._submit(item, self._reader)
        except Exception as cause:
            return failed_input(item, cause), None

    def _passes(self, item: Input) -> bool:
        return self._stored and holds_features(path_of(item))

    def timelines(
        self, inputs: Iterable[Input], *, ahead: int
    ) -> Generator[tuple[Input, Timeline | None], None, None]:
        """See when the frames of each input are shown, in order, so many videos ahead.

        An input that cannot be opened has no timeline; decoding it will say why.
        """
        pending: deque[tuple[Input, Future[Timeline] | None]] = deque()
        try:
            for item in inputs:
                path = path_of(item)
                passes = self._passes(item)
                pending.append(
                    (item, None if passes else self._pool.submit(read_timeline, path, self._reader))
                )
                if len(pending) > ahead:
                    yield self._timeline(*pending.popleft())
            while pending:
                yield self._timeline(*pending.popleft())
        finally:
            for _, future in pending:
                if future is not None:
                    future.cancel()

    def _timeline(self, item: Input, future: Future[Timeline] | None) -> tuple[Input, Timeline | None]:
        try:
            return item, None if future is None else future.result()
        except WorkerTimeoutError:  # decoding would hang for as long again
            return failed_input(item, self._late(path_of(item))), None
        except Exception:  # whatever a decoder throws, it will throw again
            return item, None

    def _late(self, path: VideoPath) -> DecoderError:
        return DecoderError(
            path, f"not decoded within {self._pool.timeout:g} seconds", remedy="allow more with --timeout"
        )

    def _submit(self, item: Input, reader: str) -> Future[Decoded]:
        sampling = getattr(item, "sampling", self._sampling)
        views = [replace(view, augmentation=how) for how in _variants(item) for view in self._views]
        return self._pool.submit(decode_video, path_of(item), sampling, views, reader, self._pictures)

    def _outcome(self, item: Input, future: Future[Decoded] | None) -> Video:
        path = path_of(item)
        name = getattr(item, "key", path.stem)
        if isinstance(item, FailedInput):
            return Video(path=path, name=name, decoded=None, error=item.error)
        if future is None:
            return Video(path=path, name=name, decoded=None, error=None, stored=True)
        decoded: Decoded | None = None
        failure: CapvidError | None = None
        try:
            try:
                decoded = future.result()
            except WorkerDiedError as died:
                if not died.crashed or self._reader != "auto":
                    raise
                decoded = self._submit(item, "pyav").result()  # what crashes one reader another may read
        except WorkerTimeoutError:
            failure = self._late(path)
        except WorkerDiedError as died:
            failure = DecoderError(
                path, f"the process that decoded it was ended ({died})", remedy="convert it, say with ffmpeg"
            )
        except Exception as cause:
            failure = input_error(path, cause)
        parts = getattr(item, "parts_in_all", 1)
        return Video(
            path=path, name=name, decoded=decoded, error=failure, variants=_variants(item), parts=parts
        )


def holds_features(path: VideoPath) -> bool:
    """Whether an input is a file of features, and no video."""
    return path.suffix.lower() == ".safetensors"


def failed_input(item: Input, cause: Exception) -> FailedInput:
    """Put an input's error in its place.

    Raises:
        Exception: ``cause`` itself if it concerns every input.
    """
    path = path_of(item)
    return FailedInput(path=path, key=getattr(item, "key", path.stem), error=input_error(path, cause))


def path_of(item: Input) -> VideoPath:
    """Where an input is."""
    return located(item) if isinstance(item, str | Path | Blob) else item.path


def _variants(item: Input) -> Variants:
    return getattr(item, "variants", (None,))
