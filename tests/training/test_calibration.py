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
from test_loop import MAPS, NOUNS, SIZES, TRAINING, VERBS, Silent, trainer
from test_resume import Breaks, BrokenError

from capvid.captioners.checkpoint import CONFIG, WEIGHTS, Checkpoint, load_checkpoint, save_info
from capvid.datasets.dataset import CaptionedVideo
from capvid.datasets.examples import FrameReader
from capvid.decoding.rescoring import NOTE, Calibration
from capvid.errors import CheckpointError
from capvid.features.feature_store import FeatureStore
from capvid.metrics.cider import CiderD
from capvid.output.results import UNSURE_BELOW
from capvid.text.vocabulary import BOS, EOS
from capvid.training import evaluation as module
from capvid.training.evaluation import UncalibratedError, calibrate, evaluate, fit
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

VIDEOS = 120


def run_of(folder: Path, name: str = "m3", *settings: str, **options: Any) -> Trainer:
    """A run of twenty videos to learn from, and many to validate on, half of them hardly like any."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(20, 3, 12, generator=generator)
    videos, tensors = [], {}
    for n in range(20 + VIDEOS):
        which, split = n % 20, "train" if n < 20 else "val"
        clear = 1.0 if n < 20 or n // 20 % 2 else 0.2
        frames = clear * patterns[which] + 0.3 * torch.randn(3, 12, generator=generator)
        caption = f"a {NOUNS[which % 5]} {VERBS[which // 5]}"
        videos.append(CaptionedVideo(f"{split}{n}", split, (caption,)))
        tensors[f"{split}{n}"] = frames.view(3, 4, 3).clone() if name in MAPS else frames.clone()
    save_file(tensors, folder / "features.safetensors")
    sizes = [f"model.{option}={value}" for option, value in SIZES[name].items()]
    return Trainer(
        load_recipe(
            f"{name}-small", [*TRAINING, *sizes, "training.epochs=25", "training.patience=99", *settings]
        ),
        videos=videos,
        store=FeatureStore([folder / "features.safetensors"]),
        folder=folder / "run",
        device=torch.device("cpu"),
        **{"reporter": Silent(), **options},
    )


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


def slow_signals(made: Trainer) -> tuple[list[tuple[float, float]], list[bool]]:
    """Compute both signals of each validation video's caption, and whether it is right, one by one."""
    checkpoint = load_checkpoint(made.folder)
    val = [video for video in made.videos if video.split == "val"]
    reader = FrameReader(made.store)
    frames = {video.id: reader(video.id).float() for video in val}
    average = torch.stack([vector for each in frames.values() for vector in each.flatten(0, -2)]).mean(0)
    shape = frames[val[0].id].shape
    still = average.view(1, *[1] * (len(shape) - 2), -1).expand(1, *shape[1:])
    captions = evaluate(checkpoint, val, made.store, made.recipe.decoding).captions
    _, scores = CiderD({video.id: list(video.captions) for video in val}).score(captions)
    signals = []
    for name, caption in captions.items():
        with torch.no_grad():
            logprob = stepwise_logprob(checkpoint, frames[name], caption)
            average_logprob = stepwise_logprob(checkpoint, still, caption)
        signals.append((logprob / (len(caption.split()) + 1), logprob - average_logprob))
    return signals, [scores[name] >= module.RIGHT_FROM for name in captions]


def slow_calibration(made: Trainer) -> dict[str, float]:
    """Calibrate once more, the curve by gradient ascent in plain Python."""
    rows, labels = slow_signals(made)
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
    flagged = [label for label, c in zip(labels, confidences, strict=True) if c < UNSURE_BELOW]
    others = [label for label, c in zip(labels, confidences, strict=True) if c >= UNSURE_BELOW]
    return {
        "intercept": intercept,
        "per_logprob": slopes[0],
        "per_information": slopes[1],
        "right": sum(labels) / count,
        "flagged": len(flagged) / count,
        "right_flagged": sum(flagged) / max(1, len(flagged)),
        "right_others": sum(others) / max(1, len(others)),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epochs"), [("m3", 40), ("soft-attention", 40)])
def test_calibration_equals_a_slow_recomputation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, epochs: int
) -> None:
    monkeypatch.setattr(module, "RIGHT_FROM", 8.0)  # captions without a mistake
    made = run_of(tmp_path, name, "model.standardise=off", f"training.epochs={epochs}")
    made.run()
    calibration = Calibration.of(load_checkpoint(made.folder).info)
    assert calibration is not None and calibration.videos == VIDEOS
    assert len(calibration.average) == made.store.header.width
    expected = slow_calibration(made)
    actual = {key: getattr(calibration, key) for key in expected}
    assert actual == pytest.approx(expected, rel=1e-2, abs=1e-2)
    assert 0.1 < calibration.right < 0.9 and 0 < calibration.flagged < 1
    assert calibration.right_flagged is not None and calibration.right_others is not None
    assert calibration.right_others > calibration.right_flagged + 0.2
    assert json.loads((made.folder / "run.json").read_text())["uncalibrated"] is None
    assert NOTE not in load_checkpoint(made.folder / "last").info


