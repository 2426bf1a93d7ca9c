from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from capvid.captioners.base import CAPTIONERS
from capvid.captioners.checkpoint import load_checkpoint
from capvid.datasets.dataset import CaptionedVideo, Segment
from capvid.errors import CheckpointError, DataError, UsageError
from capvid.features.feature_store import FeatureStore
from capvid.training.recipe import load_recipe
from capvid.training.reporters import EpochResult, Reporter
from capvid.training.trainer import Trainer

NOUNS = ["man", "woman", "dog", "cat", "girl"]
VERBS = ["runs very fast", "sings slowly", "is cooking rice", "jumps over a wall"]
TRAINING = [
    "data.min_count=1",
    "data.frame_dropout=0.0",
    "training.batch_size=10",
    "training.label_smoothing=0.0",
    "training.precision=fp32",
    "training.learning_rate=0.01",
    "training.average=0.9",
    "decoding.beam_size=2",
]
LSTM = {"embedding": 24, "hidden": 48, "attention": 16, "projection": 32, "dropout": 0.0}
STACK = {"hidden": 48, "heads": 2, "feed_forward": 64, "word_width": 24, "dropout": 0.0}
SIZES: dict[str, dict[str, Any]] = {
    "soft-attention": {**LSTM, "output": 48},
    "m3": {**LSTM, "output": 48, "memory_rows": 6, "memory_width": 16},
    "kv-memory": {**LSTM, "encoder_hidden": 32},
    "ham": {**LSTM, "memory_width": 24, "bottleneck": 16},
    "dense-lstm": {**LSTM, "encoder": 24},
    "mart": STACK,
    "vanilla-transformer": STACK,
    "transformer-xl": STACK,
}
SMALL = [*TRAINING, *(f"model.{name}={value}" for name, value in SIZES["m3"].items())]
MAPS = {"ham"}


class Silent(Reporter):
    def __init__(self) -> None:
        self.results: list[EpochResult] = []
        self.steps = 0

    def stepped(self, **_: Any) -> None:
        self.steps += 1

    def finished_epoch(self, result: EpochResult) -> None:
        self.results.append(result)


class LearnedError(Exception):
    """Every caption is said word for word."""


class StopsThen(Silent):
    def finished_epoch(self, result: EpochResult) -> None:
        if result.cider > 9.9:
            raise LearnedError


def data(
    folder: Path, *, maps: bool = False, paragraphs: bool = False
) -> tuple[list[CaptionedVideo], FeatureStore]:
    """Twenty videos with a caption each, that frames of random numbers tell apart; all are val as well.

    As paragraphs, the caption is of the first frame, and a further sentence of the others.
    """
    generator = torch.Generator().manual_seed(0)
    videos, tensors = [], {}
    for n in range(20):
        caption = f"a {NOUNS[n % 5]} {VERBS[n // 5]}"
        frames = torch.randn(3, 12, generator=generator)
        for split in ("train", "val"):
            video = CaptionedVideo(f"{split}{n}", split, (caption,))
            if paragraphs:
                told = (caption, f"then the {NOUNS[n % 5]} stops")
                parts = (Segment(0, 1), Segment(1, 3))
                video = CaptionedVideo(f"{split}{n}", split, (), parts, (told,))
            videos.append(video)
            tensors[f"{split}{n}"] = frames.clone().view(3, 4, 3) if maps else frames.clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "features.safetensors"
    )
    return videos, FeatureStore([folder / "features.safetensors"])


def trainer(folder: Path, name: str, *settings: str) -> Trainer:
    videos, store = data(folder, maps=name in MAPS, paragraphs=CAPTIONERS[name].paragraphs)
    sizes = [f"model.{option}={value}" for option, value in SIZES[name].items()]
    return Trainer(
        load_recipe(f"{name}-small", [*TRAINING, *sizes, *settings]),
        videos=videos,
        store=store,
        folder=folder / "run",
        device=torch.device("cpu"),
        reporter=Silent(),
    )


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
def test_twenty_captions_are_learned_by_heart(
    tmp_path: Path, name: str, optimizer: str, rate: float, epochs: int
) -> None:
    settings = [
        f"training.optimizer={optimizer}",
        f"training.learning_rate={rate}",
        f"training.epochs={epochs}",
        "training.patience=150",
        "training.weight_decay=0.0",
    ]
    made = trainer(tmp_path, name, *settings)
    made.reporter = StopsThen()
    with pytest.raises(LearnedError):
        made.run()
    checkpoint = load_checkpoint(tmp_path / "run")
    options = made.recipe.decoding
    said = made.task.predict(checkpoint.captioner, made.vocabulary, made.validation, options)
    told = [video for video in made.videos if video.split == "val"]
    assert said == {v.id: list(v.paragraphs[0]) if v.paragraphs else v.captions[0] for v in told}


