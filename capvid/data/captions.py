"""Captioned videos, and the one call that reads them from annotation files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Segment:
    """Part of a video, from ``start`` up to ``end``, in ``unit``: numbers of its frames, or seconds."""

    start: float
    end: float
    unit: str = "frames"


@dataclass(frozen=True)
class CaptionedVideo:
    """One video of a data set.

    Attributes:
        id: its name, the same as in the features.
        split: train, val or test.
        captions: sentences as they were written, each about the whole video.
        segments: parts of the video in the order in which they are told, for paragraphs.
        paragraphs: each a sentence for every segment; outside the train split others may follow, told with
            other segments, to score against.
    """

    id: str
    split: str
    captions: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()
    paragraphs: tuple[tuple[str, ...], ...] = ()


def load_captions(specs: Sequence[str], *, skip_bad: bool = False) -> list[CaptionedVideo]:
    """Read data sets given as ``kind:path`` or ``FILE`` (JSONL); several extend one another.

    The kinds are ``jsonl:FILE``, ``tsv:FILE``, ``coco:FILE``, ``msvd:DIR``, ``msrvtt:DIR``, ``charades:DIR``,
    ``activitynet:DIR`` and ``youcook2:DIR``, these with the annotation files as they were published.

    A JSONL file has ``{"id": ..., "split": ..., "captions": [...]}`` on each line, or, in place of the
    captions, ``"segments": [{"start": 0, "end": 4}, ...], "paragraphs": [[sentence, ...], ...]`` with a
    sentence for every segment; segments are numbers of frames unless ``"unit": "seconds"`` says otherwise. A
    TSV file has an id, a tabulator and a caption on each line, an id as often as it has captions, all of the
    train split.

    Args:
        specs: the data sets.
        skip_bad: leave out rows that cannot be used; :func:`capvid.data.specs.load_data` also says which.

    Raises:
        DataError: a file is missing or empty, a row cannot be used, or an id comes twice.
        UsageError: a kind of data set that is not known.
    """
    from capvid.data.specs import load_data

    return load_data(specs, skip_bad=skip_bad).videos
