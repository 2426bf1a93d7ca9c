"""Training on augmented views of the videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_training import SMALL_M3, SilentReporter, make_trainer, small_trainer, write_dataset

from capvid.captioners.base import CAPTIONERS
from capvid.captioners.checkpoint import load_checkpoint
from capvid.datasets.batches import FrameReader
from capvid.datasets.dataset import CaptionedVideo
from capvid.errors import TrainingError
from capvid.features.feature_store import FeatureStore
from capvid.text.vocabulary import PAD
from capvid.training.hyperparameter_search import Search
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer


class CountingReporter(SilentReporter):
    """Records the counts reported at the start."""

    def started(self, **counts: Any) -> None:
        self.counts = counts

    def started_trial(self, *_: Any) -> None: ...

    def finished_trial(self, *_: Any, **__: Any) -> None: ...


def write_views(folder: Path, *, paragraphs: bool = False) -> tuple[list[CaptionedVideo], FeatureStore]:
    """Write the small dataset with views 1 and 3 of video train0 and view 1 of train1, train2 and val0.

    Video train2 is renamed to train3@1, like a view of train3. All values of a view are its number.
    """
    videos, store = write_dataset(folder, paragraphs=paragraphs)
    reader = FrameReader(store)
    videos[4] = CaptionedVideo("train3@1", "train", *_annotations(videos[4]))
    own = {"train3@1": reader("train2").float()}
    views = {"train0@3": 3, "train0@1": 1, "train1@1": 1, "val0@1": 1, "train2@1": 1, "unknown@1": 1}
    save_file(
        {name: torch.full((3, 12), float(number)) for name, number in views.items()} | own,
        folder / "views.safetensors",
    )
    return videos, FeatureStore([folder / "features.safetensors", folder / "views.safetensors"])


def _annotations(video: CaptionedVideo) -> tuple[Any, ...]:
    return video.captions, video.segments, video.paragraphs


def make_views_trainer(folder: Path, name: str, *settings: str, plain: bool = False) -> Trainer:
    paragraphs = CAPTIONERS[name].paragraphs
    videos, store = write_views(folder, paragraphs=paragraphs)
    if plain:
        features = {v.id: FrameReader(store)(v.id).float() for v in videos}
        save_file(features, folder / "plain.safetensors")
        store = FeatureStore([folder / "plain.safetensors"])
    return small_trainer(folder, name, videos, store, *settings, reporter=CountingReporter())


@pytest.mark.parametrize("name", ["m3", "mart"])
def test_views_are_trained_on_like_videos(tmp_path: Path, name: str) -> None:
    trainer = make_views_trainer(tmp_path, name, "training.epochs=1")
    keys = ["", "@1", "@3", "", "@1", "", ""]
    names = ["train0", "train0", "train0", "train1", "train1", "train3@1", "train3"]
    examples = trainer.batches.examples
    assert [example.id for example in examples[:7]] == names
    assert [example.key for example in examples[:7]] == [
        id_ + key if key else "" for id_, key in zip(names, keys, strict=True)
    ]
    assert len(examples) == trainer.batches.captions == 23
    assert not any(example.key for example in trainer.validation) and len(trainer.validation) == 20
    example_counts: dict[tuple[str, str], int] = {}
    for plan in trainer.batches.epoch(1):
        batch = plan.part(0, 1)()
        for row, features, mask, targets in zip(
            plan.rows, batch.features, batch.mask, batch.targets, strict=True
        ):
            example = row.example
            words = trainer.vocabulary.decode(targets[targets != PAD].tolist())
            annotated = next(video for video in trainer.videos if video.id == example.id)
            assert words[:2] == (annotated.captions or annotated.paragraphs[0])[0].split()[:2]
            frames, original = features[mask], FrameReader(trainer.store)(example.id)
            expected = torch.full((3, 12), float(example.key[-1])) if example.key else original
            assert torch.equal(frames, expected.half())
            example_counts[example.id, example.key] = example_counts.get((example.id, example.key), 0) + 1
    assert len(example_counts) == 23 and set(example_counts.values()) == {1}
    means = torch.cat([FrameReader(trainer.store)(example.key or example.id).float() for example in examples])
    if trainer.captioner.config.standardise:
        torch.testing.assert_close(trainer.captioner.standardise.mean, means.mean(0))
    trainer.run()
    counts = trainer.reporter.counts
    assert (counts["videos"], counts["views"], counts["validation"]) == (20, 3, 20)


def test_views_can_be_disabled(tmp_path: Path) -> None:
    """The weights equal those of training without views."""
    weights = []
    for folder, plain in (("views", False), ("plain", True)):
        (tmp_path / folder).mkdir()
        trainer = make_views_trainer(
            tmp_path / folder, "m3", "data.views=false", "training.epochs=2", plain=plain
        )
        trainer.run()
        weights.append(load_checkpoint(tmp_path / folder / "run").captioner.state_dict())
        assert trainer.reporter.counts["views"] == 0
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_search_takes_no_test_video_for_a_view(tmp_path: Path) -> None:
    """Trials get no test split, in which a video may have the name of a view."""
    videos, store = write_views(tmp_path)
    videos.append(CaptionedVideo("train0@1", "test", ("a man runs",)))
    views_of_trials: list[Any] = []

    def make(_: Any, **options: Any) -> Any:
        views_of_trials.append(options["views"])
        raise MemoryError

    recipe = load_recipe("m3-small", [*SMALL_M3, "search.training.learning_rate=[0.001, 0.01]"])
    with pytest.raises(TrainingError, match="all 1 trials failed"):
        Search(
            recipe,
            trials=1,
            videos=videos,
            store=store,
            folder=tmp_path / "run",
            make=make,
            reporter=CountingReporter(),
        ).run()
    assert views_of_trials == [{"train0": ["train0@3"], "train1": ["train1@1"], "val0": ["val0@1"]}]


def test_self_critical_training_treats_views_as_their_video(tmp_path: Path) -> None:
    """A view is sampled like a video, rewarded by its video's captions, and no other video to contrast."""
    make_trainer(tmp_path, "m3", "training.epochs=1").run()
    videos, store = write_views(tmp_path)
    settings = ["self_critical.samples=2", "self_critical.contrast=1.5", "self_critical.batch_size=23"]
    fine_tuner = Trainer(
        load_recipe("m3-small", [*SMALL_M3, *settings]),
        start=load_checkpoint(tmp_path / "run"),
        videos=videos,
        store=store,
        folder=tmp_path / "fine",
        device=torch.device("cpu"),
        reporter=SilentReporter(),
    )
    (plan,) = fine_tuner.batches.epoch(1)
    batch = plan.part(0, 1)()
    assert sorted(batch.ids).count("train0") == 3 and len(batch.ids) == 23
    views = {
        (i, float(f[0, 0])) for i, f in zip(batch.ids, batch.features, strict=True) if (f == f[0, 0]).all()
    }
    assert views == {("train0", 1.0), ("train0", 3.0), ("train1", 1.0)}

    ids = ["train0", "train0", "train1", "train0", "train5", "train9"]
    references = {video.id: video.captions[0] for video in videos if video.split == "train"}
    samples = [
        [_hypothesis(fine_tuner, references[name]), _hypothesis(fine_tuner, references["train5"])]
        for name in ids
    ]
    rewards = fine_tuner.objective.rewards(ids, samples)
    for row, name in enumerate(ids):
        next_ids = [ids[(row + shift) % 6] for shift in (1, 2, 3, 4)]
        for number, text in enumerate((references[name], references["train5"])):
            scores = fine_tuner.objective.scorer.score(dict.fromkeys(references, text))[1]
            other_scores = [scores[other] for other in next_ids if other != name]
            expected = scores[name] - 1.5 * sum(other_scores) / len(other_scores)
            assert rewards[row, number].item() == pytest.approx(expected)
    same_video_rewards = fine_tuner.objective.rewards(["train0"] * 3, samples[:3])
    assert same_video_rewards[0, 0].item() == pytest.approx(
        fine_tuner.objective.scorer.score(dict.fromkeys(references, references["train0"]))[1]["train0"]
    )


def _hypothesis(trainer: Trainer, text: str) -> Any:
    from capvid.decoding.decoding_options import Hypothesis

    return Hypothesis(trainer.vocabulary.encode(text.split()), [], 0.0)
