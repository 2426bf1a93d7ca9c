from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_training import SMALL_M3, TRAINING, SilentReporter, make_trainer, write_dataset

from capvid.captioners.checkpoint import load_checkpoint
from capvid.datasets.dataset import CaptionedVideo
from capvid.errors import CheckpointError, DataError, UsageError
from capvid.features.feature_store import FeatureStore
from capvid.text.vocabulary import BOS, EOS
from capvid.training.recipe import load_recipe
from capvid.training.reporters import EpochResult
from capvid.training.trainer import Trainer


class LearnedError(Exception):
    """Raised once every caption is reproduced word for word."""


class StopWhenLearned(SilentReporter):
    def finished_epoch(self, result: EpochResult) -> None:
        if result.cider > 9.9:
            raise LearnedError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "rate", "epochs"),
    [
        ("soft-attention", "adamw", 0.01, 50),
        ("soft-attention", "adadelta", 1.0, 150),
        ("m3", "adam", 0.01, 50),
        ("m3", "adadelta", 1.0, 150),
        ("kv-memory", "adam", 0.01, 50),
        ("ham", "adam", 0.01, 150),
        ("dense-lstm", "adam", 0.01, 100),
        ("mart", "adamw", 0.003, 150),
        ("vanilla-transformer", "adamw", 0.003, 150),
        ("transformer-xl", "adamw", 0.003, 150),
    ],
)
def test_captioner_memorises_twenty_captions(
    tmp_path: Path, name: str, optimizer: str, rate: float, epochs: int
) -> None:
    settings = [
        f"training.optimizer={optimizer}",
        f"training.learning_rate={rate}",
        f"training.epochs={epochs}",
        "training.patience=150",
        "training.weight_decay=0.0",
    ]
    trainer = make_trainer(tmp_path, name, *settings)
    trainer.reporter = StopWhenLearned()
    with pytest.raises(LearnedError):
        trainer.run()
    checkpoint = load_checkpoint(tmp_path / "run")
    options = trainer.recipe.decoding
    captions = trainer.task.predict(checkpoint.captioner, trainer.vocabulary, trainer.validation, options)
    validation_videos = [video for video in trainer.videos if video.split == "val"]
    assert captions == {
        v.id: list(v.paragraphs[0]) if v.paragraphs else v.captions[0] for v in validation_videos
    }


def test_mismatched_captioner_and_data_are_refused(tmp_path: Path) -> None:
    """The error says what was expected."""
    videos, store = write_dataset(tmp_path)
    paragraph_videos, _ = write_dataset(tmp_path, paragraphs=True)
    options: dict[str, Any] = {
        "store": store,
        "folder": tmp_path / "run",
        "device": torch.device("cpu"),
        "reporter": SilentReporter(),
    }
    with pytest.raises(UsageError, match=r"ham with temporal_model on expects feature maps .* one vector"):
        Trainer(load_recipe("ham-small", TRAINING), videos=videos, **options)
    with pytest.raises(DataError, match=r"mart writes paragraphs and expects segments .* single captions"):
        Trainer(load_recipe("mart-small", TRAINING), videos=videos, **options)
    with pytest.raises(DataError, match="m3 writes one sentence per video and expects captions"):
        Trainer(load_recipe("m3-small", TRAINING), videos=paragraph_videos, **options)
    with pytest.raises(UsageError, match="fusion must be one of latest-guiding, none, add, mean"):
        Trainer(load_recipe("dense-lstm-small", ["model.fusion=sum"]), videos=videos, **options)
    with pytest.raises(UsageError, match="m3 has no values beside its features"):
        Trainer(load_recipe("m3-small", TRAINING), videos=videos, value_width=3, **options)
    specific = [*TRAINING, "decoding.specificity=0.1"]
    with pytest.raises(UsageError, match=r"specificity = 0.1: expected .* standardise = true"):
        Trainer(load_recipe("m3-small", [*specific, "model.standardise=false"]), videos=videos, **options)
    ranked = Trainer(load_recipe("m3-small", [*specific, "model.standardise=true"]), videos=videos, **options)
    assert ranked.recipe.for_captioning()["decoding"]["specificity"] == 0.1
    maps = tmp_path / "maps"
    maps.mkdir()
    options["store"] = write_dataset(maps, maps=True)[1]
    with pytest.raises(UsageError, match="m3 expects one vector per frame, and the features are feature"):
        Trainer(load_recipe("m3-small", TRAINING), videos=videos, **options)


def test_run_folder_and_metrics_log(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", "training.epochs=3")
    best, _ = trainer.run()
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [1, 2, 3]
    assert log[0]["loss"] > log[-1]["loss"]
    assert max(row["val_cider"] for row in log) == best.cider
    assert [row["best"] for row in log] == [r.best for r in trainer.reporter.results]
    assert trainer.reporter.steps == 6
    loaded = load_checkpoint(tmp_path / "run")
    assert loaded.name == "m3"
    assert loaded.info["epoch"] == best.epoch
    assert loaded.header.width == 12
    assert loaded.vocabulary.words == trainer.vocabulary.words
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["training"]["epochs"] == 3
    assert not (tmp_path / "run" / "test.json").exists()


def test_validation_loss_is_the_mean_over_all_words(tmp_path: Path) -> None:
    """Against a captioner that is stepped word by word."""
    trainer = make_trainer(tmp_path, "m3", "training.epochs=1")
    best, _ = trainer.run()
    captioner = load_checkpoint(tmp_path / "run").captioner
    losses = []
    for video in trainer.val:
        frames = trainer.reader(video.id).float().unsqueeze(0)
        caption = trainer.vocabulary.encode(video.captions[0].split())
        with torch.no_grad():
            state = captioner.encode(frames, torch.ones(frames.shape[:2], dtype=torch.bool))
            for word, next_word in zip([BOS, *caption], [*caption, EOS], strict=True):
                logits, state, _ = captioner.step(torch.tensor([word]), state)
                losses.append(-float(logits[0].log_softmax(-1)[next_word]))
    assert best.val_loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_best_checkpoint_holds_the_averaged_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "soft-attention", "training.epochs=1")
    trainer.run()
    saved = load_file(tmp_path / "run" / "best" / "captioner.safetensors")
    names = [name for name, _ in trainer.captioner.named_parameters()]
    for name, average in zip(names, trainer.average.weights, strict=False):
        torch.testing.assert_close(saved[name], average)
    assert not torch.equal(saved["cell.word.weight"], trainer.captioner.cell.word.weight)


