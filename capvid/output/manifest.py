"""Where a run puts its captions, and the manifest of what is done.

Captions go into an output folder (:class:`OutputFolder`), or to the videos they describe, as training data:
a text beside each video (:class:`Sidecars`), or a line each in one file (:class:`VideoFolder`). People edit
such texts, so one that capvid did not write is never replaced.

An output folder has a manifest with a line for each output, appended as soon as the output is written, so
that a killed run loses no more than the line it was writing. At the end the lines are sorted. Texts of
training data are recorded in a :class:`Ledger` outside the dataset.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from filelock import FileLock

from capvid.errors import CapvidError, DataError, UsageError
from capvid.output.results import CaptionResult
from capvid.utils.escaping import utf8_text
from capvid.utils.files import MANIFEST, atomic_write_text, cache_folder, read_regular, remove_leftovers
from capvid.utils.storage import VideoPath, is_url
from capvid.utils.validation import limits, parse_json
from capvid.video.input_lists import DIGEST_BYTES, Digests
from capvid.video.input_set import VideoInput

METADATA = "metadata.jsonl"  # of a folder of videos, as the library datasets reads it


class KeyedLines(AbstractContextManager["KeyedLines"]):
    """File of JSON objects, one per line and key; a context manager that sorts it at the end.

    Args:
        path: the file, which need not exist.
        key: member of the objects by which they are told apart; the last object of a key counts.
        strict: whether people write in the file as well: a line that is no such object, or a second one of a
            key, is an error then, and otherwise left out.
        lock: file to lock while writing, if other processes may replace lines.

    Raises:
        OSError: the file cannot be read or written.
        DataError: such a line.
    """

    def __init__(self, path: Path, key: str, *, strict: bool = False, lock: Path | None = None) -> None:
        self.path = Path(os.path.realpath(path))  # a link stays one
        self.key, self.strict = key, strict
        self._lock = FileLock(lock) if lock else None
        self._newline = b""
        self._version: tuple[int, int, int] | None = None  # of the file that was read
        self.rows: dict[str, dict[str, Any]] = {}
        self.refresh()

    def __exit__(self, *error: object) -> None:
        with self._locked():
            self._write(self._read())  # again: other processes may have appended theirs

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        version = self._stat()
        if version is None or version != self._version:
            self.rows, self._version = self._read(), version

    def _stat(self) -> tuple[int, int, int] | None:
        with suppress(FileNotFoundError):
            status = self.path.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing at the same time, where the file system has locks."""
        with ExitStack() as stack:
            if self._lock is not None:
                with suppress(OSError, NotImplementedError):
                    stack.enter_context(self._lock)
            yield

    def _write(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        text = "".join(_text(row) for _, row in sorted(rows.items()))
        if rows and text.encode() != read_regular(self.path, max_bytes=limits().feature_bytes):
            atomic_write_text(self.path, text)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append an object; in a file that people write in, replace the one of the same key."""
        with self._locked():
            if self.strict:
                self.refresh()
            known = row[self.key] in self.rows
            self.rows[row[self.key]] = dict(row)
            if self.strict and known:
                self._write(self.rows)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab", buffering=0) as file:  # opened anew: it may have been replaced
                    file.write(self._newline + _text(row).encode("utf-8"))
                self._newline = b""
            if self.strict:
                self._version = self._stat()

    def _read(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        try:
            data = read_regular(self.path, max_bytes=limits().feature_bytes)
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

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, *, model: str, settings: Mapping[str, Any]) -> None:
        self.model, self.settings = model, settings_digest(settings)
        super().__init__(path, "output")

    def is_done(self, video: VideoPath, output: str) -> bool:
        """Whether the last captions of this output are those of the video as it is now."""
        line = self.rows.get(output, {})
        return line.get("status") == "ok" and line == {**line, **self._line(video, output, "ok", None)}

    def note(self, result: CaptionResult, output: str) -> None:
        """Append the outcome of a video."""
        error = None if result.error is None else str(result.error)
        self.append(self._line(result.path, output, result.status, error))

    def _line(self, video: VideoPath, output: str, status: str, error: str | None) -> dict[str, Any]:
        size, modified = _version_of(video)
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


class Ledger:
    """Append-only set of digests in capvid's cache, shared by all runs, also those at the same time.

    It holds digests of texts instead of paths of files, so that a dataset can be moved. The file is a
    sequence of digests of 16 bytes.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self) -> None:
        self._digests, self._offset = Digests(), 0
        try:
            self.folder = cache_folder() / "datasets"
            self.folder.mkdir(parents=True, exist_ok=True)
            self._path = self.folder / "texts"
            self._append(b"")
        except (OSError, RuntimeError) as error:  # the latter where there is no home folder
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise UsageError(
                f"{getattr(error, 'filename', None) or 'the cache'}: cannot be written ({reason}), and what "
                "capvid wrote beside videos is recorded there",
                remedy="set CAPVID_CACHE to a folder that can be written",
            ) from error

    def __contains__(self, parts: tuple[str, ...]) -> bool:
        digest = self._digest(parts)
        if digest not in self._digests:
            with self._path.open("rb") as file:  # what other runs wrote meanwhile
                file.seek(self._offset)
                data = file.read()
            complete = data[: len(data) // DIGEST_BYTES * DIGEST_BYTES]
            self._offset += len(complete)
            self._digests.update(complete)
        return digest in self._digests

    def add(self, *records: tuple[str, ...]) -> None:
        """Append the digests of records, each a sequence of texts, that are new."""
        new = [record for record in records if record not in self]
        self._append(b"".join(map(self._digest, new)))

    def _append(self, data: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            if torn := file.tell() % DIGEST_BYTES:  # a write that a full disk cut short
                data = bytes(DIGEST_BYTES - torn) + data
            file.write(data)

    @staticmethod
    def _digest(parts: tuple[str, ...]) -> bytes:
        text = json.dumps(parts)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


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
    def captioner(self, videos: Iterable[VideoPath], names: Iterable[str]) -> str | None:
        """Return which of the captioners made most of the outputs that are there; None if none did."""

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
        self._manifest = Manifest(folder / MANIFEST, **made_by)
        self.enter_context(self._manifest)

    def __enter__(self) -> OutputFolder:
        remove_leftovers([self.folder / MANIFEST, *(self.folder / name for name in self.names.values())])
        return self

    def captioner(self, videos: Iterable[VideoPath], names: Iterable[str]) -> str | None:
        """Return which of the captioners made most of the outputs in the manifest."""
        made = Counter(str(row.get("model")).partition("@")[0] for row in self._manifest.rows.values())
        return max(made.keys() & set(names), key=lambda name: made[name], default=None)

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

    Args:
        made_by: captioner and settings.
        overwrite: whether to replace every text.

    Raises:
        UsageError: the ledger cannot be written.
    """

    def __init__(self, made_by: Mapping[str, Any], *, overwrite: bool) -> None:
        super().__init__()
        self.made_by = (made_by["model"], settings_digest(made_by["settings"]))
        self.overwrite = overwrite
        self.ledger = Ledger()

    @abstractmethod
    def place(self, video: VideoPath) -> tuple[str, ...]:
        """Return what names the text of a video in its dataset, wherever that is.

        Raises:
            CapvidError: the video cannot have one.
        """

    @abstractmethod
    def read(self, video: VideoPath) -> str | None:
        """Return the text of a video; None if there is none."""

    @abstractmethod
    def render(self, result: CaptionResult) -> str:
        """Return the text of a result."""

    @abstractmethod
    def put(self, video: VideoPath, text: str) -> None:
        """Write the text of a video."""

    def captioner(self, videos: Iterable[VideoPath], names: Iterable[str]) -> str | None:
        """Return which of the captioners wrote most of the videos' texts that are unchanged."""
        made, names = Counter[str](), list(names)
        for video in videos:
            with suppress(CapvidError, OSError):  # writing the text shows what is wrong
                if (text := self.read(video)) is not None:
                    written = (*self.place(video), text)
                    made.update(name for name in names if (*written, name) in self.ledger)
        return max(made, key=lambda name: made[name], default=None)

    def is_done(self, video: VideoPath) -> bool:
        """Whether the text is that of the video as it is now, or somebody else's."""
        place, text = self.place(video), self.read(video)
        if text is None:
            return False
        if (*place, text) not in self.ledger:
            self.edited.add(video)
            return True
        return self._done(video, text) in self.ledger

    def write(self, result: CaptionResult) -> None:
        """Write the text of a result, unless somebody wrote one meanwhile; a failed video keeps its text."""
        if result.error is not None:
            return
        place, before = self.place(result.path), self.read(result.path)
        if not self.overwrite and before is not None and (*place, before) not in self.ledger:
            self.edited.add(result.path)
            return
        text = self.render(result)
        # first, so that nobody, not even a run at the same time, finds a text of unknown origin
        captioner = self.made_by[0].partition("@")[0]
        records = place, (*place, text), (*place, text, captioner), self._done(result.path, text)
        self.ledger.add(*records)
        self.put(result.path, text)

    def _done(self, video: VideoPath, text: str) -> tuple[str, ...]:
        """Return the record of a finished video."""
        return (*self.place(video), text, *map(str, _version_of(video)), *self.made_by)


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
        self.extension, self._render = extension, render
        self._owners: dict[Path, str] = {}  # name of the video by path of its text
        self._siblings: dict[Path, dict[str, list[str]]] = {}  # names in each folder by stem

    def place(self, video: VideoPath) -> tuple[str, ...]:
        """Return the names of the text and of the video."""
        if not isinstance(video, Path):
            problem = f"{video}: nothing can be written beside a video at an address or in an archive"
            raise CapvidError(problem, remedy="use --output-dir, with --format webdataset for archives")
        target = self._target(video)
        if target == video:
            raise CapvidError(f"{video}: a text beside it would have its name", remedy="rename it")
        if target not in self._owners:
            self._owners[target] = self._owner(video, target)
        if (owner := self._owners[target]) != video.name:
            problem = f"{video}: {target.name} beside it is the text of {owner}"
            raise CapvidError(problem, remedy="rename one of the videos")
        return target.name, video.name

    def read(self, video: VideoPath) -> str | None:
        """Return the contents of the file."""
        try:
            data = read_regular(self._target(video), max_bytes=limits().feature_bytes)
        except FileNotFoundError:
            return None
        return data.decode("utf-8", "surrogateescape")

    def render(self, result: CaptionResult) -> str:
        """Return the file's text."""
        return self._render(result)

    def put(self, video: VideoPath, text: str) -> None:
        """Write the file."""
        atomic_write_text(self._target(video), text)

    def _target(self, video: VideoPath) -> Path:
        return Path(video).with_suffix(f".{self.extension}")

    def _owner(self, video: Path, target: Path) -> str:
        """Return the video in the folder whose text the file is: one that got it before, or this one."""
        if not target.exists() or (target.name, video.name) in self.ledger:
            return video.name
        if target.parent not in self._siblings:
            names = self._siblings[target.parent] = {}
            for entry in os.scandir(target.parent):
                names.setdefault(PurePath(entry.name).stem, []).append(entry.name)
        others = self._siblings[target.parent].get(video.stem, [])
        return next((name for name in others if (target.name, name) in self.ledger), video.name)


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
        path = Path(os.path.realpath(folder / METADATA))
        remove_leftovers([path])
        lock = self.ledger.folder / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.lock"
        self._lines = self.enter_context(KeyedLines(path, "file_name", strict=True, lock=lock))

    def place(self, video: VideoPath) -> tuple[str, ...]:
        """Return the name of the file, and the path of the video in the folder."""
        return METADATA, self._name(video)

    def _name(self, video: VideoPath) -> str:
        relative = Path("..")
        if isinstance(video, Path):
            relative = Path(os.path.relpath(video, self.folder))
        if relative.parts[:1] == ("..",) or relative.is_absolute():
            problem = f"{video}: is not in {self.folder}, the folder of the dataset"
            raise CapvidError(problem, remedy="give the folder that holds the videos as --output-dir")
        return utf8_text(relative.as_posix())

    def read(self, video: VideoPath) -> str | None:
        """Return the text in the line of a video."""
        self._lines.refresh()
        text = self._lines.rows.get(self._name(video), {}).get("text")
        return None if text is None else str(text)

    def render(self, result: CaptionResult) -> str:
        """Return the best caption."""
        return utf8_text(result.captions[0].text)

    def put(self, video: VideoPath, text: str) -> None:
        """Append or replace the line of a video; members that somebody added stay."""
        name = self._name(video)
        self._lines.append({**self._lines.rows.get(name, {}), "file_name": name, "text": text})


def file_names(videos: Iterable[VideoInput], extension: str, folder: Path) -> dict[VideoPath, str]:
    """Return the names of the files of videos in an output folder.

    A file that the manifest names as that of another video keeps its owner, as long as that video exists:
    a video that is added later gets another name, even if it has the same key.
    """
    names: dict[VideoPath, str] = {}
    names_of, taken = {}, {MANIFEST}
    for name, row in KeyedLines(folder / MANIFEST, "output").rows.items():
        if row.get("status") == "ok" and isinstance(row.get("video"), str) and (folder / name).is_file():
            owner = _real(row["video"])
            if name.endswith(f".{extension}"):
                names_of[owner] = name
            if is_url(owner) or os.path.lexists(owner):
                taken.add(name)
    videos = list(videos)
    for video in videos:
        if name := names_of.pop(_real(video.path), ""):
            names[video.path] = name
            taken.add(name)
    for video in videos:
        if video.path not in names:
            keys = (video.key, (PurePosixPath(video.key).parent / video.path.name).as_posix())
            numbered = (f"{video.key}-{number}" for number in itertools.count(2))
            candidates = (f"{key}.{extension}" for key in itertools.chain(keys, numbered))
            names[video.path] = next(name for name in candidates if name not in taken)
            taken.add(names[video.path])
    return names


def _real(path: VideoPath | str) -> str:
    """Return a local path without links, or an address, as text that manifests can hold."""
    text = os.fspath(path)
    return utf8_text(text if is_url(text) or "\0" in text else os.path.realpath(text))


def _version_of(video: VideoPath) -> tuple[int, int]:
    """Return size and time of modification; zeros if there is no such file, as for an address."""
    try:
        stat = os.stat(video)  # noqa: PTH116
    except (OSError, ValueError):
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return a digest of settings for records."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]


def _text(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    # As ASCII, a file name may hold bytes that are not UTF-8, and nothing in it ends the line.
    return (text if text.isprintable() else json.dumps(row)) + "\n"
