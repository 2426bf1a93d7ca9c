from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capvid.backbones.catalog import StreamHeader
from capvid.captioners.checkpoint import limited
from capvid.datasets.batches import (
    Batch,
    Example,
    FrameReader,
    Lengths,
    ParagraphBatches,
    ParagraphExample,
    TrainingBatches,
    make_examples,
    prefetch,
    segment_rows,
)
from capvid.datasets.dataset import CaptionedVideo, Segment
from capvid.errors import DataError, FeatureFileError
from capvid.features.feature_file import FeatureHeader, Features, save_features
from capvid.features.feature_store import FeatureStore
from capvid.text.vocabulary import BOS, EOS, PAD, UNK, Vocabulary


def make_frames(name: str) -> torch.Tensor:
    n = int(name[1:])
    return torch.full((n + 1, 3), float(n), dtype=torch.float16) + torch.arange(n + 1)[:, None] / 64


def read_epoch(epoch_batches: TrainingBatches | ParagraphBatches, epoch: int) -> Iterator[Batch]:
    """The batches of an epoch, undivided."""
    return (plan.part(0, 1)() for plan in epoch_batches.epoch(epoch))


def examples(count: int = 9) -> list[Example]:
    """Video n has n + 1 frames of value n, and captions that repeat the word 10 + n one to four times."""
    return [
        Example(f"v{n}", n + 1, tuple([10 + n] * length for length in range(1, 5)), make_frames)
        for n in range(count)
    ]


def batches(seed: int = 1, **options: Any) -> TrainingBatches:
    chosen = {"batch_size": 4, "captions_per_video": 3, "max_frames": 5, **options}
    return TrainingBatches(examples(), seed=seed, **chosen)


def test_epoch_samples_every_video_equally_and_pairs_captions_with_frames() -> None:
    epoch_batches = batches()
    caption_counts: Counter[tuple[int, int]] = Counter()
    count = 0
    for batch in read_epoch(epoch_batches, 1):
        count += 1
        for row in range(len(batch.targets)):
            words = [t for t in batch.targets[row].tolist() if t not in (PAD, EOS)]
            frames = batch.features[row][batch.mask[row]]
            video = words[0] - 10
            assert torch.equal(frames[:, 0].floor(), torch.full((len(frames),), float(video)))
            assert len(frames) == min(video + 1, 5)
            assert (frames[:, 0].diff() > 0).all()  # in order
            assert not batch.features[row][~batch.mask[row]].any()
            inputs = batch.inputs[row].tolist()
            assert inputs[: len(words) + 1] == [BOS, *words]
            assert batch.targets[row].tolist()[: len(words) + 1] == [*words, EOS]
            caption_counts[video, len(words)] += 1
    assert count == len(epoch_batches) == 7
    assert max(caption_counts.values()) == 1
    assert Counter(video for video, _ in caption_counts) == dict.fromkeys(range(9), 3)


def test_same_seed_and_epoch_give_the_same_batches() -> None:
    def flat(seed: int, epoch: int) -> list:
        return [batch.targets.tolist() for batch in read_epoch(batches(seed), epoch)]

    assert flat(1, 4) == flat(1, 4)
    assert flat(1, 4) != flat(1, 5)
    assert flat(1, 4) != flat(2, 4)


def test_spread_selects_the_middle_of_equal_slices() -> None:
    frames = torch.arange(10.0).unsqueeze(1)
    assert limited(frames, 5, "spread").squeeze(1).tolist() == [1, 3, 5, 7, 9]
    assert limited(frames, 2, "spread").squeeze(1).tolist() == [2, 7]
    assert limited(frames, 10, "spread").squeeze(1).tolist() == list(range(10))
    assert limited(frames, 3, "first").squeeze(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("length", "count"), [(101, 100), (149, 40), (99, 28), (250, 98), (7, 1), (9, 2)])
def test_even_frames_are_numpy_linspace_rounded_down(length: int, count: int) -> None:
    # rounded to hide the error of floats: 28.999999999999996 stands for 29
    expected = np.linspace(0, length - 1, count).round(9).astype(int).tolist()
    assert limited(torch.arange(length), count, "even").tolist() == expected
    assert limited(torch.arange(count), count, "even").tolist() == list(range(count))


