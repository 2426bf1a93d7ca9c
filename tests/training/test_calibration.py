from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_training import (
    MAP_CAPTIONERS,
    NOUNS,
    TRAINING,
    VERBS,
    SilentReporter,
    StopAfterSteps,
    StoppedError,
    make_trainer,
    small_trainer,
)

from capvid.captioners.checkpoint import CONFIG, WEIGHTS, Checkpoint, load_checkpoint, save_info
from capvid.datasets.batches import FrameReader
from capvid.datasets.dataset import CaptionedVideo
from capvid.decoding.caption_generator import LOW_CONFIDENCE
from capvid.decoding.rescoring import NOTE, Calibration
from capvid.errors import CheckpointError
from capvid.features.feature_store import FeatureStore
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import BOS, EOS
from capvid.training import evaluation as module
from capvid.training.evaluation import UncalibratedError, calibrate, evaluate, fit
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

VIDEOS = 120


def build_trainer(folder: Path, name: str = "m3", *settings: str, **options: Any) -> Trainer:
    """Return a trainer of 20 training videos and ``VIDEOS`` validation videos, half of them mostly noise."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(20, 3, 12, generator=generator)
    videos, tensors = [], {}
    for n in range(20 + VIDEOS):
        pattern, split = n % 20, "train" if n < 20 else "val"
        signal = 1.0 if n < 20 or n // 20 % 2 else 0.2
        frames = signal * patterns[pattern] + 0.3 * torch.randn(3, 12, generator=generator)
        caption = f"a {NOUNS[pattern % 5]} {VERBS[pattern // 5]}"
        videos.append(CaptionedVideo(f"{split}{n}", split, (caption,)))
        tensors[f"{split}{n}"] = frames.view(3, 4, 3).clone() if name in MAP_CAPTIONERS else frames.clone()
    save_file(tensors, folder / "features.safetensors")
    store = FeatureStore([folder / "features.safetensors"])
    patient = ("training.epochs=25", "training.patience=99")
    return small_trainer(folder, name, videos, store, *patient, *settings, **options)


def stepwise_logprob(checkpoint: Checkpoint, frames: torch.Tensor, text: str) -> float:
    """Return the log-probability of a caption of one video, word by word."""
    captioner = checkpoint.captioner
    state = captioner.encode(frames.unsqueeze(0), torch.ones(1, len(frames), dtype=torch.bool))
    total, word = 0.0, BOS
    for following in [*checkpoint.vocabulary.encode(text.split()), EOS]:
        logits, state, _ = captioner.step(torch.tensor([word]), state)
        total += logits[0].double().log_softmax(-1)[following].item()
        word = following
    return total


def slow_signals(trainer: Trainer) -> tuple[list[tuple[float, float]], list[bool]]:
    """Compute both signals of each validation video's caption, and whether it is right, one by one."""
    checkpoint = load_checkpoint(trainer.folder)
    val = [video for video in trainer.videos if video.split == "val"]
    reader = FrameReader(trainer.store)
    frames = {video.id: reader(video.id).float() for video in val}
    average = torch.stack([vector for video in frames.values() for vector in video.flatten(0, -2)]).mean(0)
    shape = frames[val[0].id].shape
    average_video = average.view(1, *[1] * (len(shape) - 2), -1).expand(1, *shape[1:])
    captions = evaluate(checkpoint, val, trainer.store, trainer.recipe.decoding).captions
    _, scores = CiderD({video.id: list(video.captions) for video in val}).score(captions)
    signals = []
    for name, caption in captions.items():
        with torch.no_grad():
            logprob = stepwise_logprob(checkpoint, frames[name], caption)
            average_logprob = stepwise_logprob(checkpoint, average_video, caption)
        signals.append((logprob / (len(caption.split()) + 1), logprob - average_logprob))
    return signals, [scores[name] >= module.RIGHT_FROM for name in captions]


