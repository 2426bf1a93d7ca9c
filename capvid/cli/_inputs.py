"""The input set of a command: its arguments, a list file, and the part of them to work on."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capvid.cli._options import InputOptions
from capvid.cli._progress import Batch
from capvid.errors import CapvidError, UsageError
from capvid.utils.limits import limits

if TYPE_CHECKING:
    from capvid.utils.digests import Part
    from capvid.utils.storage import VideoPath
    from capvid.video.input_set import VideoInput

MAX_SHARDS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class InputSet:
    """The inputs of a command.

    Attributes:
        options: arguments, list file, and how folders are searched.
        text: the list, if it came from stdin.
        part: the part of the inputs to work on; None takes all.
        timeout: seconds for fetching the list, and for each request when inputs are listed; None disables it.
    """

    options: InputOptions
    text: bytes | None = None
    part: Part | None = None
    timeout: float | None = None

    @property
    def many(self) -> bool:
        """Whether this is a batch: several inputs, a list, a pattern, a folder or an archive."""
        from capvid.utils.storage import located
        from capvid.video.input_set import stands_for_many

        inputs = self.options.inputs or []
        return self.options.from_file is not None or len(inputs) != 1 or stands_for_many(located(inputs[0]))

    def find(self, batch: Batch) -> list[VideoInput]:
        """Return the videos that the inputs stand for; an input that gives none counts as failed.

        Raises:
            CapvidError: the first failure, with ``fail_fast``.
        """
        from capvid.video.input_set import find_videos

        return list(self._in_part(find_videos(self.options.inputs or [], **self._search(batch))))

    def stream(self, batch: Batch) -> Iterator[VideoInput]:
        """Yield the same videos lazily, however many there are."""
        from capvid.video.input_set import iter_videos

        return self._in_part(iter_videos(self.options.inputs or [], **self._search(batch)))

    def _search(self, batch: Batch) -> dict[str, Any]:
        return {
            "listed": self._listed(batch),
            "recursive": self.options.recursive,
            "failed": None if self.options.fail_fast else batch.failed,
            "timeout": self.timeout,
        }

    def _in_part(self, videos: Iterable[VideoInput]) -> Iterator[VideoInput]:
        from capvid.utils.digests import identity

        return (video for video in videos if self.part is None or identity(video.path) in self.part)

    def _listed(self, batch: Batch) -> Iterator[VideoPath]:
        """Yield the entries of the list; an empty list counts as failed."""
        from capvid.utils.storage import located
        from capvid.video.input_lists import read_list, read_paths

        source = self.options.from_file
        if source is None:
            return
        empty = True
        entries = (
            read_list(located(source), self.options.column, timeout=self.timeout)
            if self.text is None
            else read_paths(io.BytesIO(self.text))
        )
        for entry in entries:
            empty = False
            yield entry
        if empty:
            error = CapvidError(f"{source}: there is no path in this list")
            if self.options.fail_fast:
                raise error
            batch.failed(error)


def read_inputs(options: InputOptions, *, timeout: float | None) -> InputSet:
    """Check the input options of a command, and read a list on stdin.

    Raises:
        UsageError: no input, an unreadable list, or a part that does not exist.
    """
    from capvid.utils.storage import Blob, located
    from capvid.video.input_lists import open_list
    from capvid.video.input_set import EXTENSIONS

    source, text = options.from_file, None
    part = None if options.shard is None else read_part(options.shard)
    if any(not each for each in options.inputs or ()):
        raise UsageError(
            "an INPUT is empty", remedy="give a video, a folder or an address, . for this folder"
        )
    if source is None and not options.inputs:
        raise UsageError("no input", remedy="give a video, a folder, or a list with --from-file")
    if source is None and options.column is not None:
        raise UsageError("--column is for --from-file", remedy="leave it out")
    if source == "-":
        if options.column is not None:
            raise UsageError("a list on stdin has no columns", remedy="leave out --column")
        text = sys.stdin.buffer.read(limits().list_bytes + 1)
        if len(text) > limits().list_bytes:
            raise UsageError(
                f"the list on stdin is larger than the limit of {limits().list_bytes} bytes",
                remedy="give it as a file",
            )
    elif source is not None:
        path = located(source)
        if path.suffix.lower() in EXTENSIONS:
            raise UsageError(f"{source}: is a video, not a list of paths", remedy="leave out --from-file")
        if not isinstance(path, Blob):
            open_list(path).close()
    return InputSet(options=options, text=text, part=part, timeout=timeout)


def read_part(text: str) -> Part:
    """Parse the part of the inputs to work on, such as ``2/8``.

    Raises:
        UsageError: it is not understood.
    """
    from capvid.utils.digests import Part

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