def test_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for run, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(run)
        folder.mkdir()
        make_trainer(folder, "m3", "training.epochs=2", f"training.seed={seed}", "model.dropout=0.3").run()
        weights.append(load_file(folder / "run" / "best" / "captioner.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["memory"], weights[2]["memory"])


def test_vocabulary_of_another_run_is_used(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = make_trainer(tmp_path / "first", "m3", "training.epochs=1", "data.min_count=2")
    first.run()
    vocabulary_setting = f"data.vocabulary={tmp_path / 'first' / 'run'}"
    second = make_trainer(tmp_path / "second", "mart", vocabulary_setting)
    assert second.vocabulary.words == first.vocabulary.words
    plain = make_trainer(tmp_path / "second", "mart")
    assert plain.vocabulary.words != first.vocabulary.words
    with pytest.raises(CheckpointError, match="no captioner in this folder"):
        make_trainer(tmp_path / "second", "mart", f"data.vocabulary={tmp_path / 'nowhere'}")


def test_init_range_bounds_the_initial_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "dense-lstm", "training.init_range=0.05")
    for parameter in trainer.captioner.parameters():
        assert 0 < parameter.abs().max() <= 0.05


@pytest.mark.parametrize("name", ["m3", "mart"])
def test_videos_without_usable_captions_are_still_validated(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path, name, "training.epochs=1")
    without_words = [replace(v, captions=("...",), paragraphs=(("...", "..."),)) for v in trainer.videos[-2:]]
    videos = (
        [*trainer.videos[:-2], *without_words]
        if name == "mart"
        else [*trainer.videos[:-2], *(replace(v, paragraphs=()) for v in without_words)]
    )
    other_trainer = Trainer(
        trainer.recipe,
        videos=videos,
        store=trainer.store,
        folder=tmp_path / "again",
        device=torch.device("cpu"),
        reporter=SilentReporter(),
    )
    other_trainer.run()
    assert len(other_trainer.validation) == 20


def test_patience_stops_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, "m3", "training.learning_rate=0.0", "training.epochs=9", "training.patience=2"
    )
    trainer.run()
    assert [r.best for r in trainer.reporter.results] == [True, False, False]


def test_missing_features_and_splits_are_refused(tmp_path: Path) -> None:
    videos, store = write_dataset(tmp_path)
    options: dict[str, Any] = {
        "store": store,
        "folder": tmp_path / "run",
        "device": torch.device("cpu"),
        "reporter": SilentReporter(),
    }
    recipe = load_recipe("m3-small", SMALL_M3)
    with pytest.raises(DataError, match=r"1 of 21 videos have no features \(lost\)"):
        Trainer(recipe, videos=[*videos, CaptionedVideo("lost", "train", ("a man",))], **options)
    with pytest.raises(DataError, match="no word comes 999 times"):
        Trainer(load_recipe("m3-small", [*SMALL_M3, "data.min_count=999"]), videos=videos, **options)
    with pytest.raises(DataError, match="no video of the data is in the val split"):
        Trainer(recipe, videos=[v for v in videos if v.split == "train"], **options)


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, "m3", "training.epochs=1").run()
    best = tmp_path / "run" / "best"
    with pytest.raises(CheckpointError, match="no captioner in this folder"):
        load_checkpoint(tmp_path)
    weights = (best / "captioner.safetensors").read_bytes()
    (best / "captioner.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match="damaged checkpoint") as error:
        load_checkpoint(best)
    assert "\n" not in str(error.value)
    (best / "captioner.json").write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match="damaged checkpoint"):
        load_checkpoint(best)


def test_test_split_is_scored_with_the_best_checkpoint(tmp_path: Path) -> None:
    videos, _ = write_dataset(tmp_path)
    videos += [CaptionedVideo(f"test{n}", "test", videos[2 * n].captions) for n in range(20)]
    tensors = load_file(tmp_path / "features.safetensors")
    test_tensors = {f"test{n}": tensors[f"val{n}"] for n in range(20)}
    save_file(test_tensors, tmp_path / "test.safetensors")
    trainer = Trainer(
        load_recipe("m3-small", [*SMALL_M3, "training.epochs=4"]),
        videos=videos,
        store=FeatureStore([tmp_path / "features.safetensors", tmp_path / "test.safetensors"]),
        folder=tmp_path / "run",
        device=torch.device("cpu"),
        reporter=SilentReporter(),
    )
    best, evaluation = trainer.run()
    assert evaluation is not None
    assert evaluation.scores["CIDEr-D"] == pytest.approx(
        best.cider
    )  # the validation videos under other names
    saved = json.loads((tmp_path / "run" / "test.json").read_text())
    assert saved["captions"] == evaluation.captions
    assert saved["scores"] == evaluation.scores