@pytest.mark.parametrize("which", ["even", "first"])
def test_training_reads_the_frames_that_captioning_reads(which: str) -> None:
    epoch_batches = batches(max_frames=4, frames=which)
    for batch in read_epoch(epoch_batches, 1):
        for row in range(len(batch.targets)):
            video = int(batch.inputs[row, 1]) - 10
            expected = limited(make_frames(f"v{video}"), 4, which)
            assert torch.equal(batch.features[row][batch.mask[row]], expected)
    long = ParagraphExample("v", (torch.arange(3, 12),), (([5],),), lambda _: torch.arange(20.0).view(20, 1))
    one = ParagraphBatches([long], batch_size=1, captions_per_video=1, max_frames=4, frames=which, seed=1)
    segment = next(read_epoch(one, 1)).features[0, 0, :, 0].tolist()
    assert segment == {"even": [3, 5, 8, 11], "first": [3, 4, 5, 6]}[which]


def test_vocabulary_keeps_frequent_words_in_a_fixed_order() -> None:
    captions = [["a", "cat"], ["a", "dog"], ["a", "cat", "bird"]]
    vocabulary = Vocabulary.build(captions, min_count=1, max_size=3)
    assert vocabulary.words[4:] == ["a", "cat", "bird"]
    assert vocabulary.encode(["cat", "dog"]) == [5, UNK]
    assert vocabulary.decode([4, 6]) == ["a", "bird"]
    assert Vocabulary.build(captions, min_count=2, max_size=9).words[4:] == ["a", "cat"]
    assert Vocabulary(vocabulary.words).words == vocabulary.words


def test_frame_dropout_keeps_at_least_one_frame() -> None:
    epoch_batches = TrainingBatches(
        examples(), batch_size=4, captions_per_video=4, max_frames=9, frame_dropout=0.5, seed=1
    )
    kept = [
        int(n) for epoch in range(40) for batch in read_epoch(epoch_batches, epoch) for n in batch.mask.sum(1)
    ]
    assert min(kept) == 1
    # A video of n frames keeps 1 + (n - 1) / 2 on average; n = 1..9 come equally often.
    assert abs(sum(kept) / len(kept) - 3.0) < 0.1


def test_long_captions_are_dropped_or_cut() -> None:
    assert Lengths(3).words("A man runs.") == ["a", "man", "runs"]
    assert Lengths(2).words("A man runs.") is None
    assert Lengths(2, cut=True).words("A man runs.") == ["a", "man"]
    assert Lengths(2).words("...") is None


def test_feature_maps_stay_in_half_precision_and_first_takes_the_first_frames() -> None:
    frames = torch.arange(6.0).half().view(6, 1, 1).expand(6, 2, 3)
    epoch_batches = TrainingBatches(
        [Example("v", 6, ([5],), lambda _: frames)],
        batch_size=1,
        captions_per_video=1,
        max_frames=4,
        frames="first",
        seed=1,
    )
    batch = next(read_epoch(epoch_batches, 1))
    assert batch.features.dtype == torch.float16
    assert batch.features[0, :, 0, 0].tolist() == [0, 1, 2, 3]


def make_segment_frames(name: str) -> torch.Tensor:
    n = int(name[1:])
    return torch.cat([torch.full((s + 1, 3), 10.0 * n + s, dtype=torch.float16) for s in range(n + 1)])