def slow_calibration(trainer: Trainer) -> dict[str, float]:
    """Return the expected calibration, with the curve fitted by gradient ascent in plain Python."""
    rows, labels = slow_signals(trainer)
    count = len(rows)
    means = [sum(row[k] for row in rows) / count for k in (0, 1)]
    deviations = [math.sqrt(sum((row[k] - means[k]) ** 2 for row in rows) / count) for k in (0, 1)]
    scaled = [[(row[k] - means[k]) / deviations[k] for k in (0, 1)] for row in rows]
    intercept, slopes = 0.0, [0.0, 0.0]
    for _ in range(20_000):
        errors = [
            label - 1 / (1 + math.exp(-(intercept + slopes[0] * x + slopes[1] * y)))
            for (x, y), label in zip(scaled, labels, strict=True)
        ]
        intercept += 0.02 * sum(errors)
        for k in (0, 1):
            gradient = sum(error * row[k] for error, row in zip(errors, scaled, strict=True))
            slopes[k] += 0.02 * (gradient - slopes[k])
    slopes = [slope / deviation for slope, deviation in zip(slopes, deviations, strict=True)]
    intercept -= sum(slope * mean for slope, mean in zip(slopes, means, strict=True))
    confidences = [1 / (1 + math.exp(-(intercept + slopes[0] * x + slopes[1] * y))) for x, y in rows]
    flagged_labels = [label for label, c in zip(labels, confidences, strict=True) if c < LOW_CONFIDENCE]
    unflagged_labels = [label for label, c in zip(labels, confidences, strict=True) if c >= LOW_CONFIDENCE]
    return {
        "intercept": intercept,
        "per_logprob": slopes[0],
        "per_information": slopes[1],
        "right": sum(labels) / count,
        "flagged": len(flagged_labels) / count,
        "right_flagged": sum(flagged_labels) / max(1, len(flagged_labels)),
        "right_others": sum(unflagged_labels) / max(1, len(unflagged_labels)),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epochs"), [("m3", 40), ("soft-attention", 40)])
def test_calibration_equals_a_slow_recomputation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, epochs: int
) -> None:
    monkeypatch.setattr(module, "RIGHT_FROM", 8.0)  # captions without a mistake
    trainer = build_trainer(tmp_path, name, "model.standardise=off", f"training.epochs={epochs}")
    trainer.run()
    calibration = Calibration.of(load_checkpoint(trainer.folder).info)
    assert calibration is not None and calibration.videos == VIDEOS
    assert len(calibration.average) == trainer.store.header.width
    expected = slow_calibration(trainer)
    actual = {key: getattr(calibration, key) for key in expected}
    assert actual == pytest.approx(expected, rel=1e-2, abs=1e-2)
    assert 0.1 < calibration.right < 0.9 and 0 < calibration.flagged < 1
    assert calibration.right_flagged is not None and calibration.right_others is not None
    assert calibration.right_others > calibration.right_flagged + 0.2
    assert json.loads((trainer.folder / "run.json").read_text())["uncalibrated"] is None
    assert NOTE not in load_checkpoint(trainer.folder / "last").info


@pytest.mark.slow
def test_maps_are_averaged_over_frames_and_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tmp_path, "ham", "training.epochs=30")
    calls = []

    def record(signals: Any, right: Any) -> tuple[float, list[float]]:
        calls.append((signals.tolist(), right.tolist()))
        return 0.0, [1.0, 1.0]

    monkeypatch.setattr(module, "fit", record)
    trainer.run()
    calibration = Calibration.of(load_checkpoint(trainer.folder).info)
    reader = FrameReader(trainer.store)
    val = torch.stack([reader(video.id) for video in trainer.videos if video.split == "val"])
    assert val.shape == (VIDEOS, 3, 4, 3)
    mean = val.double().mean((0, 1, 2)).tolist()
    assert calibration is not None and calibration.average == pytest.approx(mean, rel=1e-4)
    signals, labels = slow_signals(trainer)
    assert calls[0][0] == [pytest.approx(row, abs=1e-3) for row in signals]
    assert calls[0][1] == labels and 0 < sum(labels) < VIDEOS


@pytest.mark.slow
def test_resumed_run_has_the_same_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["training.save_every=0.0", "training.epochs=25"]
    undisturbed = build_trainer(tmp_path / "undisturbed", "m3", *settings)
    undisturbed.run()
    expected = (undisturbed.folder / "best" / CONFIG).read_bytes()
    assert b'"confidence"' in expected
    with pytest.raises(StoppedError):
        build_trainer(tmp_path / "resumed", "m3", *settings, reporter=StopAfterSteps(33)).run()
    resumed = build_trainer(tmp_path / "resumed", "m3", *settings, resume=True)

    def stop(*_: Any) -> None:
        raise StoppedError

    with monkeypatch.context() as patch:  # stopped again, between training and calibration
        patch.setattr(module, "save_info", stop)
        with pytest.raises(StoppedError):
            resumed.run()
    best = resumed.folder / "best" / CONFIG
    assert b'"confidence"' not in best.read_bytes()
    for _ in range(2):  # the second time, the run had finished
        build_trainer(tmp_path / "resumed", "m3", *settings, resume=True).run()
        assert best.read_bytes() == expected


