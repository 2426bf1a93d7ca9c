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
from capvid.decoding.decoding_options import DecodingOptions
from capvid.decoding.rescoring import FLAGGED_FROM, Calibration
from capvid.errors import CheckpointError
from capvid.features.feature_store import FeatureStore
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import BOS, EOS
from capvid.training import evaluation as module
from capvid.training.evaluation import UncalibratedError, calibrate, evaluate, fit, generic_captions
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


def stepped(checkpoint: Checkpoint, frames: torch.Tensor, text: str) -> float:
    """Log-probability of a caption of one video, word by word."""
    captioner = checkpoint.captioner
    state = captioner.encode(frames.unsqueeze(0), torch.ones(1, len(frames), dtype=torch.bool))
    total, word = 0.0, BOS
    for following in [*checkpoint.vocabulary.encode(text.split()), EOS]:
        logits, state, _ = captioner.step(torch.tensor([word]), state)
        total += logits[0].double().log_softmax(-1)[following].item()
        word = following
    return total


def measured(made: Trainer) -> tuple[list[float], list[bool]]:
    """Information of each validation video's caption and whether it is generic, one after the other."""
    checkpoint = load_checkpoint(made.folder)
    val = [video for video in made.videos if video.split == "val"]
    reader = FrameReader(made.store)
    frames = {video.id: reader(video.id).float() for video in val}
    average = torch.stack([frame for found in frames.values() for frame in found.flatten(0, -2)]).mean(0)
    still = average.view(1, *[1] * (frames[val[0].id].dim() - 2), -1).expand(1, *frames[val[0].id].shape[1:])
    said = evaluate(checkpoint, val, made.store, made.recipe.decoding).captions
    references = {video.id: list(video.captions) for video in val}
    scorer, labels, xs = CiderD(references), [], []
    for name in frames:
        _, scores = scorer.score(dict.fromkeys(frames, said[name]))
        others = [score for other, score in scores.items() if other != name]
        labels.append(sum(score >= scores[name] for score in others) / len(others) > 0.1)
        with torch.no_grad():
            xs.append(stepped(checkpoint, frames[name], said[name]) - stepped(checkpoint, still, said[name]))
    return xs, labels


def plainly(made: Trainer) -> dict[str, float]:
    """The calibration once more, the curve by gradient descent."""
    xs, labels = measured(made)
    mean = sum(xs) / len(xs)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in xs) / len(xs))
    a = b = 0.0
    for _ in range(4000):
        errors = [
            y - 1 / (1 + math.exp(-(a + b * (x - mean) / deviation))) for x, y in zip(xs, labels, strict=True)
        ]
        a += 0.02 * sum(errors)
        b += 0.02 * (sum(e * (x - mean) / deviation for e, x in zip(errors, xs, strict=True)) - b)
    intercept, slope = a - b * mean / deviation, b / deviation
    flags = [1 / (1 + math.exp(-(intercept + slope * x))) >= FLAGGED_FROM for x in xs]
    flagged = [y for y, flag in zip(labels, flags, strict=True) if flag]
    others = [y for y, flag in zip(labels, flags, strict=True) if not flag]
    return {
        "intercept": intercept,
        "slope": slope,
        "generic": sum(labels) / len(labels),
        "flagged": len(flagged) / len(xs),
        "generic_flagged": sum(flagged) / len(flagged),
        "generic_others": sum(others) / len(others),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epochs"), [("m3", 40), ("soft-attention", 40)])
def test_a_run_is_calibrated_as_if_plainly(tmp_path: Path, name: str, epochs: int) -> None:
    made = run_of(tmp_path, name, "model.standardise=off", f"training.epochs={epochs}")
    made.run()
    found = Calibration.of(load_checkpoint(made.folder).info)
    assert found is not None and found.videos == VIDEOS
    assert len(found.average) == made.store.header.width
    expected = plainly(made)
    assert {key: getattr(found, key) for key in expected} == pytest.approx(expected, rel=2e-3, abs=2e-3)
    assert 0.1 < found.generic < 0.9 and 0 < found.flagged < 1
    assert found.generic_flagged is not None and found.generic_others is not None
    assert found.generic_flagged > found.generic_others + 0.2
    assert json.loads((made.folder / "run.json").read_text())["uncalibrated"] is None
    assert "generic" not in load_checkpoint(made.folder / "last").info


@pytest.mark.slow
def test_maps_are_averaged_over_frames_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run_of(tmp_path, "ham", "training.epochs=30")
    seen = []

    def curve(information: Any, generic: Any) -> tuple[float, float]:
        seen.append((information.tolist(), generic.tolist()))
        return 0.0, -1.0

    monkeypatch.setattr(module, "fit", curve)
    made.run()
    found = Calibration.of(load_checkpoint(made.folder).info)
    reader = FrameReader(made.store)
    val = torch.stack([reader(video.id) for video in made.videos if video.split == "val"])
    assert val.shape == (VIDEOS, 3, 4, 3)
    assert found is not None and found.average == pytest.approx(
        val.double().mean((0, 1, 2)).tolist(), rel=1e-4
    )
    xs, labels = measured(made)
    assert seen[0][0] == pytest.approx(xs, abs=1e-3) and max(map(abs, xs)) > 1
    assert seen[0][1] == labels and 0 < sum(labels) < VIDEOS


@pytest.mark.slow
def test_broken_off_and_resumed_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["training.save_every=0.0", "training.epochs=25"]
    whole = run_of(tmp_path / "whole", "m3", *settings)
    whole.run()
    expected = (whole.folder / "best" / CONFIG).read_bytes()
    assert b'"generic"' in expected
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
    assert b'"generic"' not in best.read_bytes()
    for _ in range(2):  # also that of a run that is over
        run_of(tmp_path / "broken", "m3", *settings, resume=True).run()
        assert best.read_bytes() == expected


@pytest.mark.slow
def test_a_fine_tuned_captioner_is_calibrated_anew(tmp_path: Path) -> None:
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
    ) == (kept.info["generic"] == start.info["generic"])


