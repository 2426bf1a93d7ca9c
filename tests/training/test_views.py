"""Training on augmented views of the videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_loop import SIZES, SMALL, TRAINING, Silent, data, trainer

from capvid.captioners.base import CAPTIONERS
from capvid.captioners.checkpoint import load_checkpoint
from capvid.datasets.dataset import CaptionedVideo
from capvid.datasets.examples import FrameReader
from capvid.errors import TrainingError
from capvid.features.feature_store import FeatureStore
from capvid.text.vocabulary import PAD
from capvid.training.hyperparameter_search import Search
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer


class Told(Silent):
    """Keeps what it is told at the beginning."""

    def started(self, **counts: Any) -> None:
        self.counts = counts

    def started_trial(self, *_: Any) -> None: ...

    def finished_trial(self, *_: Any, **__: Any) -> None: ...


def with_views(folder: Path, *, paragraphs: bool = False) -> tuple[list[CaptionedVideo], FeatureStore]:
    """Twenty videos to train on: views 1 and 3 of the first, view 1 of the second; also one of val 0.

    The third video has the name of a view of the fourth. Every frame of a view says its number.
    """
    videos, store = data(folder, paragraphs=paragraphs)
    reader = FrameReader(store)
    videos[4] = CaptionedVideo("train3@1", "train", *_of(videos[4]))
    own = {"train3@1": reader("train2").float()}
    views = {"train0@3": 3, "train0@1": 1, "train1@1": 1, "val0@1": 1, "train2@1": 1, "unknown@1": 1}
    save_file(
        {name: torch.full((3, 12), float(number)) for name, number in views.items()} | own,
        folder / "views.safetensors",
    )
    return videos, FeatureStore([folder / "features.safetensors", folder / "views.safetensors"])


def _of(video: CaptionedVideo) -> tuple[Any, ...]:
    return video.captions, video.segments, video.paragraphs


def made(folder: Path, name: str, *settings: str, plain: bool = False) -> Trainer:
    told = CAPTIONERS[name].paragraphs
    videos, store = with_views(folder, paragraphs=told)
    if plain:
        held = {v.id: FrameReader(store)(v.id).float() for v in videos}
        save_file(held, folder / "plain.safetensors")
        store = FeatureStore([folder / "plain.safetensors"])
    sizes = [f"model.{option}={value}" for option, value in SIZES[name].items()]
    return Trainer(
        load_recipe(f"{name}-small", [*TRAINING, *sizes, *settings]),
        videos=videos,
        store=store,
        folder=folder / "run",
        device=torch.device("cpu"),
        reporter=Told(),
    )


@pytest.mark.parametrize("name", ["m3", "mart"])
def test_views_are_learned_from_as_videos_are(tmp_path: Path, name: str) -> None:
    found = made(tmp_path, name, "training.epochs=1")
    keys = ["", "@1", "@3", "", "@1", "", ""]
    names = ["train0", "train0", "train0", "train1", "train1", "train3@1", "train3"]
    examples = found.batches.examples
    assert [example.id for example in examples[:7]] == names
    assert [example.key for example in examples[:7]] == [
        id_ + key if key else "" for id_, key in zip(names, keys, strict=True)
    ]
    assert len(examples) == found.batches.captions == 23
    assert not any(example.key for example in found.validation) and len(found.validation) == 20
    seen: dict[tuple[str, str], int] = {}
    for plan in found.batches.epoch(1):
        batch = plan.part(0, 1)()
        for row, features, mask, targets in zip(
            plan.rows, batch.features, batch.mask, batch.targets, strict=True
        ):
            example = row.example
            words = found.vocabulary.decode(targets[targets != PAD].tolist())
            told = next(video for video in found.videos if video.id == example.id)
            assert words[:2] == (told.captions or told.paragraphs[0])[0].split()[:2]
            frames, own = features[mask], FrameReader(found.store)(example.id)
            expected = torch.full((3, 12), float(example.key[-1])) if example.key else own
            assert torch.equal(frames, expected.half())
            seen[example.id, example.key] = seen.get((example.id, example.key), 0) + 1
    assert len(seen) == 23 and set(seen.values()) == {1}
    means = torch.cat([FrameReader(found.store)(example.key or example.id).float() for example in examples])
    if found.captioner.config.standardise:
        torch.testing.assert_close(found.captioner.standardise.mean, means.mean(0))
    found.run()
    counts = found.reporter.counts
    assert (counts["videos"], counts["views"], counts["validation"]) == (20, 3, 20)


def test_views_can_be_left_alone(tmp_path: Path) -> None:
    """Then everything is as without them."""
    weights = []
    for folder, plain in (("views", False), ("plain", True)):
        (tmp_path / folder).mkdir()
        found = made(tmp_path / folder, "m3", "data.views=false", "training.epochs=2", plain=plain)
        found.run()
        weights.append(load_checkpoint(tmp_path / folder / "run").captioner.state_dict())
        assert found.reporter.counts["views"] == 0
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_search_takes_no_test_video_for_a_view(tmp_path: Path) -> None:
    """Its trials are not told of the test split, in which a video may have the name of a view."""
    videos, store = with_views(tmp_path)
    videos.append(CaptionedVideo("train0@1", "test", ("a man runs",)))
    found: list[Any] = []

    def make(_: Any, **options: Any) -> Any:
        found.append(options["views"])
        raise MemoryError

    recipe = load_recipe("m3-small", [*SMALL, "search.training.learning_rate=[0.001, 0.01]"])
    with pytest.raises(TrainingError, match="all 1 trials failed"):
        Search(
            recipe,
            trials=1,
            videos=videos,
            store=store,
            folder=tmp_path / "run",
            make=make,
            reporter=Told(),
        ).run()
    assert found == [{"train0": ["train0@3"], "train1": ["train1@1"], "val0": ["val0@1"]}]


def test_self_critical_training_counts_views_as_their_video(tmp_path: Path) -> None:
    """A view is drawn from as any video, and rewarded by its video's captions; it is no other video."""
    trainer(tmp_path, "m3", "training.epochs=1").run()
    videos, store = with_views(tmp_path)
    settings = ["self_critical.samples=2", "self_critical.contrast=1.5", "self_critical.batch_size=23"]
    found = Trainer(
        load_recipe("m3-small", [*SMALL, *settings]),
        start=load_checkpoint(tmp_path / "run"),
        videos=videos,
        store=store,
        folder=tmp_path / "fine",
        device=torch.device("cpu"),
        reporter=Silent(),
    )
    (plan,) = found.batches.epoch(1)
    batch = plan.part(0, 1)()
    assert sorted(batch.ids).count("train0") == 3 and len(batch.ids) == 23
    views = {
        (i, float(f[0, 0])) for i, f in zip(batch.ids, batch.features, strict=True) if (f == f[0, 0]).all()
    }
    assert views == {("train0", 1.0), ("train0", 3.0), ("train1", 1.0)}

    ids = ["train0", "train0", "train1", "train0", "train5", "train9"]
    told = {video.id: video.captions[0] for video in videos if video.split == "train"}
    samples = [[_said(found, told[name]), _said(found, told["train5"])] for name in ids]
    rewards = found.objective.rewards(ids, samples)
    for place, name in enumerate(ids):
        others = [ids[(place + shift) % 6] for shift in (1, 2, 3, 4)]
        for number, text in enumerate((told[name], told["train5"])):
            scores = found.objective.scorer.score(dict.fromkeys(told, text))[1]
            foreign = [scores[other] for other in others if other != name]
            expected = scores[name] - 1.5 * sum(foreign) / len(foreign)
            assert rewards[place, number].item() == pytest.approx(expected)
    same = found.objective.rewards(["train0"] * 3, samples[:3])
    assert same[0, 0].item() == pytest.approx(
        found.objective.scorer.score(dict.fromkeys(told, told["train0"]))[1]["train0"]
    )


def _said(found: Trainer, text: str) -> Any:
    from capvid.decoding.decoding_options import Hypothesis

    return Hypothesis(found.vocabulary.encode(text.split()), [], 0.0)