@pytest.mark.slow
def test_maps_are_averaged_over_frames_and_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run_of(tmp_path, "ham", "training.epochs=30")
    calls = []

    def curve(signals: Any, right: Any) -> tuple[float, list[float]]:
        calls.append((signals.tolist(), right.tolist()))
        return 0.0, [1.0, 1.0]

    monkeypatch.setattr(module, "fit", curve)
    made.run()
    calibration = Calibration.of(load_checkpoint(made.folder).info)
    reader = FrameReader(made.store)
    val = torch.stack([reader(video.id) for video in made.videos if video.split == "val"])
    assert val.shape == (VIDEOS, 3, 4, 3)
    mean = val.double().mean((0, 1, 2)).tolist()
    assert calibration is not None and calibration.average == pytest.approx(mean, rel=1e-4)
    signals, labels = slow_signals(made)
    assert calls[0][0] == [pytest.approx(row, abs=1e-3) for row in signals]
    assert calls[0][1] == labels and 0 < sum(labels) < VIDEOS


@pytest.mark.slow
def test_resumed_run_has_the_same_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["training.save_every=0.0", "training.epochs=25"]
    whole = run_of(tmp_path / "whole", "m3", *settings)
    whole.run()
    expected = (whole.folder / "best" / CONFIG).read_bytes()
    assert b'"confidence"' in expected
    with pytest.raises(BrokenError):
        run_of(tmp_path / "broken", "m3", *settings, reporter=Breaks(33)).run()
    again = run_of(tmp_path / "broken", "m3", *settings, resume=True)

    def broken(*_: Any) -> None:
        raise BrokenError

    with monkeypatch.context() as patch:  # broken off a second time, between training and calibration
        patch.setattr(module, "save_info", broken)
        with pytest.raises(BrokenError):
            again.run()
    best = again.folder / "best" / CONFIG
    assert b'"confidence"' not in best.read_bytes()
    for _ in range(2):  # also that of a run that is over
        run_of(tmp_path / "broken", "m3", *settings, resume=True).run()
        assert best.read_bytes() == expected


@pytest.mark.slow
def test_fine_tuned_captioner_is_calibrated_anew(tmp_path: Path) -> None:
    before = run_of(tmp_path, "m3", "training.epochs=15", "training.average=0.0")
    before.run()
    start = load_checkpoint(before.folder)
    settings = ["epochs=2", "learning_rate=2e-3", "samples=4", "batch_size=10"]
    made = Trainer(
        replace(
            load_recipe("m3-small", [*TRAINING, *(f"self_critical.{setting}" for setting in settings)]),
            model=before.recipe.model,
        ),
        start=start,
        videos=before.videos,
        store=before.store,
        folder=tmp_path / "fine",
        device=before.device,
        reporter=Silent(),
    )
    made.run()
    kept = load_checkpoint(made.folder)
    val = [video for video in made.videos if video.split == "val"]
    assert Calibration.of(kept.info) == calibrate(kept, val, made.store, made.recipe.decoding)
    assert (
        (made.folder / "best" / WEIGHTS).read_bytes() == (before.folder / "best" / WEIGHTS).read_bytes()
    ) == (kept.info[NOTE] == start.info[NOTE])


@pytest.mark.slow
def test_run_without_calibration_records_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(made: Trainer) -> str | None:
        made.run()
        assert Calibration.of(load_checkpoint(made.folder).info) is None
        return json.loads((made.folder / "run.json").read_text())["uncalibrated"]

    (tmp_path / "few").mkdir()
    few = trainer(tmp_path / "few", "m3", "training.epochs=1")
    assert reason(few) == "20 validation videos, and it takes 100"
    (tmp_path / "paragraphs").mkdir()
    assert "mart writes paragraphs" in str(
        reason(trainer(tmp_path / "paragraphs", "mart", "training.epochs=1"))
    )
    untrained = run_of(tmp_path / "untrained", "m3", "training.epochs=1", "training.learning_rate=1e-9")
    assert "validation captions" in str(reason(untrained))
    for error in (OSError(28, f"no room in {tmp_path}"), MemoryError(), RuntimeError("out of memory")):

        def fails(*_: Any, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(module, "calibrate", fails)
            assert reason(run_of(tmp_path / "fails", "m3", "training.epochs=1")) == type(error).__name__
        shutil.rmtree(tmp_path / "fails")


def test_fit_of_separable_classes_is_finite() -> None:
    x = np.concatenate([np.linspace(-9, -8, 30), np.linspace(8, 900, 30)])
    right = np.arange(60) >= 30
    intercept, (slope,) = fit(x[:, None], right)
    assert math.isfinite(intercept) and slope > 0
    mean, deviation = x.mean(), x.std()
    a, b = intercept + slope * mean, slope * deviation
    # the gradient is zero where the likelihood is greatest
    rest = right - 1 / (1 + np.exp(-(a + b * (x - mean) / deviation)))
    assert rest.sum() == pytest.approx(0, abs=1e-3)
    assert (rest * (x - mean) / deviation).sum() == pytest.approx(b, abs=1e-2)


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
    made = trainer(tmp_path, "m3", "training.epochs=1")
    made.run()
    path = made.folder / "best" / CONFIG
    before = path.read_bytes()
    info = load_checkpoint(made.folder).info
    save_info(made.folder / "best", {**info, "x": "é"})
    assert load_checkpoint(made.folder).info == {**info, "x": "é"}
    save_info(made.folder / "best", info)
    assert path.read_bytes() == before
    path.write_text("{")
    with pytest.raises(CheckpointError, match="no captioner that can be read"):
        save_info(made.folder / "best", info)