@pytest.mark.slow
def test_what_cannot_be_calibrated_is_said_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(made: Trainer) -> str | None:
        made.run()
        assert Calibration.of(load_checkpoint(made.folder).info) is None
        return json.loads((made.folder / "run.json").read_text())["uncalibrated"]

    (tmp_path / "few").mkdir()
    few = trainer(tmp_path / "few", "m3", "training.epochs=1")
    assert said(few) == "20 validation videos, and it takes 100"
    (tmp_path / "told").mkdir()
    assert "mart writes paragraphs" in str(said(trainer(tmp_path / "told", "mart", "training.epochs=1")))
    untrained = run_of(tmp_path / "untrained", "m3", "training.epochs=1", "training.learning_rate=1e-9")
    assert str(said(untrained)).endswith(f" of {VIDEOS} validation captions are generic")
    for error in (OSError(28, f"no room in {tmp_path}"), MemoryError(), RuntimeError("out of memory")):

        def fails(*_: Any, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(module, "calibrate", fails)
            assert said(run_of(tmp_path / "fails", "m3", "training.epochs=1")) == type(error).__name__
        shutil.rmtree(tmp_path / "fails")


@pytest.mark.slow
def test_of_many_videos_some_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run_of(tmp_path)
    made.run()
    checkpoint = load_checkpoint(made.folder)
    val = [video for video in made.videos if video.split == "val"]
    monkeypatch.setattr(module, "MIN_VIDEOS", 40)
    every_second = calibrate(checkpoint, val[::2], made.store, DecodingOptions())
    monkeypatch.setattr(module, "MAX_VIDEOS", 60)
    assert calibrate(checkpoint, val, made.store, DecodingOptions()) == every_second


def test_what_counts_as_generic() -> None:
    """Of 21 videos two others may be fitted as well; a third makes a caption generic."""
    spoken = {
        f"v{n}": [f"the {letter} {letter}{letter} runs"] for n, letter in enumerate("abcdefghijklmnopqrstu")
    }
    for name in ("v1", "v2"):
        spoken[name] = spoken["v0"]
    right = {name: captions[0] for name, captions in spoken.items()}
    assert not generic_captions(right, spoken).any()
    spoken["v3"] = right["v3"] = spoken["v0"]
    found = generic_captions({name: str(caption[0]) for name, caption in spoken.items()}, spoken)
    assert found.tolist() == [True] * 4 + [False] * 17
    assert generic_captions(dict.fromkeys(spoken, "something else"), spoken).all()


def test_the_curve_of_kinds_that_do_not_overlap() -> None:
    x = np.concatenate([np.linspace(-9, -8, 30), np.linspace(8, 900, 30)])
    generic = np.arange(60) < 30
    intercept, slope = fit(x, generic)
    assert math.isfinite(intercept) and slope < 0
    mean, deviation = x.mean(), x.std()
    a, b = intercept + slope * mean, slope * deviation
    # the gradient is zero where the likelihood is greatest
    rest = generic - 1 / (1 + np.exp(-(a + b * (x - mean) / deviation)))
    assert rest.sum() == pytest.approx(0, abs=1e-3)
    assert (rest * (x - mean) / deviation).sum() == pytest.approx(b, abs=1e-2)


def test_information_that_tells_nothing() -> None:
    x, generic = np.arange(60.0), np.arange(60) < 30
    for values, flags, reason in [
        (-x, generic, "does not tell"),
        (np.ones(60), generic, "the same information"),
        (np.full(60, np.nan), generic, "the same information"),
        (x, np.arange(60) < 9, "9 of 60 validation captions are generic"),
        (x, np.arange(60) >= 9, "51 of 60 validation captions are generic"),
    ]:
        with pytest.raises(UncalibratedError, match=reason):
            fit(values, flags)


def test_notes_are_written_and_the_rest_stays(tmp_path: Path) -> None:
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
