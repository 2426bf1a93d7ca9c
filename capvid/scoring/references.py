"""Readers of references in the formats that datasets are published in.

The format of a file is detected from its content: COCO's ``annotations``, MSR-VTT's ``sentences``, the lines
of MSVD, segments with a sentence each (ActivityNet, YouCookII), objects of captions or paragraphs by id, and
capvid's own JSONL. Only captions and ids are read; an empty reference counts.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from capvid.datasets.annotation_files import (
    JsonReader,
    Location,
    RowError,
    Rows,
    TextLines,
    check_unicode,
    member,
    read_lines,
    read_text,
)
from capvid.datasets.dataset import SPLITS
from capvid.datasets.formats.msvd import MAPPING
from capvid.errors import DataError, UsageError
from capvid.scoring.predictions import IDS, activitynet_id, as_id, is_activitynet, match_ids, read_predictions

FORMS = ("coco", "msrvtt", "msvd", "activitynet", "youcook2", "captions", "paragraphs", "jsonl")
_LISTS = {"annotations": "coco", "images": "coco", "sentences": "msrvtt", "videos": "msrvtt"}
_BY_ID = ("captions", "paragraphs", "activitynet")  # objects with ids as names
_ABOUT = ("info", "licenses", "type")
_SPLIT_NAMES = {
    **{split: split for split in SPLITS},
    "training": "train",
    "restval": "train",
    "validation": "val",
    "validate": "val",
    "testing": "test",
}
_REMEDY = f"name its form, one of {', '.join(FORMS)}, with --references-format"


@dataclass
class References:
    """The references of one file.

    Attributes:
        texts: captions or paragraphs by id.
        aliases: ids by alternative names, such as the file name of an image.
    """

    texts: dict[str, list[str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def read_references(path: Path, *, form: str = "", split: str = "", paragraphs: bool = False) -> References:
    """Read a file of references.

    Args:
        path: the file, plain or gzip.
        form: format, one of :data:`FORMS`; empty to detect it.
        split: ``train``, ``val`` or ``test`` to take only that split, if the records state theirs.
        paragraphs: whether to read paragraphs; a list of sentences is then one paragraph, not captions.

    Raises:
        DataError: the file is unreadable or of another format; the message names file and line.
        UsageError: no such format or split.
    """
    if form and form not in FORMS:
        raise UsageError(f"no form of references {form!r}", remedy=f"use one of: {', '.join(FORMS)}")
    if split and split not in SPLITS:
        raise UsageError(f"{path}: no split {split!r}", remedy=f"use one of: {', '.join(SPLITS)}")
    if path.is_dir():
        raise DataError(f"{path}: is a folder", remedy="give the file of references in it")
    reader = _Reader(path, form, split, paragraphs=paragraphs)
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        reader.read_json(JsonReader(path, text))
    else:
        reader.read_msvd(TextLines(text))
    return reader.finish()


class _Reader:
    """Reads one file of references."""

    def __init__(self, path: Path, form: str, split: str, *, paragraphs: bool) -> None:
        self.path = path
        self.form = form
        self.split = split
        self.paragraphs = paragraphs
        self.references = References()
        self._splits: dict[str, str] = {}  # of the ids, if the file states them
        self._rows = Rows(skip_bad=False)

    def finish(self) -> References:
        """Return the references of the split."""
        texts = self.references.texts
        if self.split and texts:
            if not self._splits:
                raise DataError(
                    f"{self.path}: its records name no split", remedy=f"leave out #split={self.split}"
                )
            self.references.texts = {
                video: lines for video, lines in texts.items() if self._splits.get(video) == self.split
            }
        if not self.references.texts:
            what = f"no captions of the {self.split} split" if self.split else "no captions"
            raise DataError(f"{self.path}: {what} in this file", remedy="give a file of references")
        return self.references

    def read_json(self, stream: JsonReader) -> None:
        first = stream.peek_value() if self.form in ("", "jsonl") else None
        if self.form == "jsonl" or (
            isinstance(first, dict) and "id" in first and ("captions" in first or "paragraphs" in first)
        ):
            while stream.peek():
                location = Location(self.path, stream.line)
                with self._rows.at(location):
                    self._take_row(stream.value())
            return
        if stream.peek() == "[":
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
                f"{self.path}: is of the form {form}, not {self.form}", remedy="leave out --references-format"
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
                for inner, video in stream.members():
                    with self._rows.at(Location(self.path, inner, f"record {reprlib.repr(video)}")):
                        self._take_youcook2(video, stream.value())
                return
            if name in _ABOUT:
                stream.value()
                return
        with self._rows.at(Location(self.path, line, f"record {reprlib.repr(name)}")):
            self._take_by_id(name, stream.value())

    def _take_by_id(self, name: str, value: Any) -> None:
        """Add the references of an id: a text, a list of texts, or sentences with times."""
        if isinstance(value, (list, str)) and self.form not in ("captions", "paragraphs"):
            self._expect_format("captions" if isinstance(value, list) else "paragraphs")
        if isinstance(value, dict):
            self._expect_format("activitynet")
            self._add_new(name, [" ".join(_texts(member(value, "sentences", list, "list of sentences")))])
        elif isinstance(value, list):
            texts = _texts([one.get("caption") if isinstance(one, dict) else one for one in value])
            self._add_new(name, [" ".join(texts)] if self.paragraphs else texts)
        elif isinstance(value, str):
            self._add_new(name, [value])
        else:
            raise RowError(f"no captions: {reprlib.repr(value)}", _REMEDY)

    def _take_youcook2(self, name: str, row: Any) -> None:
        """Add the paragraph of a record of YouCookII."""
        annotations = member(row, "annotations", list, "list of annotations")
        self._add_new(
            name, [" ".join(_texts([member(one, "sentence", str, "sentence") for one in annotations]))]
        )
        self._note_split(as_id(name), row, "subset")

    def _read_list(self, stream: JsonReader, name: str) -> None:
        """Read one of the lists of COCO or MSR-VTT: captions, or the images or videos."""
        for count, line in enumerate(stream.items(), 1):
            with self._rows.at(Location(self.path, line, f"record {count} of {name}")):
                row = stream.value()
                keys = ("id",) if name == "images" else IDS
                key = next((one for one in keys if isinstance(row, dict) and row.get(one) is not None), "")
                if not key:
                    raise RowError(f"no id: {reprlib.repr(row)}", f"give every record {keys[0]!r}")
                video = as_id(row[key])
                if name in ("images", "videos"):
                    self._note_split(video, row, "split")
                    if isinstance(row.get("file_name"), str):
                        self.references.aliases[PurePosixPath(row["file_name"]).stem] = video
                else:
                    self.references.texts.setdefault(video, []).extend(_texts([row.get("caption")]))

    def _take_row(self, row: Any) -> None:
        """Add the references of a line of JSONL."""
        if not isinstance(row, dict) or "id" not in row:
            raise RowError("no id", 'write {"id": "name", "captions": ["..."]} on each line')
        key, other = ("paragraphs", "captions") if self.paragraphs else ("captions", "paragraphs")
        if not row.get(key) and row.get(other):
            remedy = "leave out --paragraph" if self.paragraphs else "score them with --paragraph"
            raise RowError(f"no {key}, but {other}", remedy)
        texts = member(row, key, list, f"list of {key}")
        if self.paragraphs:
            texts = [" ".join(_texts(one if isinstance(one, list) else [one])) for one in texts]
        self._add_new(row["id"], _texts(texts))
        self._note_split(as_id(row["id"]), row, "split")

    def read_msvd(self, lines: TextLines) -> None:
        for line in lines:
            if not line.strip():
                continue
            with self._rows.at(Location(self.path, lines.number)):
                name, tab, caption = line.rstrip("\r\n").partition("\t")
                if not tab:
                    raise RowError("neither JSON nor an id, a tabulator and a caption", _REMEDY)
                self.references.texts.setdefault(as_id(name), []).append(check_unicode(caption))
        if not self.references.texts:
            return
        self._expect_format("msvd")
        mapping = self.path.with_name(MAPPING)
        packed = mapping.with_name(f"{MAPPING}.gz")
        for path in filter(Path.is_file, (mapping, packed)):
            for _, text in read_lines(path, self._rows):
                clip, _, video = text.strip().partition(" ")
                self.references.aliases[clip] = video.strip()

    def _note_split(self, video: str, row: dict[str, Any], key: str) -> None:
        if isinstance(row.get(key), str):
            self._splits[video] = _SPLIT_NAMES.get(row[key], row[key])

    def _add_new(self, name: Any, texts: list[str]) -> None:
        """Add the references of a new video."""
        video = as_id(name)
        if video in self.references.texts:
            raise RowError(f"the id {reprlib.repr(video)} comes twice", "give each video one record")
        if not texts:
            raise RowError("no captions", "give it some, or remove the record")
        self.references.texts[video] = texts


def _texts(values: list[Any]) -> list[str]:
    """Check that values are texts, and return them."""
    for value in values:
        if not isinstance(value, str):
            raise RowError(f"a caption that is not text: {reprlib.repr(value)}", "write captions as strings")
    return [check_unicode(value) for value in values]


_NAMED = 5  # ids named in a message


@dataclass
class ReferenceSet:
    """References of one or more files.

    Attributes:
        texts: captions or paragraphs by video, those of the first file first.
        first: videos of the first file.
        aliases: ids of videos by alternative names.
        names: names of the files.
    """

    texts: dict[str, list[str]]
    first: list[str]
    aliases: dict[str, str]
    names: list[str]


@dataclass
class MatchedPredictions:
    """Predictions of referenced videos.

    Attributes:
        sentences: predicted sentences by video; a caption is one sentence.
        missing: videos of the references without a prediction.
        extra: ids of predictions without a video in the references.
        notes: further remarks, one line each.
    """

    sentences: dict[str, list[str]]
    missing: list[str]
    extra: list[str]
    notes: list[str] = field(default_factory=list)


def load_references(specs: Sequence[str], *, form: str = "", paragraphs: bool = False) -> ReferenceSet:
    """Read files of references; a video has the references of all files.

    Args:
        specs: paths; with ``#split=test`` appended, only that split.
        form: format of the files, one of :data:`FORMS`; by default detected from the content.
        paragraphs: whether they hold paragraphs.

    Raises:
        DataError: a file is unreadable; the message names file and line.
        UsageError: no such format or split.
    """
    files = [
        read_references(path, form=form, split=split, paragraphs=paragraphs)
        for path, split in map(_split_fragment, specs)
    ]
    texts: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    prefixed = paragraphs and any(is_activitynet(file.texts) for file in files)
    first: list[str] = []
    for file in files:
        for name, own in file.texts.items():
            video = activitynet_id(name) if prefixed else name
            texts.setdefault(video, []).extend(own)
        aliases.update(file.aliases)
        first = first or list(texts)
    if prefixed:
        aliases.update({video.removeprefix("v_"): video for video in texts if is_activitynet([video])})
    return ReferenceSet(texts, first, aliases, list(specs))


def _split_fragment(spec: str) -> tuple[Path, str]:
    """Return the path of a references file, and the split to take."""
    name, mark, fragment = spec.rpartition("#")
    if not mark or Path(spec).exists():
        return Path(spec), ""
    key, _, split = fragment.partition("=")
    if key != "split" or not split:
        raise UsageError(f"{spec}: {fragment!r} is not understood after the #", remedy="use split=test")
    return Path(name), split


def load_predictions(
    path: Path, wanted: ReferenceSet, *, paragraphs: bool = False, missing: str = "error"
) -> MatchedPredictions:
    """Read predictions and match them with the videos of the references.

    Args:
        path: a file, or a folder with one file per video.
        wanted: the references.
        paragraphs: whether they are paragraphs.
        missing: ``error`` if every video of the references needs a prediction.

    Raises:
        DataError: the file is unreadable, no id is in the references, or predictions are missing.
    """
    read = read_predictions(path, paragraphs=paragraphs)
    matches = match_ids(read.sentences, wanted.texts, wanted.aliases)
    sentences = {
        video: read.sentences[matches.videos[video]] for video in wanted.texts if video in matches.videos
    }
    without = [video for video in wanted.texts if video not in sentences]
    matched = MatchedPredictions(sentences, without, matches.extra)
    if not sentences and read.sentences:
        raise DataError(
            f"{path}: none of its {len(read.sentences)} ids is in the references; they are like "
            f"{next(iter(read.sentences))!r}, and there like {next(iter(wanted.texts))!r}",
            remedy="give the references of these videos",
        )
    if without and (missing == "error" or not sentences):
        failed = f" ({len(read.failed)} of the predictions failed)" if read.failed else ""
        raise DataError(
            f"{path}: no prediction for {len(without)} of {len(wanted.texts)} videos{failed}: "
            f"{named(without)}",
            remedy="caption them too, or choose --missing empty or skip",
        )
    if matches.extra:
        matched.notes.append(
            f"{path}: {len(matches.extra)} not in the references, left out: {named(matches.extra)}"
        )
    if matches.ambiguous:
        matched.notes.append(f"{path}: several ids fit one video by name: {named(matches.ambiguous)}")
    if read.failed:
        matched.notes.append(f"{path}: {len(read.failed)} failed to be captioned: {named(read.failed)}")
    if read.further:
        matched.notes.append(f"{path}: {read.further} captions are not the first of their video, left out")
    return matched


def named(ids: Sequence[str]) -> str:
    """Return the first ids and the number of others, for a message."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(ids[:_NAMED]) + more
