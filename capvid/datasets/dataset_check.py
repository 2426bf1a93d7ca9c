"""``capvid data check``: statistics and problems of a dataset before training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from capvid.datasets.dataset import SPLITS, CaptionedVideo
from capvid.datasets.loading import LoadedData, load_data
from capvid.features.feature_store import viewed
from capvid.text.tokenization import words

if TYPE_CHECKING:
    from capvid.features.feature_store import FeatureStore


_SHOWN = 5
_BINS = 10
_BAR = 40


@dataclass
class SplitCounts:
    """Counts of a split; ``words`` are those of all captions and sentences.

    ``wordless`` counts captions and sentences without any token.
    """

    videos: int = 0
    captions: int = 0
    segments: int = 0
    paragraphs: int = 0
    sentences: int = 0
    words: int = 0
    wordless: int = 0


@dataclass
class FeatureCheck:
    """Agreement of features and dataset.

    Attributes:
        missing: ids of videos without features, by split.
        held: ids in the features, without those of augmented views.
        timeless: id of a video with segments in seconds whose features have no times.
    """

    missing: dict[str, list[str]]
    held: list[str]
    timeless: str | None


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
        return self.features is not None and bool(
            any(self.features.missing.values()) or self.features.timeless
        )


def check_data(specs: Sequence[str], *, features: Sequence[str] = (), min_count: int = 1) -> DataReport:
    """Read datasets, count their contents, and collect all bad rows and unusable files.

    Args:
        specs: dataset specs, as for :func:`capvid.datasets.loading.load_data`.
        features: feature folders and files to compare with the dataset.
        min_count: minimum count of a word of the train split in the vocabulary.

    Raises:
        FeatureFileError: the features cannot be read.
        UsageError: an invalid spec.
    """
    report = DataReport(load_data(specs, skip_bad=True, keep_going=True), min_count)
    videos = report.data.videos
    if features:
        from capvid.features.feature_store import FeatureStore

        report.features = _check_features(videos, FeatureStore(features))
    for video in videos:
        _count(video, report)
    return report


def _check_features(videos: Sequence[CaptionedVideo], store: FeatureStore) -> FeatureCheck:
    missing: dict[str, list[str]] = {}
    for video in videos:
        if video.id not in store:
            missing.setdefault(video.split, []).append(video.id)
    timed = (v.id for v in videos if v.id in store and any(s.unit == "seconds" for s in v.segments))
    first = next(timed, None)
    timeless = first if first is not None and store.get(first).times is None else None
    held = [key for key in store.ids() if viewed(key) not in store]
    return FeatureCheck(missing, held, timeless)


def _count(video: CaptionedVideo, report: DataReport) -> None:
    counts = report.splits.setdefault(video.split, SplitCounts())
    counts.videos += 1
    counts.captions += len(video.captions)
    counts.segments += len(video.segments)
    counts.paragraphs += len(video.paragraphs)
    counts.sentences += sum(map(len, video.paragraphs))
    for text in (*video.captions, *(sentence for paragraph in video.paragraphs for sentence in paragraph)):
        tokens = words(text)
        counts.words += len(tokens)
        counts.wordless += not tokens
        report.lengths[len(tokens)] += 1
        if video.split == "train":
            report.vocabulary.update(tokens)
        elif video.split == "val":
            report.validation.update(tokens)


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
    yield from _listed("notes", [*report.data.notes, *_remarks(report)])
    yield from _listed("unusable files", [str(error) for error in report.data.failed])
    yield from _listed("unusable rows", [str(row) for row in report.data.skipped])


def _split_lines(report: DataReport) -> Iterator[str]:
    """Yield a table with a row for each split, without columns of zeros."""
    names = [split for split in SPLITS if split in report.splits]
    columns = ("videos", "captions", "segments", "paragraphs", "sentences", "words")
    used = [column for column in columns if any(getattr(report.splits[n], column) for n in names)]
    yield f"{'split':<5}" + "".join(f"  {column:>10}" for column in used)
    for name in names:
        yield f"{name:<5}" + "".join(f"  {getattr(report.splits[name], column):>10}" for column in used)


def _feature_lines(check: FeatureCheck, splits: dict[str, SplitCounts]) -> Iterator[str]:
    if not any(check.missing.values()):
        yield "features: every video has some"
    for split in SPLITS:
        if ids := check.missing.get(split):
            yield f"missing features: {len(ids)} of {splits[split].videos} in {split} ({_some(ids)})"
    if any(check.missing.values()):
        yield f"the features hold {len(check.held)} videos ({_some(check.held)})"
    if check.timeless is not None:
        yield f"features without times, and segments in seconds: {check.timeless}, say"


def _vocabulary_lines(report: DataReport) -> Iterator[str]:
    known = {word for word, count in report.vocabulary.items() if count >= report.min_count}
    often = "once" if report.min_count == 1 else f"{report.min_count} times"
    yield f"vocabulary of train: {len(report.vocabulary)} words, {len(known)} of them at least {often}"
    total = report.validation.total()
    if total:
        unknown = sum(count for word, count in report.validation.items() if word not in known)
        yield f"unknown words in val: {unknown} of {total} ({unknown / total:.2%})"


def _remarks(report: DataReport) -> Iterator[str]:
    for split in ("train", "val"):
        if report.splits and split not in report.splits:
            yield f"no video is in the {split} split; training needs one"
    wordless = sum(counts.wordless for counts in report.splits.values())
    if wordless:
        yield f"{wordless} captions or sentences have no words and are not learned from"


def histogram(lengths: Counter[int]) -> Iterator[str]:
    """Yield the lines of a histogram of lengths, in ten rows at most; the last includes everything longer.

    The bins are wide enough that 95 % of the captions are before the last one.
    """
    total, below, usual = lengths.total(), 0, 0
    for usual in sorted(lengths):
        below += lengths[usual]
        if below >= 0.95 * total:
            break
    longest = max(lengths)
    width = max(1, math.ceil((usual + 1) / (_BINS - 1)))
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        bins[min(length // width, _BINS - 1)] += count
    most = max(bins.values())
    for row in range(max(bins) + 1):
        first, last = row * width, row * width + width - 1
        name = f"{first}-{longest}" if row == _BINS - 1 else f"{first}-{last}" if width > 1 else str(first)
        bar = "#" * math.ceil(_BAR * bins[row] / most)
        yield f"{name:>9}  {bins[row]:>8}  {bar}".rstrip()


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"{title}: {len(lines)}"
        yield from (f"  {line}" for line in lines)


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_SHOWN]) + (", ..." if len(ids) > _SHOWN else "")
