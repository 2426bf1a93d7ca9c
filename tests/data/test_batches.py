from __future__ import annotations

from collections import Counter

import torch

from capvid.data.batches import Example, TrainingBatches, spread
from capvid.text.vocabulary import BOS, EOS, PAD, UNK, Vocabulary


def examples(count: int = 9) -> list[Example]:
    """Video n has frames that all say n, and captions of its own word 10 + n, of 1 to 4 words."""
    return [
        Example(
            f"v{n}",
            torch.full((n + 1, 3), float(n), dtype=torch.float16) + torch.arange(n + 1)[:, None] / 64,
            tuple([10 + n] * length for length in range(1, 5)),
        )
        for n in range(count)
    ]


def batches(seed: int = 1, **options: int) -> TrainingBatches:
    chosen = {"batch_size": 4, "captions_per_video": 3, "max_frames": 5, **options}
    return TrainingBatches(examples(), seed=seed, **chosen)


def test_an_epoch_draws_each_video_as_often_and_pairs_captions_with_their_frames() -> None:
    made = batches()
    seen: Counter[tuple[int, int]] = Counter()
    count = 0
    for batch in made.epoch(1):
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
            seen[video, len(words)] += 1
    assert count == len(made) == 7
    assert max(seen.values()) == 1
    assert Counter(video for video, _ in seen) == dict.fromkeys(range(9), 3)


def test_same_seed_and_epoch_same_batches() -> None:
    def flat(seed: int, epoch: int) -> list:
        return [batch.targets.tolist() for batch in batches(seed).epoch(epoch)]

    assert flat(1, 4) == flat(1, 4)
    assert flat(1, 4) != flat(1, 5)
    assert flat(1, 4) != flat(2, 4)


def test_spread_takes_the_middles_of_equal_slices() -> None:
    frames = torch.arange(10.0).unsqueeze(1)
    assert spread(frames, 5).squeeze(1).tolist() == [1, 3, 5, 7, 9]
    assert spread(frames, 2).squeeze(1).tolist() == [2, 7]
    assert spread(frames, 10) is frames


def test_vocabulary_keeps_frequent_words_in_a_fixed_order() -> None:
    captions = [["a", "cat"], ["a", "dog"], ["a", "cat", "bird"]]
    vocabulary = Vocabulary.build(captions, min_count=1, max_size=3)
    assert vocabulary.words[4:] == ["a", "cat", "bird"]
    assert vocabulary.encode(["cat", "dog"]) == [5, UNK]
    assert vocabulary.decode([4, 6]) == ["a", "bird"]
    assert Vocabulary.build(captions, min_count=2, max_size=9).words[4:] == ["a", "cat"]
    assert Vocabulary(vocabulary.words).words == vocabulary.words


def test_frame_dropout_thins_videos_but_leaves_one_frame() -> None:
    made = TrainingBatches(
        examples(), batch_size=4, captions_per_video=4, max_frames=9, frame_dropout=0.5, seed=1
    )
    kept = [int(n) for epoch in range(40) for batch in made.epoch(epoch) for n in batch.mask.sum(1)]
    assert min(kept) == 1
    # A video of n frames keeps 1 + (n - 1) / 2 on average; n = 1..9 come equally often.
    assert abs(sum(kept) / len(kept) - 3.0) < 0.1