@pytest.mark.slow
def test_fine_tuned_captioner_is_recalibrated(tmp_path: Path) -> None:
    trained = build_trainer(tmp_path, "m3", "training.epochs=15", "training.average=0.0")
    trained.run()
    start = load_checkpoint(trained.folder)
    settings = ["epochs=2", "learning_rate=2e-3", "samples=4", "batch_size=10"]
    fine_tuner = Trainer(
        replace(
            load_recipe("m3-small", [*TRAINING, *(f"self_critical.{setting}" for setting in settings)]),
            model=trained.recipe.model,
        ),
        start=start,
        videos=trained.videos,
        store=trained.store,
        folder=tmp_path / "fine",
        device=trained.device,
        reporter=SilentReporter(),
    )
    fine_tuner.run()
    checkpoint = load_checkpoint(fine_tuner.folder)
    val = [video for video in fine_tuner.videos if video.split == "val"]
    assert Calibration.of(checkpoint.info) == calibrate(
        checkpoint, val, fine_tuner.store, fine_tuner.recipe.decoding
    )
    assert (
        (fine_tuner.folder / "best" / WEIGHTS).read_bytes()
        == (trained.folder / "best" / WEIGHTS).read_bytes()
    ) == (checkpoint.info[NOTE] == start.info[NOTE])


@pytest.mark.slow
def test_run_without_calibration_records_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(trainer: Trainer) -> str | None:
        trainer.run()
        assert Calibration.of(load_checkpoint(trainer.folder).info) is None
        return json.loads((trainer.folder / "run.json").read_text())["uncalibrated"]

    (tmp_path / "few").mkdir()
    few = make_trainer(tmp_path / "few", "m3", "training.epochs=1")
    assert reason(few) == "20 validation videos, and it takes 100"
    (tmp_path / "paragraphs").mkdir()
    assert "mart writes paragraphs" in str(
        reason(make_trainer(tmp_path / "paragraphs", "mart", "training.epochs=1"))
    )
    untrained = build_trainer(
        tmp_path / "untrained", "m3", "training.epochs=1", "training.learning_rate=1e-9"
    )
    assert "validation captions" in str(reason(untrained))
    for error in (OSError(28, f"no room in {tmp_path}"), MemoryError(), RuntimeError("out of memory")):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(module, "calibrate", fail)
            assert (
                reason(build_trainer(tmp_path / "fails", "m3", "training.epochs=1")) == type(error).__name__
            )
        shutil.rmtree(tmp_path / "fails")


def test_fit_of_separable_classes_is_finite() -> None:
    x = np.concatenate([np.linspace(-9, -8, 30), np.linspace(8, 900, 30)])
    right = np.arange(60) >= 30
    intercept, (slope,) = fit(x[:, None], right)
    assert math.isfinite(intercept) and slope > 0
    mean, deviation = x.mean(), x.std()
    a, b = intercept + slope * mean, slope * deviation
    # the gradient is zero at the maximum of the likelihood
    residuals = right - 1 / (1 + np.exp(-(a + b * (x - mean) / deviation)))
    assert residuals.sum() == pytest.approx(0, abs=1e-3)
    assert (residuals * (x - mean) / deviation).sum() == pytest.approx(b, abs=1e-2)


def test_unusable_signals_are_reported() -> None:
    x, right = np.arange(60.0), np.arange(60) < 30
    for values, flags, reason in [
        (np.ones(60), right, "the same probability"),
        (np.full(60, np.nan), right, "the same probability"),
        (np.sin(7 * x), x % 2 == 0, "do not separate"),
        (x, np.arange(60) < 9, "9 of 60 validation captions are right"),
        (x, np.arange(60) >= 9, "51 of 60 validation captions are right"),
    ]:
        with pytest.raises(UncalibratedError, match=reason):
            fit(np.column_stack([np.cos(x), values]), flags)


def test_save_info_replaces_the_notes_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", "training.epochs=1")
    trainer.run()
    path = trainer.folder / "best" / CONFIG
    content = path.read_bytes()
    info = load_checkpoint(trainer.folder).info
    save_info(trainer.folder / "best", {**info, "x": "é"})
    assert load_checkpoint(trainer.folder).info == {**info, "x": "é"}
    save_info(trainer.folder / "best", info)
    assert path.read_bytes() == content
    path.write_text("{")
    with pytest.raises(CheckpointError, match="no captioner that can be read"):
        save_info(trainer.folder / "best", info)
