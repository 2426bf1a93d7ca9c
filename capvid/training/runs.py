"""Training runs: from a recipe, data and features to a trained captioner in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from capvid.captioners.checkpoint import load_checkpoint
from capvid.checkpoints.publishing import CARD, load_run, model_card
from capvid.datasets.dataset import CaptionedVideo, load_data, parse_spec
from capvid.features.feature_store import FeatureStore
from capvid.training import run_folder
from capvid.training.optimization import accelerate_on
from capvid.training.recipe import Recipe, load_recipe
from capvid.training.reporters import EVENTS, Events, Reporter, Reporters
from capvid.training.trainer import Trainer
from capvid.utils.device import resolve_device
from capvid.utils.files import atomic_write_text
from capvid.video.frame_sampling import UniformSampling, parse_sampling

Extract = Callable[
    [Sequence[CaptionedVideo], Accelerator, torch.device],
    tuple[Sequence[CaptionedVideo], Sequence[str | Path]],
]


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Result of a training run.

    Attributes:
        folder: run folder; ``capvid.load(folder)`` loads its best checkpoint.
        epoch: best epoch, from 1; 0 if fine-tuning improved nothing.
        val_cider: CIDEr-D of that epoch on the validation split, as a fraction.
        epochs: records of the epochs, as in ``metrics.jsonl``; in the first process only, as the scores.
        scores: scores on the test split by metric, as fractions; empty without a test split.
        captions: captions of the test split by video id; a list of sentences for paragraphs.
        trials: finished trials of a hyper-parameter search, as Optuna keeps them; ``value`` is their CIDEr-D.
    """

    folder: Path
    epoch: int
    val_cider: float
    epochs: Sequence[Mapping[str, Any]] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    captions: Mapping[str, Any] = field(default_factory=dict)
    trials: Sequence[Any] = ()


def train(
    recipe: str | Path | Recipe,
    data: Sequence[str | CaptionedVideo],
    features: Sequence[str | Path] | Extract,
    output: str | Path,
    *,
    settings: Sequence[str] = (),
    values: Sequence[str | Path] = (),
    weights: str | Path | None = None,
    device: str = "auto",
    self_critical: str | Path | None = None,
    search: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    skip_bad: bool = False,
    reporter: Reporter | None = None,
    note: Callable[[str], object] = lambda line: None,
) -> TrainingResult:
    """Train a captioner on features and captions; the best checkpoint is in ``output / "best"``.

    Args:
        recipe: name of a recipe, path of a ``.toml`` file, or a loaded recipe.
        data: dataset specs such as ``jsonl:captions.jsonl``, or loaded videos.
        features: feature folders and packed feature files; streams of the same videos are concatenated. Or a
            function that extracts them: called with the dataset, the processes and the device, it returns the
            videos to train on and these paths.
        output: run folder.
        settings: changes to a recipe given by name or path, such as ``training.epochs=20``.
        values: features that are the values of a key-value memory, while ``features`` are its keys.
        weights: weights of the backbones to copy into the run: a file, or their folder.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        self_critical: run whose captioner to fine-tune on CIDEr-D.
        search: number of trials with values drawn from the recipe's search space; the best becomes the run.
        resume: continue the run in ``output``, if there is one.
        overwrite: replace the run in ``output``.
        skip_bad: leave out unusable rows of the data.
        reporter: receives every batch, epoch and trial.
        note: receives one line about each kind of data that is left out, or is not what the recipe expects.

    Raises:
        UsageError: arguments that exclude each other, or a run in ``output``.
        DataError: data or features that cannot be trained on.
        TrainingError: the loss is not finite, or memory or disk are full; what was saved is kept.
    """
    from capvid.training.hyperparameter_search import Search, check_search, forget_search

    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe), settings)
    folder = Path(output)
    specs = [spec for spec in data if isinstance(spec, str)]
    read = [path for path in (weights, self_critical) if path is not None]
    read += [recipe] if isinstance(recipe, str | Path) else []
    read += [] if callable(features) else features
    run_folder.check_inputs(folder, [*read, *values, *(parse_spec(spec)[1] for spec in specs)])
    with run_folder.locked_run(folder):
        run_folder.check_free(folder, resume=resume, overwrite=overwrite)
        check_search(search, folder=folder, self_critical=self_critical is not None, resume=resume)
        accelerator, target = accelerate_on(resolve_device(device))
        main = accelerator.is_main_process
        if not main:
            reporter, note = None, lambda line: None
        videos = [video for video in data if isinstance(video, CaptionedVideo)]
        if specs:
            loaded = load_data(specs, skip_bad=skip_bad)
            videos += loaded.videos
            for line in loaded.notes:
                note(line)
            if loaded.skipped:
                first, *others = loaded.skipped
                rows = f"{1 + len(others)} rows are" if others else "1 row of the data is"
                note(f"{rows} left out ({first}); see capvid data check")
        used, paths = features(videos, accelerator, target) if callable(features) else (videos, features)
        store = FeatureStore([*map(str, paths), *map(str, values)])
        if store.incomplete and chosen.data.views:
            count = len(store.incomplete)
            views = "1 view lacks a stream and is" if count == 1 else f"{count} views lack a stream and are"
            note(f"{views} left out ({store.incomplete[0]})")
        if weights is not None and main:
            run_folder.copy_weights(Path(weights), store.header, folder)
        if line := sampling_mismatch(chosen.data.sampling, store, used):
            note(line)
        width = FeatureStore(list(map(str, values))).header.width if values else 0
        common: dict[str, Any] = {"videos": used, "store": store, "folder": folder, "resume": resume}
        trials: Sequence[Any] = ()

        def make(recipe: Recipe, *, folder: Path, reporter: Reporter, **options: Any) -> Trainer:
            both = Reporters(reporter, Events(folder / EVENTS)) if main else reporter
            return Trainer(recipe, folder=folder, reporter=both, device=target, value_width=width, **options)

        if search is not None:
            study = Search(chosen, trials=search, make=make, reporter=reporter or Reporter(), **common)
            best_trial, test = study.run()
            epoch, cider, trials = best_trial.user_attrs["epoch"], best_trial.value or 0.0, study.finished
        else:
            start = load_checkpoint(Path(self_critical)) if self_critical else None
            trainer = make(chosen, reporter=reporter or Reporter(), start=start, **common)
            if overwrite and main:
                forget_search(folder)
            best, test = trainer.run()
            epoch, cider = best.epoch, best.cider
        epochs: Sequence[Mapping[str, Any]] = ()
        if main:
            run = load_run(folder)
            epochs = run.epochs
            atomic_write_text(folder / CARD, model_card(run))
    if accelerator.num_processes > 1:
        accelerator.end_training()
    return TrainingResult(
        folder=folder,
        epoch=epoch,
        val_cider=cider,
        epochs=epochs,
        scores=test.scores if test else {},
        captions=test.captions if test else {},
        trials=trials,
    )


def sampling_mismatch(expected: str, store: FeatureStore, videos: Sequence[CaptionedVideo]) -> str:
    """Return in which way the features of ``videos`` lack frames of the ``expected`` sampling, if they do."""
    if not expected or store.header.sampling == expected:
        return ""
    sampling, actual = parse_sampling(expected), ""
    if isinstance(sampling, UniformSampling):
        longest = max((store.length(video.id) for video in videos if video.id in store), default=0)
        if longest < sampling.num_frames:
            actual = f"at most {longest} frames per video"
    elif store.header.sampling is not None:
        actual = f"frames sampled by {store.header.sampling}"
    if not actual:
        return ""
    return f"the features have {actual}; the recipe expects capvid extract --sampling {expected}"
