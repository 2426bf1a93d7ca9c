"""Training runs: from a recipe, data and features to a trained captioner in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from capvid.captioners.checkpoint import load_checkpoint
from capvid.checkpoints.publishing import CARD, model_card
from capvid.datasets.dataset import CaptionedVideo
from capvid.datasets.loading import load_data
from capvid.features.feature_store import FeatureStore
from capvid.training import run_folder
from capvid.training.optimization import (
    accelerator_on,
    device_of,
    processes,
)
from capvid.training.recipe import Recipe, load_recipe
from capvid.training.reporters import EVENTS, Events, Reporter, Reporters
from capvid.training.trainer import Trainer
from capvid.utils.device import resolve_device
from capvid.utils.files import atomic_write_text


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training run gave.

    Attributes:
        folder: the run folder; ``capvid.load(folder)`` loads its best checkpoint.
        epoch: the best epoch, from 1; 0 where fine-tuning improved nothing.
        val_cider: CIDEr-D of that epoch on the validation split, as a fraction.
        scores: scores on the test split by metric, as fractions; empty without a test split.
        captions: captions of the test split by video id; a list of sentences for paragraphs.
        trials: finished trials of a hyper-parameter search.
    """

    folder: Path
    epoch: int
    val_cider: float
    scores: Mapping[str, float] = field(default_factory=dict)
    captions: Mapping[str, Any] = field(default_factory=dict)
    trials: Sequence[Any] = ()


def train(
    recipe: str | Path | Recipe,
    data: Sequence[str | CaptionedVideo],
    features: Sequence[str | Path],
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
        data: dataset specs such as ``jsonl:captions.jsonl``, or videos that are loaded already.
        features: feature folders and packed feature files; streams of the same videos are concatenated.
        output: run folder.
        settings: changes to a recipe that is named, such as ``training.epochs=20``.
        values: features that are the values of a key-value memory, while ``features`` are its keys.
        weights: weights of the backbones to copy into the run: a file, or their folder.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        self_critical: run whose captioner is fine-tuned on CIDEr-D.
        search: number of trials with values drawn from the recipe's ranges; the best becomes the run.
        resume: continue the run in ``output``, if there is one.
        overwrite: replace the run in ``output``.
        skip_bad: leave out unusable rows of the data.
        reporter: receives every batch and epoch; with ``search``, also every
            trial (:class:`~capvid.training.hyperparameter_search.SearchReporter`).
        note: receives one line about each kind of data that is left out.

    Raises:
        UsageError: arguments that exclude each other, or a run in ``output``.
        DataError: data or features that cannot be trained on.
        TrainingError: the loss is not finite, or memory or disk are full; what was saved is kept.
    """
    from capvid.training.hyperparameter_search import Search, check_search, forget_search
    from capvid.training.self_critical import SelfCriticalTrainer

    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe), settings)
    folder = Path(output)
    run_folder.check_free(folder, resume=resume, overwrite=overwrite)
    check_search(chosen, search, folder=folder, self_critical=self_critical is not None, resume=resume)
    with run_folder.locked_run(folder):
        accelerator = accelerator_on(resolve_device(device))
        target, main = device_of(accelerator, resolve_device(device)), accelerator.is_main_process
        videos = [video for video in data if isinstance(video, CaptionedVideo)]
        if specs := [spec for spec in data if isinstance(spec, str)]:
            loaded = load_data(specs, skip_bad=skip_bad)
            videos += loaded.videos
            for line in loaded.notes:
                note(line)
            if loaded.skipped:
                rows = (
                    "1 row of the data is" if len(loaded.skipped) == 1 else f"{len(loaded.skipped)} rows are"
                )
                note(f"{rows} left out ({loaded.skipped[0]})")
        store = FeatureStore([*map(str, features), *map(str, values)])
        if store.incomplete and chosen.data.views:
            count = len(store.incomplete)
            views = "1 view lacks a stream and is" if count == 1 else f"{count} views lack a stream and are"
            note(f"{views} left out ({store.incomplete[0]})")
        if weights is not None and main:
            run_folder.copy_weights(Path(weights), store.header, folder)
        options: dict[str, Any] = {
            "videos": videos,
            "store": store,
            "value_width": FeatureStore(list(map(str, values))).header.width if values else 0,
            "device": target,
        }

        def make(drawn: Recipe, *, folder: Path, reporter: Reporter, **rest: Any) -> Trainer:
            told = Reporters(reporter, Events(folder / EVENTS))
            return Trainer(drawn, folder=folder, reporter=told, **{**options, **rest})

        heard = Reporters() if reporter is None or not main else Reporters(reporter)
        trials: Sequence[Any] = ()
        if search is not None:
            trial_runs = Search(
                chosen,
                trials=search,
                videos=videos,
                store=store,
                folder=folder,
                make=make,
                reporter=heard,
                resume=resume,
            )
            best_trial, test = trial_runs.run()
            trials = trial_runs.finished
            epoch, cider = cast(int, best_trial.epoch), cast(float, best_trial.val_cider)
        else:
            with Events(folder / EVENTS) as events:
                options |= {"reporter": Reporters(heard, events) if main else heard}
                options |= {"folder": folder, "resume": resume}
                if self_critical is None:
                    trainer = Trainer(chosen, **options)
                else:
                    start = load_checkpoint(Path(self_critical))
                    trainer = SelfCriticalTrainer(chosen, start=start, **options)
                if overwrite and main:
                    forget_search(folder)
                result, test = trainer.run()
            epoch, cider = result.epoch, result.cider
        if main:
            atomic_write_text(folder / CARD, model_card(folder))
    if processes() > 1:
        accelerator.end_training()
    return TrainingResult(
        folder=folder,
        epoch=epoch,
        val_cider=cider,
        scores=test.scores if test else {},
        captions=test.captions if test else {},
        trials=trials,
    )
