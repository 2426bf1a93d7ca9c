"""The published annotation files give the published splits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from capvid.datasets.dataset import CaptionedVideo, LoadedData, Segment, load_data

pytestmark = pytest.mark.shared


def load(shared_data: Path, kind: str) -> tuple[LoadedData, dict[str, CaptionedVideo]]:
    folder = shared_data / "data" / "annotations" / kind
    if not folder.is_dir():
        pytest.skip("the annotation files are not beside this checkout")
    data = load_data([f"{kind}:{folder}"])
    assert data.skipped == []
    return data, {video.id: video for video in data.videos}


def count_splits(data: LoadedData) -> dict[str, int]:
    return dict(Counter(video.split for video in data.videos))


def count_captions(data: LoadedData) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for video in data.videos:
        counts[video.split] += len(video.captions)
    return dict(counts)


def count_segments(data: LoadedData) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for video in data.videos:
        counts[video.split] += len(video.segments)
        assert len(video.paragraphs[0]) == len(video.segments)
    return dict(counts)


def test_msvd_has_the_published_counts(shared_data: Path) -> None:
    data, videos = load(shared_data, "msvd")
    assert count_splits(data) == {"train": 1200, "val": 100, "test": 670}
    # 80,827 in these files; the papers say 80,839
    assert count_captions(data) == {"train": 48774, "val": 4290, "test": 27763}
    assert data.notes == []
    video = videos["eyhzdC936uk_15_27"]
    assert (video.split, len(video.captions)) == ("test", 37)
    assert len(video.captions[0].split()) == 5


@pytest.mark.slow
def test_msrvtt_has_the_published_counts(shared_data: Path) -> None:
    data, videos = load(shared_data, "msrvtt")
    # 2990 test videos are published; 738 of them are missing in these files
    assert count_splits(data) == {"train": 6513, "val": 497, "test": 2252}
    assert all(len(video.captions) == 20 for video in data.videos)
    video = videos["video2960"]
    assert video.split == "train"
    assert [len(caption.split()) for caption in video.captions[:3]] == [12, 10, 7]


def test_charades_has_the_published_counts(shared_data: Path) -> None:
    data, videos = load(shared_data, "charades")
    assert count_splits(data) == {"train": 7569, "val": 400, "test": 1863}
    assert count_captions(data) == {"train": 10970, "val": 582, "test": 4535}
    assert sum(count_captions(data).values()) == 16_087  # as the paper's footnote says
    assert len(data.notes) == 1 and "16 videos without a description" in data.notes[0]  # 7985 in the file
    video = videos["YSKX3"]
    assert (video.split, len(video.captions)) == ("test", 2)
    assert [caption.count(".") for caption in video.captions] == [2, 3]


@pytest.mark.slow
def test_activitynet_has_the_published_counts(shared_data: Path) -> None:
    data, videos = load(shared_data, "activitynet")
    assert count_splits(data) == {"train": 10009, "val": 2460, "test": 2457}
    assert count_segments(data) == {"train": 37421, "val": 8774, "test": 8731}
    references = Counter((video.split, len(video.paragraphs)) for video in data.videos)
    assert references == {
        ("train", 1): 10009,
        ("val", 1): 19,
        ("val", 2): 2441,
        ("test", 1): 13,
        ("test", 2): 2444,
    }
    assert len(data.notes) == 1 and "4 segments" in data.notes[0]
    video = videos["v_uqiMw7tQ1Cc"]
    assert video.segments == (Segment(0.28, 55.15, "seconds"), Segment(13.79, 54.32, "seconds"))
    assert [len(paragraph) for paragraph in video.paragraphs] == [2, 3]
    assert [len(sentence.split()) for sentence in video.paragraphs[0]] == [6, 15]


def test_youcook2_has_the_published_counts(shared_data: Path) -> None:
    data, videos = load(shared_data, "youcook2")
    assert count_splits(data) == {"train": 1333, "val": 457}
    assert count_segments(data) == {"train": 10337, "val": 3492}
    assert data.notes == []
    video = videos["GLd3aX16zBg"]
    assert (video.split, video.segments[-1]) == ("train", Segment(173, 174, "seconds"))
    assert [len(sentence.split()) for sentence in video.paragraphs[0]] == [8, 8, 15, 7, 6]
