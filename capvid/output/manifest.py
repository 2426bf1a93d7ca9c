"""What became of each video whose captions go into a folder: a line for each in ``capvid-manifest.jsonl``.

A line is appended as soon as a video is done, after its file; a run that is killed loses no more than the
line that it was writing. At the end the lines are put in order, one for each video.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from capvid.digests import shown
from capvid.files import MANIFEST, atomic_write_text, read_regular
from capvid.limits import limits
from capvid.parsing import parse_json
from capvid.storage import VideoPath

if TYPE_CHECKING:
    from capvid.results import CaptionResult


class Manifest:
    """The manifest of a folder; a context, in which results are noted.

    Args:
        folder: for the captions.
        model: that writes them, ``name@revision``.
        settings: what else they depend on.

    Raises:
        OSError: it cannot be read or written.
    """

    def __init__(self, folder: Path, *, model: str, settings: Mapping[str, Any]) -> None:
        self.path, self.folder, self.model = folder / MANIFEST, folder, model
        text = json.dumps(dict(settings), sort_keys=True)
        self.settings = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._lines = _read(self.path)
        self._gap = (
            b"\n" if self.path.exists() else b""
        )  # a line that was cut short must not swallow the next

    def __enter__(self) -> Manifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lines = _read(self.path)  # other processes may have written theirs
        if lines:
            atomic_write_text(self.path, "".join(_text(lines[output]) for output in sorted(lines)))

    def is_done(self, video: VideoPath, output: str) -> bool:
        """Whether this video, as it is now, has its captions in the file ``output`` of the folder."""
        line = self._lines.get(output)
        if line is None or line["status"] != "ok" or not (self.folder / output).is_file():
            return False
        return line == self._line(video, output, "ok", None)

    def note(self, result: CaptionResult, output: str) -> None:
        """Write down what became of a video."""
        error = None if result.error is None else str(result.error)
        line = self._line(result.path, output, result.status, error)
        with self.path.open("ab", buffering=0) as file:  # each time anew: it may have been put in order
            file.write(self._gap + _text(line).encode("utf-8"))
        self._gap = b""

    def _line(self, video: VideoPath, output: str, status: str, error: str | None) -> dict[str, Any]:
        try:
            found = os.stat(video)  # noqa: PTH116
            size, changed = found.st_size, found.st_mtime_ns
        except (OSError, ValueError):  # at an address, in an archive, or gone
            size = changed = 0
        return {
            "output": output,
            "video": shown(video),
            "size": size,
            "modified": changed,
            "model": self.model,
            "settings": self.settings,
            "status": status,
            "error": None if error is None else shown(error),
        }


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the last whole line of each output; unreadable lines are ignored."""
    lines: dict[str, dict[str, Any]] = {}
    try:
        data = read_regular(path, max_bytes=limits().text_bytes)
    except FileNotFoundError:
        return lines
    for row in data.split(b"\n"):
        try:
            line = parse_json(row.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("output"), str) and "status" in line:
            lines[line["output"]] = line
    return lines


def _text(line: Mapping[str, Any]) -> str:
    text = json.dumps(line, ensure_ascii=False)
    # as ASCII the name of a file may hold bytes that are not UTF-8, and nothing ends the line
    return (text if text.isprintable() else json.dumps(line)) + "\n"