def test_captioners_and_data_that_do_not_fit(tmp_path: Path) -> None:
    """One line says what was expected."""
    vectors, store = data(tmp_path)
    told, _ = data(tmp_path, paragraphs=True)
    options: dict[str, Any] = {
        "store": store,
        "folder": tmp_path / "run",
        "device": torch.device("cpu"),
        "reporter": Silent(),
    }
    with pytest.raises(UsageError, match=r"ham with temporal_model on expects feature maps .* one vector"):
        Trainer(load_recipe("ham-small", TRAINING), videos=vectors, **options)
    with pytest.raises(DataError, match=r"mart writes paragraphs and expects segments .* single captions"):
        Trainer(load_recipe("mart-small", TRAINING), videos=vectors, **options)
    with pytest.raises(DataError, match="m3 writes one sentence per video and expects captions"):
        Trainer(load_recipe("m3-small", TRAINING), videos=told, **options)
    with pytest.raises(UsageError, match="fusion must be one of latest-guiding, none, add, mean"):
        Trainer(load_recipe("dense-lstm-small", ["model.fusion=sum"]), videos=vectors, **options)
    with pytest.raises(UsageError, match="m3 has no values beside its features"):
        Trainer(load_recipe("m3-small", TRAINING), videos=vectors, value_width=3, **options)
    specific = [*TRAINING, "decoding.specificity=0.1"]
    with pytest.raises(UsageError, match=r"specificity = 0.1: expected .* standardise = true"):
        Trainer(load_recipe("m3-small", [*specific, "model.standardise=false"]), videos=vectors, **options)
    ranked = Trainer(
        load_recipe("m3-small", [*specific, "model.standardise=true"]), videos=vectors, **options
    )
    assert ranked.recipe.for_captioning()["decoding"]["specificity"] == 0.1
    maps = tmp_path / "maps"
    maps.mkdir()
    options["store"] = data(maps, maps=True)[1]
    with pytest.raises(UsageError, match="m3 expects one vector per frame, and the features are feature"):
        Trainer(load_recipe("m3-small", TRAINING), videos=vectors, **options)


