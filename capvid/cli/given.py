"""What a command is to work on: its arguments, a list, and the part of them that is its own."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from capvid.cli.common import MAX_SHARDS, Batch
from capvid.errors import CapvidError, UsageError
from capvid.limits import limits

if TYPE_CHECKING:
    from capvid.digests import Part
    from capvid.storage import VideoPath
    from capvid.video.inputs import VideoInput

Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        show_default=False,
        help="Of all inputs only the Ith of N parts of about equal size, for jobs that share the work; a "
        "video's path alone decides in which part it is.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Given:
    """The inputs of a command.

    Attributes:
        inputs: files, folders, patterns, archives and addresses.
        source: the list of ``--from-file``, if there is one.
        column: of the list, if it is a table.
        text: the list itself, where it came from stdin.
        part: of all that they stand for; None takes everything.
        timeout: seconds for fetching the list, and for each request when inputs are listed; None waits for
            ever.
    """

    inputs: Sequence[str]
    source: str | None = None
    column: str | None = None
    text: bytes | None = None
    part: Part | None = None
    timeout: float | None = None

    @property
    def many(self) -> bool:
        """Whether they stand for a batch: more than one, a list, a pattern, a folder or an archive."""
        from capvid.storage import located
        from capvid.video.search import stands_for_many

        return self.source is not None or len(self.inputs) != 1 or stands_for_many(located(self.inputs[0]))

    def listed(self) -> Iterator[VideoPath]:
        """Entries of the list, as they are read.

        Raises:
            UsageError: it cannot be read.
        """
        from capvid.storage import located
        from capvid.video.lists import read_list, read_paths

        if self.text is not None:
            yield from read_paths(io.BytesIO(self.text))
        elif self.source is not None:
            yield from read_list(located(self.source), self.column, timeout=self.timeout)

    def videos(self, batch: Batch, *, recursive: bool, fail_fast: bool) -> list[VideoInput]:
        """Find the videos that the inputs stand for; what gives none counts as failed.

        Raises:
            CapvidError: with ``fail_fast``, the first that failed.
        """
        from capvid.digests import identity
        from capvid.video.inputs import find_videos

        failed = None if fail_fast else batch.failed
        entries = self._some(self.listed(), batch, fail_fast=fail_fast)
        found = find_videos(
            self.inputs, listed=entries, recursive=recursive, failed=failed, timeout=self.timeout
        )
        return found if self.part is None else [v for v in found if identity(v.path) in self.part]

    def stream(self, batch: Batch, *, recursive: bool, fail_fast: bool) -> Iterator[VideoInput]:
        """The same videos one after the other, however many there are."""
        from capvid.digests import identity
        from capvid.video.inputs import iter_videos

        failed = None if fail_fast else batch.failed
        entries = self._some(self.listed(), batch, fail_fast=fail_fast)
        found = iter_videos(
            self.inputs, listed=entries, recursive=recursive, failed=failed, timeout=self.timeout
        )
        part = self.part
        return found if part is None else (video for video in found if identity(video.path) in part)

    def _some(self, entries: Iterable[VideoPath], batch: Batch, *, fail_fast: bool) -> Iterator[VideoPath]:
        """The same entries; a list without any has failed."""
        empty = self.source is not None
        for entry in entries:
            empty = False
            yield entry
        if empty:
            error = CapvidError(f"{self.source}: there is no path in this list")
            if fail_fast:
                raise error
            batch.failed(error)


def read_given(
    inputs: Sequence[str] | None,
    source: str | None,
    *,
    column: str | None = None,
    shard: str | None = None,
    timeout: float | None = None,
) -> Given:
    """Read what a command is to work on: its arguments, and the list at ``source``, ``-`` for stdin.

    Raises:
        UsageError: there are neither, the list cannot be read, or there is no such part.
    """
    from capvid.storage import Blob, located
    from capvid.video.lists import open_list
    from capvid.video.search import EXTENSIONS

    part = None if shard is None else read_shard(shard)
    if any(not text for text in inputs or ()):
        raise UsageError(
            "an INPUT is empty", remedy="give a video, a folder or an address, . for this folder"
        )
    if source is None:
        if not inputs:
            raise UsageError("no input", remedy="give a video, a folder, or a list with --from-file")
        if column is not None:
            raise UsageError("--column is for --from-file", remedy="leave it out")
        return Given(inputs=inputs, part=part, timeout=timeout)
    if source == "-":
        if column is not None:
            raise UsageError("a list on stdin has no columns", remedy="leave out --column")
        text = sys.stdin.buffer.read(limits().list_bytes + 1)
        if len(text) > limits().list_bytes:
            raise UsageError(
                f"the list on stdin is larger than the limit of {limits().list_bytes} bytes",
                remedy="give it as a file",
            )
        return Given(inputs=inputs or [], source=source, text=text, part=part, timeout=timeout)
    path = located(source)
    if path.suffix.lower() in EXTENSIONS:
        raise UsageError(f"{source}: is a video, not a list of paths", remedy="leave out --from-file")
    if not isinstance(path, Blob):
        open_list(path).close()
    return Given(inputs=inputs or [], source=source, column=column, part=part, timeout=timeout)


def read_shard(text: str) -> Part:
    """Read which part of the inputs is meant, such as ``2/8``.

    Raises:
        UsageError: it is not understood.
    """
    from capvid.digests import Part

    number, _, parts = text.partition("/")
    if not (re.fullmatch("[0-9]{1,7}", number) and re.fullmatch("[0-9]{1,7}", parts)):
        raise UsageError(
            f"--shard {text}: not understood", remedy="write it as 2/8, the second of eight parts"
        )
    if int(parts) > MAX_SHARDS:
        raise UsageError(f"--shard {text}: too many parts", remedy=f"use at most {MAX_SHARDS}")
    if not 1 <= int(number) <= int(parts):
        raise UsageError(
            f"--shard {text}: there is no such part", remedy=f"give one of 1/{parts} to {parts}/{parts}"
        )
    return Part(int(number), int(parts))
