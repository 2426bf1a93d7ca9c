"""Manifest of a folder of captions: a line for each video in ``capvid-manifest.jsonl``.

A line is appended as soon as the captions of a video are written, so that a killed run loses no more than the
line it was writing. At the end the lines are sorted, one for each output.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from capvid.utils.escaping import utf8_text
from capvid.utils.files import MANIFEST, atomic_write_text, read_regular
from capvid.utils.storage import VideoPath
from capvid.utils.validation import limits, parse_json

if TYPE_CHECKING:
    from capvid.output.results import CaptionResult


class Manifest:
    """Manifest of a folder; a context manager that results are noted in.

    Args:
        folder: folder of the captions.
        model: captioner as ``name@revision``.
        settings: everything else that the captions depend on.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, folder: Path, *, model: str, settings: Mapping[str, Any]) -> None:
        self.path, self.folder, self.model = folder / MANIFEST, folder, model
        text = json.dumps(dict(settings), sort_keys=True)
        self.settings = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._lines = self._read()
        # A line that was cut short must not swallow the next.
        self._newline = b"\n" if self.path.exists() else b""

    def __enter__(self) -> Manifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lines = self._read()  # again: other processes may have appended theirs
        if lines:
            atomic_write_text(self.path, "".join(_text(line) for _, line in sorted(lines.items())))

    def is_done(self, video: VideoPath, output: str) -> bool:
        """Whether the file ``output`` of the folder holds the captions of this video as it is now."""
        line = self._lines.get(output)
        if line is None or line["status"] != "ok" or not (self.folder / output).is_file():
            return False
        return line == self._line(video, output, "ok", None)

    def note(self, result: CaptionResult, output: str) -> None:
        """Append the outcome of a video."""
        error = None if result.error is None else str(result.error)
        text = _text(self._line(result.path, output, result.status, error))
        with self.path.open("ab", buffering=0) as file:  # opened anew: it may have been replaced
            file.write(self._newline + text.encode("utf-8"))
        self._newline = b""

    def _line(self, video: VideoPath, output: str, status: str, error: str | None) -> dict[str, Any]:
        try:
            stat = os.stat(video)  # noqa: PTH116
            size, modified = stat.st_size, stat.st_mtime_ns
        except (OSError, ValueError):  # an address, a member of an archive, or deleted
            size = modified = 0
        return {
            "output": output,
            "video": utf8_text(video),
            "size": size,
            "modified": modified,
            "model": self.model,
            "settings": self.settings,
            "status": status,
            "error": None if error is None else utf8_text(error),
        }

    def _read(self) -> dict[str, dict[str, Any]]:
        """Read the last complete line of each output, ignoring unreadable lines."""
        lines: dict[str, dict[str, Any]] = {}
        try:
            data = read_regular(self.path, max_bytes=limits().text_bytes)
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
    # As ASCII, a file name may hold bytes that are not UTF-8, and nothing in it ends the line.
    return (text if text.isprintable() else json.dumps(line)) + "\n"
