"""Readers of references in the formats that datasets are published in.

The format of a file is detected from its content: COCO's ``annotations``, MSR-VTT's ``sentences``, the lines
of MSVD, segments with a sentence each (ActivityNet, YouCookII), objects of captions or paragraphs by id, and
capvid's own JSONL. Only captions and ids are read; an empty reference counts.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Generic

from capvid.datasets.annotation_files import JsonReader, first_ids, member, read_lines, read_text
from capvid.datasets.dataset import SPLITS, Location, RowError, Rows, check_unicode
from capvid.datasets.formats.coco import SPLIT_NAMES
from capvid.datasets.formats.msvd import MAPPING
from capvid.errors import DataError, UsageError
from capvid.scoring.predictions import (
    IDS,
    Predictions,
    T,
    activitynet_id,
    as_id,
    as_text,
    is_activitynet,
    is_record,
    match_ids,
    read_predictions,
)

FORMATS = ("coco", "msrvtt", "msvd", "activitynet", "youcook2", "captions", "paragraphs", "jsonl")
_LISTS = {"annotations": "coco", "images": "coco", "sentences": "msrvtt", "videos": "msrvtt"}
_BY_ID = ("captions", "paragraphs", "activitynet")  # objects with ids as names
_METADATA = ("info", "licenses", "type")
_REMEDY = f"name its format, one of {', '.join(FORMATS)}, with --references-format"


@dataclass
class ReferenceSet:
    """References of one or more files.

    Attributes:
        texts: captions or paragraphs by video, those of the first file first.
        first: videos of the first file.
        aliases: ids of videos by alternative names, such as the file name of an image.
        names: names of the files.
    """

    texts: dict[str, list[str]] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def read_references(path: Path, *, form: str = "", split: str = "", paragraphs: bool = False) -> ReferenceSet:
    """Read a file of references; ``first`` and ``names`` of the result are empty.

    Args:
        path: the file, plain or gzip.
        form: format, one of :data:`FORMATS`; empty to detect it.
        split: ``train``, ``val`` or ``test`` to take only that split, if the records state theirs.
        paragraphs: whether to read paragraphs; a list of sentences is then one paragraph, not captions.

    Raises:
        DataError: the file is unreadable or of another format; the message names file and line.
        UsageError: no such format or split.
    """
    if form and form not in FORMATS:
        raise UsageError(f"no references format {form!r}", remedy=f"use one of: {', '.join(FORMATS)}")
    if split and split not in SPLITS:
        raise UsageError(f"{path}: no split {split!r}", remedy=f"use one of: {', '.join(SPLITS)}")
    if path.is_dir():
        raise DataError(f"{path}: is a folder", remedy="give the file of references in it")
    reader = _Reader(path, form, paragraphs=paragraphs)
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        reader.read_json(JsonReader(path, text))
    else:
        reader.read_msvd(text)
    references = reader.references
    if split and references.texts:
        if not reader.splits:
            raise DataError(f"{path}: its records name no split", remedy=f"leave out #split={split}")
        for video in [video for video in references.texts if reader.splits.get(video) != split]:
            del references.texts[video]
    if not references.texts:
        problem = f"no captions of the {split} split" if split else "no captions"
        raise DataError(f"{path}: {problem} in this file", remedy="give a file of references")
    return references


class _Reader:
    """Reads one file of references."""

    def __init__(self, path: Path, form: str, *, paragraphs: bool) -> None:
        self.path = path
        self.form = form
        self.paragraphs = paragraphs
        self.references = ReferenceSet()
        self.splits: dict[str, str] = {}  # by id, if the file states them
        self._rows = Rows(skip_bad=False)

    def read_json(self, stream: JsonReader) -> None:
        first = stream.peek_value() if self.form in ("", "jsonl") else None
        if self.form == "jsonl" or (
            isinstance(first, dict) and "id" in first and ("captions" in first or "paragraphs" in first)
        ):
            while stream.peek():
                with self._rows.at(Location(self.path, stream.line)):
                    self._add_jsonl_row(stream.value())
        elif not self.form and isinstance(first, dict) and is_record(first):
            while stream.peek():
                with self._rows.at(Location(self.path, stream.line)):
                    self._add_record(stream.value())
        elif stream.peek() == "[":
            self._expect_format("coco")
            self._read_list(stream, "annotations")
        else:
            for line, name in stream.members():
                self._read_member(stream, line, name)
        stream.end()

    def _expect_format(self, form: str) -> None:
        """Check that the detected format is the requested one."""
        if self.form and form != self.form and (self.form, form) != ("youcook2", "activitynet"):
            raise DataError(
                f"{self.path}: has the format {form}, not {self.form}", remedy="leave out --references-format"
            )
        if self.paragraphs and form in ("coco", "msrvtt", "msvd"):
            raise DataError(f"{self.path}: holds captions, no paragraphs", remedy="leave out --paragraph")
        if not self.paragraphs and form in ("activitynet", "youcook2"):
            raise DataError(f"{self.path}: holds paragraphs", remedy="score them with --paragraph")

    def _read_member(self, stream: JsonReader, line: int, name: str) -> None:
        opening = stream.peek()
        if self.form not in _BY_ID:
            if name in _LISTS and opening == "[":
                self._expect_format(_LISTS[name])
                self._read_list(stream, name)
                return
            if name == "database" and opening == "{":
                self._expect_format("youcook2")
                for inner_line, video in stream.members():
                    with self._rows.at(Location(self.path, inner_line, f"record {reprlib.repr(video)}")):
                        row = stream.value()
                        annotations = member(row, "annotations", list, "list of annotations")
                        sentences = [member(item, "sentence", str, "sentence") for item in annotations]
                        self._add(video, [" ".join(_texts(sentences))])
                        self._note_split(video, row, "subset")
                return
            if name in _METADATA:
                stream.value()
                return
        with self._rows.at(Location(self.path, line, f"record {reprlib.repr(name)}")):
            self._add_by_id(name, stream.value())

    def _add_by_id(self, name: str, value: Any) -> None:
        """Add the references of an id: a text, a list of texts, or sentences with times."""
        if isinstance(value, (list, str)) and self.form not in ("captions", "paragraphs"):
            self._expect_format("captions" if isinstance(value, list) else "paragraphs")
        if isinstance(value, dict):
            self._expect_format("activitynet")
            self._add(name, [" ".join(_texts(member(value, "sentences", list, "list of sentences")))])
        elif isinstance(value, list):
            texts = _texts([item.get("caption") if isinstance(item, dict) else item for item in value])
            self._add(name, [" ".join(texts)] if self.paragraphs else texts)
        elif isinstance(value, str):
            self._add(name, [value])
        else:
            raise RowError(f"no captions: {reprlib.repr(value)}", _REMEDY)

    def _read_list(self, stream: JsonReader, name: str) -> None:
        """Read one of the lists of COCO or MSR-VTT: captions, or the images or videos."""
        for count, line in enumerate(stream.items(), 1):
            with self._rows.at(Location(self.path, line, f"record {count} of {name}")):
                row = stream.value()
                keys = ("id",) if name == "images" else IDS
                key = next((k for k in keys if isinstance(row, dict) and row.get(k) is not None), "")
                if not key:
                    raise RowError(f"no id: {reprlib.repr(row)}", f"give every record {keys[0]!r}")
                video = as_id(row[key])
                if name in ("images", "videos"):
                    self._note_split(video, row, "split")
                    if isinstance(row.get("file_name"), str):
                        self.references.aliases[PurePosixPath(row["file_name"]).stem] = video
                else:
                    self.references.texts.setdefault(video, []).extend(_texts([row.get("caption")]))

    def _add_record(self, row: Any) -> None:
        """Add a line with an id and a caption, as result files have them, or a list of captions."""
        name = next((row[key] for key in IDS if isinstance(row, dict) and row.get(key) is not None), None)
        if name is None:
            raise RowError(f"no id: none of {', '.join(IDS)}", 'write {"id": "name", "captions": ["..."]}')
        captions = row.get("captions", row.get("caption", row.get("text")))
        texts = [as_text(each) for each in (captions if isinstance(captions, list) else [captions])]
        self.references.texts.setdefault(as_id(name), []).extend(texts)

    def _add_jsonl_row(self, row: Any) -> None:
        if not isinstance(row, dict) or "id" not in row:
            raise RowError("no id", 'write {"id": "name", "captions": ["..."]} on each line')
        key, other = ("paragraphs", "captions") if self.paragraphs else ("captions", "paragraphs")
        if not row.get(key) and row.get(other):
            remedy = "leave out --paragraph" if self.paragraphs else "score them with --paragraph"
            raise RowError(f"no {key}, but {other}", remedy)
        texts = member(row, key, list, f"list of {key}")
        if self.paragraphs:
            texts = [" ".join(_texts(item if isinstance(item, list) else [item])) for item in texts]
        self._add(row["id"], _texts(texts))
        self._note_split(row["id"], row, "split")

    def read_msvd(self, text: str) -> None:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            with self._rows.at(Location(self.path, number)):
                name, tab, caption = line.rstrip("\r").partition("\t")
                if not tab:
                    raise RowError("neither JSON nor an id, a tab and a caption", _REMEDY)
                self.references.texts.setdefault(as_id(name), []).append(check_unicode(caption))
        if not self.references.texts:
            return
        self._expect_format("msvd")
        mapping = self.path.with_name(MAPPING)
        for path in filter(Path.is_file, (mapping, mapping.with_name(f"{MAPPING}.gz"))):
            for _, row in read_lines(path, self._rows):
                clip, _, video = row.strip().partition(" ")
                self.references.aliases[clip] = video.strip()

    def _note_split(self, name: Any, row: dict[str, Any], key: str) -> None:
        if isinstance(row.get(key), str):
            self.splits[as_id(name)] = SPLIT_NAMES.get(row[key], row[key])

    def _add(self, name: Any, texts: list[str]) -> None:
        """Add the references of a new video."""
        video = as_id(name)
        if video in self.references.texts:
            raise RowError(f"the id {reprlib.repr(video)} occurs twice", "give each video one record")
        if not texts:
            raise RowError("no captions", "give it some, or remove the record")
        self.references.texts[video] = texts


def _texts(values: list[Any]) -> list[str]:
    """Check that values are texts, and return them."""
    for value in values:
        if not isinstance(value, str):
            raise RowError(f"a caption that is not text: {reprlib.repr(value)}", "write captions as strings")
    return [check_unicode(value) for value in values]


@dataclass
class MatchedPredictions(Generic[T]):
    """Predictions of referenced videos.

    Attributes:
        sentences: predicted sentences by video; a caption is one sentence.
        missing: videos of the references without a prediction.
        extra: ids of predictions without a video in the references.
        notes: further remarks, one line each.
        names: id of the prediction by video.
    """

    sentences: dict[str, list[T]]
    missing: list[str]
    extra: list[str]
    notes: list[str]
    names: dict[str, str]


def load_references(specs: Sequence[str], *, form: str = "", paragraphs: bool = False) -> ReferenceSet:
    """Read files of references; a video has the references of all files.

    Args:
        specs: paths; with ``#split=test`` appended, only that split.
        form: format of the files, one of :data:`FORMATS`; by default detected from the content.
        paragraphs: whether they hold paragraphs.

    Raises:
        DataError: a file is unreadable; the message names file and line.
        UsageError: no such format or split.
    """
    files = []
    for spec in specs:
        name, mark, fragment = spec.rpartition("#")
        split = ""
        if mark and not Path(spec).exists():
            key, _, split = fragment.partition("=")
            if key != "split" or not split:
                raise UsageError(
                    f"{spec}: {fragment!r} is not understood after the #", remedy="use split=test"
                )
        path = Path(name if split else spec)
        files.append(read_references(path, form=form, split=split, paragraphs=paragraphs))
    add_prefix = paragraphs and any(is_activitynet(file.texts) for file in files)
    references = ReferenceSet(names=list(specs))
    for file in files:
        for name, texts in file.texts.items():
            video = activitynet_id(name) if add_prefix else name
            references.texts.setdefault(video, []).extend(texts)
        references.aliases.update(file.aliases)
        references.first = references.first or list(references.texts)
    if add_prefix:
        with_prefix = [video for video in references.texts if is_activitynet([video])]
        references.aliases.update({video.removeprefix("v_"): video for video in with_prefix})
    return references


def load_predictions(
    path: Path, references: ReferenceSet, *, paragraphs: bool = False, missing: str = "error"
) -> MatchedPredictions[str]:
    """Read predictions and match them with the videos of the references.

    Args:
        path: a file, or a folder with one file per video.
        references: the references.
        paragraphs: whether they are paragraphs.
        missing: as for :func:`match_predictions`.

    Raises:
        DataError: the file is unreadable, no id is in the references, or predictions are missing.
    """
    predictions = read_predictions(path, paragraphs=paragraphs)
    return match_predictions(path, predictions, references.texts, references.aliases, missing)


def match_predictions(
    path: Path,
    predictions: Predictions[T],
    videos: Collection[str],
    aliases: Mapping[str, str],
    missing: str = "error",
) -> MatchedPredictions[T]:
    """Match predictions with the videos of the references.

    Args:
        path: their file or folder, for messages.
        predictions: the predictions.
        videos: ids of the references.
        aliases: these ids by alternative names.
        missing: ``error`` if every video of the references needs a prediction.

    Raises:
        DataError: no id is in the references, or predictions are missing.
    """
    matches = match_ids(predictions.sentences, videos, aliases)
    sentences = {
        video: predictions.sentences[matches.videos[video]] for video in videos if video in matches.videos
    }
    unpredicted = [video for video in videos if video not in sentences]
    if not sentences and predictions.sentences:
        raise DataError(
            f"{path}: none of its {len(predictions.sentences)} ids is in the references; they are like "
            f"{next(iter(predictions.sentences))!r}, and there like {next(iter(videos))!r}",
            remedy="give the references of these videos",
        )
    failed, extra = predictions.failed, matches.extra
    if unpredicted and (missing == "error" or not sentences):
        failures = f" ({len(failed)} of the predictions failed)" if failed else ""
        raise DataError(
            f"{path}: no prediction for {len(unpredicted)} of {len(videos)} videos{failures}: "
            f"{first_ids(unpredicted)}",
            remedy="caption them too, or choose --missing empty or skip",
        )
    notes = []
    if extra:
        notes.append(f"{path}: {len(extra)} not in the references, left out: {first_ids(extra)}")
    if matches.ambiguous:
        notes.append(f"{path}: several ids fit one video by name: {first_ids(matches.ambiguous)}")
    if failed:
        notes.append(f"{path}: {len(failed)} failed to be captioned: {first_ids(failed)}")
    if predictions.dropped:
        notes.append(f"{path}: {predictions.dropped} captions are not the first of their video, left out")
    return MatchedPredictions(sentences, unpredicted, extra, notes, matches.videos)