def test_run_folder_and_log(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", "training.epochs=3")
    best, _ = made.run()
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [1, 2, 3]
    assert log[0]["loss"] > log[-1]["loss"]
    assert max(row["val_cider"] for row in log) == best.cider
    assert [row["best"] for row in log] == [r.best for r in made.reporter.results]
    assert made.reporter.steps == 6
    loaded = load_checkpoint(tmp_path / "run")
    assert loaded.name == "m3"
    assert loaded.info["epoch"] == best.epoch
    assert loaded.header.width == 12
    assert loaded.vocabulary.words == made.vocabulary.words
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["training"]["epochs"] == 3
    assert not (tmp_path / "run" / "test.json").exists()


def test_the_saved_weights_are_the_average_that_was_validated(tmp_path: Path) -> None:
    made = trainer(tmp_path, "soft-attention", "training.epochs=1")
    made.run()
    saved = load_file(tmp_path / "run" / "best" / "captioner.safetensors")
    names = [name for name, _ in made.captioner.named_parameters()]
    for name, average in zip(names, made.average.weights, strict=False):
        torch.testing.assert_close(saved[name], average)
    assert not torch.equal(saved["cell.word.weight"], made.captioner.cell.word.weight)


def test_same_seed_same_weights(tmp_path: Path) -> None:
    weights = []
    for run, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(run)
        folder.mkdir()
        trainer(folder, "m3", "training.epochs=2", f"training.seed={seed}", "model.dropout=0.3").run()
        weights.append(load_file(folder / "run" / "best" / "captioner.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["memory"], weights[2]["memory"])


def test_words_of_another_captioner_are_taken(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = trainer(tmp_path / "first", "m3", "training.epochs=1", "data.min_count=2")
    first.run()
    chosen = f"data.vocabulary={tmp_path / 'first' / 'run'}"
    second = trainer(tmp_path / "second", "mart", chosen)
    assert second.vocabulary.words == first.vocabulary.words
    plain = trainer(tmp_path / "second", "mart")
    assert plain.vocabulary.words != first.vocabulary.words
    with pytest.raises(CheckpointError, match="no captioner in this folder"):
        trainer(tmp_path / "second", "mart", f"data.vocabulary={tmp_path / 'nowhere'}")


def test_weights_begin_in_the_range_that_is_asked_for(tmp_path: Path) -> None:
    made = trainer(tmp_path, "dense-lstm", "training.init_range=0.05")
    for parameter in made.captioner.parameters():
        assert 0 < parameter.abs().max() <= 0.05


@pytest.mark.parametrize("name", ["m3", "mart"])
def test_videos_with_nothing_to_learn_from_are_still_scored(tmp_path: Path, name: str) -> None:
    made = trainer(tmp_path, name, "training.epochs=1")
    silent = [replace(v, captions=("...",), paragraphs=(("...", "..."),)) for v in made.videos[-2:]]
    videos = (
        [*made.videos[:-2], *silent]
        if name == "mart"
        else [*made.videos[:-2], *(replace(v, paragraphs=()) for v in silent)]
    )
    again = Trainer(
        made.recipe,
        videos=videos,
        store=made.store,
        folder=tmp_path / "again",
        device=torch.device("cpu"),
        reporter=Silent(),
    )
    again.run()
    assert len(again.validation) == 20


def test_stops_when_validation_no_longer_gains(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", "training.learning_rate=0.0", "training.epochs=9", "training.patience=2")
    made.run()
    assert [r.best for r in made.reporter.results] == [True, False, False]


def test_missing_features_and_splits(tmp_path: Path) -> None:
    videos, store = data(tmp_path)
    options: dict[str, Any] = {
        "store": store,
        "folder": tmp_path / "run",
        "device": torch.device("cpu"),
        "reporter": Silent(),
    }
    recipe = load_recipe("m3-small", SMALL)
    with pytest.raises(DataError, match=r"1 of 21 videos have no features \(lost\)"):
        Trainer(recipe, videos=[*videos, CaptionedVideo("lost", "train", ("a man",))], **options)
    with pytest.raises(DataError, match="no word comes 999 times"):
        Trainer(load_recipe("m3-small", [*SMALL, "data.min_count=999"]), videos=videos, **options)
    with pytest.raises(DataError, match="no video of the data is in the val split"):
        Trainer(recipe, videos=[v for v in videos if v.split == "train"], **options)


def test_damaged_checkpoints(tmp_path: Path) -> None:
    trainer(tmp_path, "m3", "training.epochs=1").run()
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


def test_a_test_split_is_scored_with_the_best_checkpoint(tmp_path: Path) -> None:
    videos, _ = data(tmp_path)
    videos += [CaptionedVideo(f"test{n}", "test", videos[2 * n].captions) for n in range(20)]
    tensors = load_file(tmp_path / "features.safetensors")
    more = {f"test{n}": tensors[f"val{n}"] for n in range(20)}
    save_file(more, tmp_path / "test.safetensors")
    made = Trainer(
        load_recipe("m3-small", [*SMALL, "training.epochs=4"]),
        videos=videos,
        store=FeatureStore([tmp_path / "features.safetensors", tmp_path / "test.safetensors"]),
        folder=tmp_path / "run",
        device=torch.device("cpu"),
        reporter=Silent(),
    )
    best, found = made.run()
    assert found is not None
    assert found.scores["CIDEr-D"] == pytest.approx(best.cider)  # the same videos under other names
    saved = json.loads((tmp_path / "run" / "test.json").read_text())
    assert saved["captions"] == found.captions
    assert saved["scores"] == found.scores
