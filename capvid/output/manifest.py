"""Where a run puts its captions, and the manifest of what is done.

Captions go into an output folder (:class:`OutputFolder`), or to the videos they describe, as training data:
a text beside each video (:class:`Sidecars`), or a line each in one file (:class:`VideoFolder`). People edit
such texts, so one that capvid did not write is never replaced.

A manifest has a line for each output, appended as soon as the output is written, so that a killed run loses
no more than the line it was writing. At the end the lines are sorted.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from capvid.errors import CapvidError, DataError
from capvid.output.results import CaptionResult
from capvid.utils.escaping import utf8_text
from capvid.utils.files import MANIFEST, atomic_write_text, cache_folder, read_regular, remove_leftovers
from capvid.utils.storage import VideoPath
from capvid.utils.validation import limits, parse_json
from capvid.video.input_set import VideoInput

METADATA = "metadata.jsonl"  # of a folder of videos, as the library datasets reads it


class KeyedLines(AbstractContextManager["KeyedLines"]):
    """File of JSON objects, one per line and key; a context manager that sorts it at the end.

    Args:
        path: the file, which need not exist.
        key: member of the objects by which they are told apart; the last object of a key counts.
        strict: whether people write in the file as well: a line that is no such object, or a second one of a
            key, is an error then, and otherwise left out.

    Raises:
        OSError: the file cannot be read or written.
        DataError: such a line.
    """

    def __init__(self, path: Path, key: str, *, strict: bool = False) -> None:
        self.path, self.key, self.strict = path, key, strict
        self._newline = b""
        self.rows = self._read()

    def __exit__(self, *error: object) -> None:
        self._write(self._read())  # again: other processes may have appended theirs

    def _write(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        text = "".join(_text(row) for _, row in sorted(rows.items()))
        if rows and text.encode() != read_regular(self.path, max_bytes=limits().text_bytes):
            atomic_write_text(self.path, text)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append an object; in a file that people write in, replace the one of the same key."""
        known = row[self.key] in self.rows
        self.rows[row[self.key]] = dict(row)
        if self.strict and known:
            self._write({**self._read(), row[self.key]: row})
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:  # opened anew: it may have been replaced
            file.write(self._newline + _text(row).encode("utf-8"))
        self._newline = b""

    def _read(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        try:
            data = read_regular(self.path, max_bytes=limits().text_bytes)
        except FileNotFoundError:
            return rows
        lines = data.split(b"\n")
        if lines[-1]:  # a line that was cut short must not swallow the next
            self._newline = b"\n"
        for number, line in enumerate(lines, 1):
            try:
                row = parse_json(line.decode("utf-8"))
            except ValueError:
                row = None
            problem = f"not a JSON object with {self.key}" if line.strip() else ""
            if isinstance(row, dict) and isinstance(row.get(self.key), str):
                problem = f"a second line for {row[self.key]}" if row[self.key] in rows else ""
                rows[row[self.key]] = row
            if self.strict and problem:
                location = f"{self.path}, line {number}"
                raise DataError(f"{location}: {problem}", remedy="correct it, or move the file elsewhere")
        return rows


class Manifest(KeyedLines):
    """Outcome of each video of a run; a context manager.

    Args:
        path: the file.
        model: captioner as ``name@revision``.
        settings: everything else that the captions depend on.
        absolute: whether to name videos by absolute paths, or as they were given.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(
        self, path: Path, *, model: str, settings: Mapping[str, Any], absolute: bool = False
    ) -> None:
        self.model, self.absolute = model, absolute
        text = json.dumps(dict(settings), sort_keys=True)
        self.settings = hashlib.sha256(text.encode()).hexdigest()[:16]
        super().__init__(path, "output")

    def is_done(self, video: VideoPath, output: str) -> bool:
        """Whether the last captions of this output are those of the video as it is now."""
        line = self.rows.get(output, {})
        return line.get("status") == "ok" and line == {**line, **self._line(video, output, "ok", None)}

    def has_text(self, output: str, text: str) -> bool:
        """Whether this text of an output was written by capvid."""
        return self.rows.get(output, {}).get("text") == _digest(text)

    def note(self, result: CaptionResult, output: str, text: str | None = None) -> None:
        """Append the outcome of a video, and a digest of the text of its output if people may edit that."""
        error = None if result.error is None else str(result.error)
        line = self._line(result.path, output, result.status, error)
        self.append(line if text is None else {**line, "text": _digest(text)})

    def _line(self, video: VideoPath, output: str, status: str, error: str | None) -> dict[str, Any]:
        try:
            stat = os.stat(video)  # noqa: PTH116
            size, modified = stat.st_size, stat.st_mtime_ns
        except (OSError, ValueError):  # an address, a member of an archive, or deleted
            size = modified = 0
        return {
            "output": output,
            "video": utf8_text(os.path.abspath(video) if self.absolute else video),  # noqa: PTH100  # links stay
            "size": size,
            "modified": modified,
            "model": self.model,
            "settings": self.settings,
            "status": status,
            "error": None if error is None else utf8_text(error),
        }


class Outputs(ExitStack):
    """Outputs of a run, one for each video; a context manager.

    Attributes:
        folder: the only folder that is written to; None if there are many.
        edited: videos whose text somebody wrote or edited; it stays.
    """

    folder: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self.edited: set[VideoPath] = set()

    @abstractmethod
    def is_done(self, video: VideoPath) -> bool:
        """Whether there is nothing to do for a video."""

    @abstractmethod
    def write(self, result: CaptionResult) -> None:
        """Write a result and note the outcome.

        Raises:
            OSError: it cannot be written.
            CapvidError: it cannot be rendered, or the video has no output here.
        """


class OutputFolder(Outputs):
    """A file per video in an output folder.

    Args:
        folder: the folder.
        names: names of the files in it by video.
        render: function that returns the text of a result.
        records_errors: whether a failed video has a file as well.
        made_by: captioner and settings, for the manifest.
    """

    def __init__(
        self,
        folder: Path,
        names: Mapping[VideoPath, str],
        render: Callable[[CaptionResult], str],
        *,
        records_errors: bool,
        made_by: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.folder: Path = folder
        self.names, self.render, self.records_errors = names, render, records_errors
        remove_leftovers([folder / MANIFEST, *(folder / name for name in names.values())])
        self._manifest = Manifest(folder / MANIFEST, **made_by)
        self.enter_context(self._manifest)

    def is_done(self, video: VideoPath) -> bool:
        """Whether the file of the video is there, and its captions are those of the video as it is now."""
        name = self.names[video]
        return (self.folder / name).is_file() and self._manifest.is_done(video, name)

    def write(self, result: CaptionResult) -> None:
        """Write the file of a result."""
        name = self.names[result.path]
        if result.error is None or self.records_errors:
            atomic_write_text(self.folder / name, self.render(result))
        self._manifest.note(result, name)


class Dataset(Outputs):
    """Texts kept with the videos they describe; one that capvid did not write, or that was edited, stays.

    The manifests are in capvid's cache, one for each folder, so that the dataset holds nothing but texts.

    Args:
        made_by: captioner and settings, for the manifests.
        overwrite: whether to replace every text.
    """

    def __init__(self, made_by: Mapping[str, Any], *, overwrite: bool) -> None:
        super().__init__()
        self.made_by, self.overwrite = made_by, overwrite
        self._manifests: dict[Path, Manifest] = {}

    @abstractmethod
    def place(self, video: VideoPath) -> tuple[Path, str]:
        """Return the folder of a video's text, and the name of the text in it.

        Raises:
            CapvidError: the video cannot have one.
        """

    @abstractmethod
    def read(self, folder: Path, name: str) -> str | None:
        """Return the text with this name; None if there is none."""

    @abstractmethod
    def put(self, folder: Path, name: str, result: CaptionResult) -> str:
        """Write the text of a result, and return it as :meth:`read` would."""

    def manifest(self, folder: Path) -> Manifest:
        """Return the manifest of a folder."""
        if folder not in self._manifests:
            remove_leftovers([folder / METADATA])
            name = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
            path = cache_folder() / "datasets" / f"{name}.jsonl"
            self._manifests[folder] = Manifest(path, **self.made_by, absolute=True)
            self.enter_context(self._manifests[folder])
        return self._manifests[folder]

    def is_done(self, video: VideoPath) -> bool:
        """Whether the text is that of the video as it is now, or somebody else's."""
        folder, name = self.place(video)
        if self._is_edited(folder, name):
            self.edited.add(video)
            return True
        return self.read(folder, name) is not None and self.manifest(folder).is_done(video, name)

    def write(self, result: CaptionResult) -> None:
        """Write the text of a result, unless somebody wrote one meanwhile."""
        folder, name = self.place(result.path)
        if not self.overwrite and self._is_edited(folder, name):
            self.edited.add(result.path)
            return
        text = self.read(folder, name) if result.error else self.put(folder, name, result)
        self.manifest(folder).note(result, name, text)

    def _is_edited(self, folder: Path, name: str) -> bool:
        text = self.read(folder, name)
        return text is not None and not self.manifest(folder).has_text(name, text)


class Sidecars(Dataset):
    """A text file beside each video: ``clip.txt`` of ``clip.mp4``.

    Args:
        extension: extension of the files, without the dot.
        render: function that returns the text of a result.
        made_by: captioner and settings, for the manifests.
        overwrite: whether to replace every text.
    """

    def __init__(
        self,
        extension: str,
        render: Callable[[CaptionResult], str],
        made_by: Mapping[str, Any],
        *,
        overwrite: bool,
    ) -> None:
        super().__init__(made_by, overwrite=overwrite)
        self.extension, self.render = extension, render
        self._owners: dict[Path, VideoPath] = {}

    def place(self, video: VideoPath) -> tuple[Path, str]:
        """Return the folder of the video, and the name of its text."""
        if not isinstance(video, Path):
            problem = f"{video}: nothing can be written beside a video at an address or in an archive"
            raise CapvidError(problem, remedy="use --output-dir, with --format webdataset for archives")
        target = video.with_suffix(f".{self.extension}")
        owner = self._owners.setdefault(target, video)
        if target == video:
            raise CapvidError(f"{video}: a text beside it would have its name", remedy="rename it")
        if owner != video:
            problem = f"{video}: {target.name} beside it is the text of {owner.name}"
            raise CapvidError(problem, remedy="rename one of the videos")
        return target.parent, target.name

    def read(self, folder: Path, name: str) -> str | None:
        """Return the contents of the file."""
        try:
            data = read_regular(folder / name, max_bytes=limits().text_bytes)
        except FileNotFoundError:
            return None
        return data.decode("utf-8", "surrogateescape")

    def put(self, folder: Path, name: str, result: CaptionResult) -> str:
        """Write the file."""
        text = self.render(result)
        atomic_write_text(folder / name, text)
        return text


class VideoFolder(Dataset):
    """``metadata.jsonl`` in a folder of videos, as the library datasets reads it (``videofolder``).

    Each line has the path of a video in the folder (``file_name``) and its caption (``text``); further
    members that somebody added stay.

    Args:
        folder: the folder.
        made_by: captioner and settings, for the manifest.
        overwrite: whether to replace every text.

    Raises:
        OSError: the file cannot be read.
        DataError: the file holds something else.
    """

    def __init__(self, folder: Path, made_by: Mapping[str, Any], *, overwrite: bool) -> None:
        super().__init__(made_by, overwrite=overwrite)
        self.folder: Path = folder
        self._lines = self.enter_context(KeyedLines(folder / METADATA, "file_name", strict=True))

    def place(self, video: VideoPath) -> tuple[Path, str]:
        """Return the folder, and the path of the video in it."""
        relative = Path("..")
        if isinstance(video, Path):
            relative = Path(os.path.relpath(video, self.folder))
        if relative.parts[:1] == ("..",) or relative.is_absolute():
            problem = f"{video}: is not in {self.folder}, the folder of the dataset"
            raise CapvidError(problem, remedy="give the folder that holds the videos as --output-dir")
        return self.folder, utf8_text(relative.as_posix())

    def read(self, folder: Path, name: str) -> str | None:
        """Return the text in the line of a video."""
        text = self._lines.rows.get(name, {}).get("text")
        return None if text is None else str(text)

    def put(self, folder: Path, name: str, result: CaptionResult) -> str:
        """Append the line of a video."""
        text = utf8_text(result.captions[0].text)
        self._lines.append({**self._lines.rows.get(name, {}), "file_name": name, "text": text})
        return text


def file_names(videos: Iterable[VideoInput], extension: str) -> dict[VideoPath, str]:
    """Return the names of the files of videos in an output folder; none is that of the manifest."""
    names = {video.path: f"{video.key}.{extension}" for video in videos}
    return {path: f"{path.name}.{extension}" if name == MANIFEST else name for path, name in names.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _text(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    # As ASCII, a file name may hold bytes that are not UTF-8, and nothing in it ends the line.
    return (text if text.isprintable() else json.dumps(row)) + "\n"
