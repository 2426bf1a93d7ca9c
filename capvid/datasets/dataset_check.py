"""``capvid data check``: statistics and problems of a dataset before training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from capvid.datasets.annotation_files import first_ids
from capvid.datasets.dataset import SPLITS, CaptionedVideo, LoadedData, load_data
from capvid.features.feature_store import FeatureStore, video_of_view
from capvid.text.tokenization import words

_BINS = 10
_BAR = 40  # characters


@dataclass
class SplitCounts:
    """Counts of a split."""

    videos: int = 0
    captions: int = 0
    segments: int = 0
    paragraphs: int = 0
    sentences: int = 0
    words: int = 0  # of all captions and sentences
    wordless: int = 0  # captions and sentences without any word


@dataclass
class FeatureCheck:
    """Agreement of features and dataset.

    Attributes:
        missing: ids of videos without features, by split.
        stored: ids in the features, without those of augmented views.
        untimed: id of a video with segments in seconds whose features have no times.
    """

    missing: dict[str, list[str]]
    stored: list[str]
    untimed: str | None


@dataclass
class DataReport:
    """Result of a check.

    Attributes:
        data: videos read, bad rows and unusable files.
        splits: counts by split.
        lengths: number of captions and sentences by number of words.
        vocabulary: word counts of the train split.
        validation: word counts of the val split.
        min_count: minimum count of a word in the vocabulary.
        features: agreement with the features, if given.
    """

    data: LoadedData
    min_count: int
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    vocabulary: Counter[str] = field(default_factory=Counter)
    validation: Counter[str] = field(default_factory=Counter)
    features: FeatureCheck | None = None

    @property
    def usable(self) -> int:
        """Number of usable videos: those with features, if features were given."""
        missing = sum(map(len, self.features.missing.values())) if self.features else 0
        return len(self.data.videos) - missing

    @property
    def lacks_features(self) -> bool:
        """Whether features were given, and some are missing or have no times."""
        return self.features is not None and bool(self.features.missing or self.features.untimed)


def check_data(specs: Sequence[str], *, features: Sequence[str] = (), min_count: int = 1) -> DataReport:
    """Read datasets, count their contents, and collect all bad rows and unusable files.

    Args:
        specs: dataset specs, as for :func:`capvid.datasets.dataset.load_data`.
        features: feature folders and files to compare with the dataset.
        min_count: minimum count of a word of the train split in the vocabulary.

    Raises:
        FeatureFileError: the features cannot be read.
        UsageError: an invalid spec.
    """
    report = DataReport(load_data(specs, skip_bad=True, keep_going=True), min_count)
    for error in report.data.failed:
        if "capvid data check" in error.remedy:
            error.remedy = ""
    videos = report.data.videos
    if features:
        report.features = _check_features(videos, FeatureStore(features))
    for video in videos:
        counts = report.splits.setdefault(video.split, SplitCounts())
        counts.videos += 1
        counts.captions += len(video.captions)
        counts.segments += len(video.segments)
        counts.paragraphs += len(video.paragraphs)
        counts.sentences += sum(map(len, video.paragraphs))
        for text in chain(video.captions, *video.paragraphs):
            tokens = words(text)
            counts.words += len(tokens)
            counts.wordless += not tokens
            report.lengths[len(tokens)] += 1
            if video.split == "train":
                report.vocabulary.update(tokens)
            elif video.split == "val":
                report.validation.update(tokens)
    return report


def _check_features(videos: Sequence[CaptionedVideo], store: FeatureStore) -> FeatureCheck:
    missing: dict[str, list[str]] = {}
    for video in videos:
        if video.id not in store:
            missing.setdefault(video.split, []).append(video.id)
    timed = (v.id for v in videos if v.id in store and any(s.unit == "seconds" for s in v.segments))
    first = next(timed, None)
    untimed = first if first is not None and store.get(first).times is None else None
    stored = [key for key in store.ids() if video_of_view(key) not in store]
    return FeatureCheck(missing, stored, untimed)


def report_lines(report: DataReport) -> Iterator[str]:
    """Yield the lines of the report."""
    if report.splits:
        yield from _split_lines(report)
    if report.features:
        yield ""
        yield from _feature_lines(report.features, report.splits)
    if report.vocabulary:
        yield ""
        yield from _vocabulary_lines(report)
    if report.lengths:
        yield ""
        yield "words per caption or sentence"
        yield from histogram(report.lengths)
    notes = list(report.data.notes)
    for split in ("train", "val"):
        if report.splits and split not in report.splits:
            notes.append(f"no video is in the {split} split; training needs one")
    if wordless := sum(counts.wordless for counts in report.splits.values()):
        notes.append(f"{wordless} captions or sentences have no words and are not learned from")
    for title, entries in (
        ("notes", notes),
        ("unusable files", report.data.failed),
        ("unusable rows", report.data.skipped),
    ):
        if entries:
            yield ""
            yield f"{title}: {len(entries)}"
            yield from (f"  {entry}" for entry in entries)


def _split_lines(report: DataReport) -> Iterator[str]:
    """Yield a table with a row for each split, without columns of zeros."""
    splits = {split: report.splits[split] for split in SPLITS if split in report.splits}
    columns = ("videos", "captions", "segments", "paragraphs", "sentences", "words")
    used = [column for column in columns if any(getattr(counts, column) for counts in splits.values())]
    yield f"{'split':<5}" + "".join(f"  {column:>10}" for column in used)
    for split, counts in splits.items():
        yield f"{split:<5}" + "".join(f"  {getattr(counts, column):>10}" for column in used)


def _feature_lines(check: FeatureCheck, splits: dict[str, SplitCounts]) -> Iterator[str]:
    if not check.missing:
        yield "features: every video has some"
    for split in SPLITS:
        if ids := check.missing.get(split):
            yield f"missing features: {len(ids)} of {splits[split].videos} in {split} ({first_ids(ids)})"
    if check.missing:
        yield f"the features hold {len(check.stored)} videos ({first_ids(check.stored)})"
    if check.untimed is not None:
        yield f"features without times, but segments in seconds, for example {check.untimed}"


def _vocabulary_lines(report: DataReport) -> Iterator[str]:
    known = {word for word, count in report.vocabulary.items() if count >= report.min_count}
    often = "once" if report.min_count == 1 else f"{report.min_count} times"
    yield f"vocabulary of train: {len(report.vocabulary)} words, {len(known)} of them at least {often}"
    if total := report.validation.total():
        unknown = sum(count for word, count in report.validation.items() if word not in known)
        yield f"unknown words in val: {unknown} of {total} ({unknown / total:.2%})"


def histogram(lengths: Counter[int]) -> Iterator[str]:
    """Yield the lines of a histogram of lengths, in ten rows at most; the last includes everything longer.

    The bins are wide enough that 95 % of the captions are before the last one.
    """
    percentile = count_below = 0
    for percentile in sorted(lengths):
        count_below += lengths[percentile]
        if count_below >= 0.95 * lengths.total():
            break
    longest = max(lengths)
    width = max(1, math.ceil((percentile + 1) / (_BINS - 1)))
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        bins[min(length // width, _BINS - 1)] += count
    highest = max(bins.values())
    for row in range(max(bins) + 1):
        first, last = row * width, row * width + width - 1
        name = f"{first}-{longest}" if row == _BINS - 1 else f"{first}-{last}" if width > 1 else str(first)
        bar = "#" * math.ceil(_BAR * bins[row] / highest)
        yield f"{name:>9}  {bins[row]:>8}  {bar}".rstrip()
