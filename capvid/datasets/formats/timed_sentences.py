"""ActivityNet Captions and YouCookII: paragraphs of sentences, each about a segment in seconds.

``train.json`` of ActivityNet has 10,009 videos. The others come from ``captioning_val_1.json`` (ae-val, 2460)
and ``captioning_test_1.json`` (ae-test, 2457), the halves of the validation videos in the MART paper; without
both files, all 4917 videos of ``val_1.json`` are the val split. A second annotator described most of these
videos with other segments, in ``val_2.json``, or as complete paragraphs in ``captioning_val_2_para.json`` and
``captioning_test_2_para.json``. These paragraphs are further references.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from capvid.datasets.annotation_files import (
    JsonFile,
    Location,
    RowError,
    Rows,
    check_caption,
    find_file,
    find_splits,
    member,
    note_mended,
    read_timed,
    timed_video,
)
from capvid.datasets.dataset import CaptionedVideo, dataset_format

FILES = (("train", "train.json"), ("val", "captioning_val_1.json"), ("test", "captioning_test_1.json"))
WHOLE = (("train", "train.json"), ("val", "val_1.json"))
SECOND = "val_2.json"
SECOND_PARAGRAPHS = ("captioning_val_2_para.json", "captioning_test_2_para.json")


@dataset_format("activitynet", "DIR", "ActivityNet Captions as published")
def read_activitynet(
    folder: Path, rows: Rows, options: Mapping[str, str]
) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read the videos of all splits; the paragraphs of the second annotator come last.

    Raises:
        DataError: the files are missing or not as published, or have a bad row and these are not skipped.
    """
    halves = any(find_file(folder, name) for _, name in FILES[1:])
    files = FILES if halves or not find_file(folder, WHOLE[1][1]) else WHOLE
    if files is WHOLE:
        names = " and ".join(name for _, name in FILES[1:])
        rows.notes.append(f"{folder}: no {names}, so all of {WHOLE[1][1]} is the val split")
    second: dict[str, tuple[str, ...]] | None = None
    for split, path in find_splits(folder, files, rows):
        if split != "train" and second is None:
            second = _second(folder, rows)
        for location, video in read_timed(path, split, rows):
            if split != "train" and second and video.id in second:
                video = replace(video, paragraphs=(*video.paragraphs, second[video.id]))
            yield location, video


def _second(folder: Path, rows: Rows) -> dict[str, tuple[str, ...]]:
    """Return the paragraphs of the second annotator by video id."""
    paragraphs: dict[str, tuple[str, ...]] = {}
    path = find_file(folder, SECOND)
    if path is not None:
        for location, video in read_timed(path, "val", rows):
            with rows.at(location):
                _add(paragraphs, video.id, video.paragraphs[0])
        return paragraphs
    paths = [path for name in SECOND_PARAGRAPHS if (path := find_file(folder, name))]
    if not paths:
        rows.notes.append(f"{folder}: no {SECOND}, so one reference for each video")
    for path in paths:
        for location, name, text in JsonFile(path).members():
            with rows.at(location):
                _add(paragraphs, name, (check_caption(text),))
    return paragraphs


def _add(paragraphs: dict[str, tuple[str, ...]], name: str, paragraph: tuple[str, ...]) -> None:
    if name in paragraphs:
        raise RowError(f"the video {name} comes twice", "give each video one record")
    paragraphs[name] = paragraph


YOUCOOK2_FILE = "youcookii_annotations_trainval.json"
YOUCOOK2_FILES = (("train", "captioning_train.json"), ("val", "captioning_val.json"))
_SPLITS = {"training": "train", "validation": "val", "testing": "test"}


@dataset_format("youcook2", "DIR", "YouCookII as published")
def read_youcook2(
    folder: Path, rows: Rows, options: Mapping[str, str]
) -> Iterator[tuple[Location, CaptionedVideo]]:
    """Read the videos of both splits of YouCookII, each with one paragraph.

    Without ``youcookii_annotations_trainval.json``, ``captioning_train.json`` and ``captioning_val.json`` are
    read: 1333 videos for training and 457 for validation.

    Raises:
        DataError: the files are missing or not as published, or have a bad row and these are not skipped.
    """
    path = find_file(folder, YOUCOOK2_FILE)
    if path is None:
        for split, one in find_splits(folder, YOUCOOK2_FILES, rows):
            yield from read_timed(one, split, rows)
        return
    mended: list[str] = []
    for location, name, row in JsonFile(path).members("database"):
        with rows.at(location):
            subset = member(row, "subset", str, "split")
            if subset not in _SPLITS:
                raise RowError(
                    f"subset {reprlib.repr(subset)} is not one of {', '.join(_SPLITS)}", "give one of them"
                )
            annotations = member(row, "annotations", list, "list of annotations")
            times = [member(one, "segment", list, "segment") for one in annotations]
            sentences = [one.get("sentence") for one in annotations]
            yield location, timed_video(name, _SPLITS[subset], times, sentences, mended)
    note_mended(path, mended, rows)
