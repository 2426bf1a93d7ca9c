"""What is scored: the references of several files together, and the predictions that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capvid.data.matching import activitynet_id, is_activitynet, match_ids
from capvid.data.predictions import read_predictions
from capvid.data.references import read_references
from capvid.errors import DataError, UsageError

_NAMED = 5  # ids in a message at most


@dataclass
class Wanted:
    """References.

    Attributes:
        texts: for each video its captions or paragraphs, those of the first file first.
        first: the videos of the first file.
        aliases: ids of videos by other names of theirs.
        names: of the files.
    """

    texts: dict[str, list[str]]
    first: list[str]
    aliases: dict[str, str]
    names: list[str]


@dataclass
class Said:
    """Predictions of referenced videos.

    Attributes:
        sentences: for each video what was said of it; a caption is one sentence.
        missing: videos of the references without a prediction.
        extra: ids of predictions that belong to no video of the references.
        notes: what else is worth knowing, a line each.
    """

    sentences: dict[str, list[str]]
    missing: list[str]
    extra: list[str]
    notes: list[str] = field(default_factory=list)


def load_references(specs: Sequence[str], *, form: str = "", paragraphs: bool = False) -> Wanted:
    """Read files of references; a video has the references of all files that hold it.

    Args:
        specs: paths; ``#split=test`` behind one takes that split of it only.
        form: of the files, one of :data:`capvid.data.references.FORMS`; nothing to see it from the content.
        paragraphs: whether they hold paragraphs.

    Raises:
        DataError: a file cannot be read; the message names file and line.
        UsageError: there is no such form or split.
    """
    files = [
        read_references(path, form=form, split=split, paragraphs=paragraphs)
        for path, split in map(_parsed, specs)
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
    return Wanted(texts, first, aliases, list(specs))


def _parsed(spec: str) -> tuple[Path, str]:
    """The path of a file of references, and the split that is wanted of it."""
    name, mark, fragment = spec.rpartition("#")
    if not mark or Path(spec).exists():
        return Path(spec), ""
    key, _, split = fragment.partition("=")
    if key != "split" or not split:
        raise UsageError(f"{spec}: {fragment!r} is not understood after the #", remedy="use split=test")
    return Path(name), split


def load_predictions(path: Path, wanted: Wanted, *, paragraphs: bool = False, missing: str = "error") -> Said:
    """Read predictions and find the videos that they are about.

    Args:
        path: of a file, or of a folder with one for each video.
        wanted: the references.
        paragraphs: whether they are paragraphs.
        missing: ``error`` if no video of the references may lack one.

    Raises:
        DataError: the file cannot be read, none of its ids is in the references, or some are missing.
    """
    read = read_predictions(path, paragraphs=paragraphs)
    found = match_ids(read.said, wanted.texts, wanted.aliases)
    sentences = {video: read.said[found.videos[video]] for video in wanted.texts if video in found.videos}
    without = [video for video in wanted.texts if video not in sentences]
    said = Said(sentences, without, found.extra)
    if not sentences and read.said:
        raise DataError(
            f"{path}: none of its {len(read.said)} ids is in the references; they are like "
            f"{next(iter(read.said))!r}, and there like {next(iter(wanted.texts))!r}",
            remedy="give the references of these videos",
        )
    if without and (missing == "error" or not sentences):
        failed = f" ({len(read.failed)} of the predictions failed)" if read.failed else ""
        raise DataError(
            f"{path}: no prediction for {len(without)} of {len(wanted.texts)} videos{failed}: "
            f"{named(without)}",
            remedy="caption them too, or choose --missing empty or skip",
        )
    if found.extra:
        said.notes.append(f"{path}: {len(found.extra)} not in the references, left out: {named(found.extra)}")
    if found.ambiguous:
        said.notes.append(f"{path}: several ids fit one video by name: {named(found.ambiguous)}")
    if read.failed:
        said.notes.append(f"{path}: {len(read.failed)} failed to be captioned: {named(read.failed)}")
    if read.further:
        said.notes.append(f"{path}: {read.further} captions are not the first of their video, left out")
    return said


def named(ids: Sequence[str]) -> str:
    """The first of some ids, and how many more there are."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(ids[:_NAMED]) + more