def paragraphs() -> list[ParagraphExample]:
    """Video n has n + 1 segments; segment s has s + 1 frames of value 10 n + s and s + 1 words."""
    return [
        ParagraphExample(
            f"v{n}",
            tuple(torch.arange(s + 1) + s * (s + 1) // 2 for s in range(n + 1)),
            tuple(tuple([20 + 10 * n + s] * (s + 1) for s in range(n + 1)) for _ in range(2)),
            make_segment_frames,
        )
        for n in range(4)
    ]


def test_paragraphs_keep_segments_and_sentences_together() -> None:
    epoch_batches = ParagraphBatches(paragraphs(), batch_size=3, captions_per_video=2, max_frames=2, seed=1)
    rows = 0
    for batch in read_epoch(epoch_batches, 1):
        assert batch.features.shape[:3] == batch.mask.shape
        for row in range(len(batch.targets)):
            rows += 1
            video = int(batch.features[row, 0, 0, 0]) // 10
            for segment in range(batch.mask.shape[1]):
                frames = batch.features[row, segment][batch.mask[row, segment]]
                words = [t for t in batch.targets[row, segment].tolist() if t != PAD]
                if segment > video:
                    assert not len(frames) and not words and not batch.inputs[row, segment].any()
                    continue
                assert frames[:, 0].tolist() == [10 * video + segment] * min(2, segment + 1)
                assert words == [20 + 10 * video + segment] * (segment + 1) + [EOS]
                assert batch.inputs[row, segment, : len(words)].tolist() == [BOS, *words[:-1]]
    assert rows == epoch_batches.captions == 8


def test_evaluation_takes_all_segments(tmp_path: Path) -> None:
    store = save_timed_features(tmp_path, None)
    segments = tuple(Segment(n, n + 1) for n in range(5))
    video = CaptionedVideo("v", "val", (), segments, (("a dog",) * 5,))
    options = {"reader": FrameReader(store), "lengths": Lengths(9), "max_segments": 2}
    learned = make_examples(
        [video], vocabulary=Vocabulary.build([["a"]], min_count=1, max_size=9), **options
    )[0]
    assert (len(learned.segments), len(learned.paragraphs[0])) == (2, 2)
    evaluated = make_examples([video], vocabulary=None, **options)[0]
    assert len(evaluated.segments) == 5


def save_timed_features(folder: Path, times: list[float] | None) -> FeatureStore:
    stream = StreamHeader(backbone=None, layer=None, width=1)
    header = FeatureHeader(streams=(stream,), sampling=None, reader=None, dtype="float32", capvid_version="0")
    frames = np.arange(5, dtype=np.float32)[:, None]
    times_array = None if times is None else np.array(times)
    save_features(
        folder / "v.safetensors", Features(header=header, streams=(frames,), times=times_array, video="v")
    )
    return FeatureStore([folder])


def test_segment_rows_are_selected_by_frame_or_by_time(tmp_path: Path) -> None:
    untimed = save_timed_features(tmp_path / "a", None)
    rows = segment_rows("v", [Segment(0, 2), Segment(2, 5)], untimed)
    assert [indices.tolist() for indices in rows] == [[0, 1], [2, 3, 4]]
    seconds = [Segment(0, 1.5, "seconds"), Segment(1.6, 1.9, "seconds"), Segment(2, 9, "seconds")]
    rows = segment_rows("v", seconds, save_timed_features(tmp_path / "b", [0.0, 1.0, 1.5, 2.0, 3.0]))
    assert [indices.tolist() for indices in rows] == [[0, 1], [], [3, 4]]
    with pytest.raises(DataError, match="v: a segment ends at frame 6, the features at 5"):
        segment_rows("v", [Segment(0, 6)], untimed)
    with pytest.raises(DataError, match="features without times"):
        segment_rows("v", seconds, untimed)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_of_a_batch_cover_every_caption_once(parts: int) -> None:
    """Every caption is in one part, with its frames; an empty part has no words."""
    for plan in batches().epoch(1):
        full_batch, part_batches = plan.part(0, 1)(), [plan.part(number, parts)() for number in range(parts)]
        rows = [plan.rows[number::parts] for number in range(parts)]
        assert plan.words == int((full_batch.targets != PAD).sum())
        assert plan.words == sum(int((part_batch.targets != PAD).sum()) for part_batch in part_batches)
        for number, part_batch in enumerate(part_batches):
            if not rows[number]:
                assert len(part_batch) == 1 and not part_batch.targets.any()
                continue
            for part_row, row in enumerate(range(number, len(full_batch), parts)):
                words = part_batch.targets.shape[1]
                assert part_batch.targets[part_row].tolist() == full_batch.targets[row, :words].tolist()
                assert torch.equal(
                    part_batch.features[part_row][part_batch.mask[part_row]],
                    full_batch.features[row][full_batch.mask[row]],
                )


def test_features_are_cached_up_to_the_memory_limit(tmp_path: Path) -> None:
    store = save_timed_features(tmp_path, None)
    reads: list[str] = []
    get = store.get
    store.get = lambda video: reads.append(video) or get(video)  # type: ignore[method-assign, func-returns-value]
    for memory, times in ((0, 2), (10, 1)):
        reads.clear()
        reader = FrameReader(store, memory=memory)
        assert reader.store.length("v") == 5 and not reads
        assert torch.equal(reader("v"), reader("v")) and len(reads) == times
    assert reader("v").dtype == torch.float16 and reader("v").tolist() == [[0], [1], [2], [3], [4]]
    save_features(tmp_path / "v.safetensors", replace(get("v"), streams=(np.zeros((4, 1), np.float32),)))
    with pytest.raises(FeatureFileError, match="v: 4 frames of features, 5 when opened"):
        FrameReader(store)("v")


def test_prefetch_keeps_the_order_and_stops_with_the_consumer() -> None:
    done: list[int] = []

    def job(number: int) -> int:
        time.sleep(0.02 if number == 3 else 0)  # a slow one: later jobs finish first
        done.append(number)
        if number == 7:
            raise FeatureFileError("seven")
        return number

    results = prefetch((partial(job, number) for number in range(100)), depth=4)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(FeatureFileError, match="seven"):
        next(results)
    assert len(done) < 20
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]

    def failing_jobs() -> Iterator[Callable[[], int]]:
        yield lambda: 1
        raise DataError("no more jobs")

    results = prefetch(failing_jobs())
    assert next(results) == 1
    with pytest.raises(DataError, match="no more jobs"):
        next(results)
