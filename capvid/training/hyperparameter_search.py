"""Random search for hyper-parameters (Bergstra and Bengio, JMLR 13, 2012), with values drawn by Optuna.

Each trial is a training run in ``trials/NNN`` of the run folder. Trials are compared by CIDEr-D on the
validation split; only the best is scored on the test split. A killed search resumes after its finished
trials, from the state of the interrupted one.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from capvid.captioners.base import CAPTIONERS, build
from capvid.captioners.checkpoint import CONFIG, WEIGHTS
from capvid.datasets.dataset import CaptionedVideo
from capvid.datasets.examples import check_features
from capvid.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    TrainingError,
    TrainingMemoryError,
    UsageError,
)
from capvid.features.feature_store import FeatureStore, views_of
from capvid.training.evaluation import Evaluation, evaluate_run
from capvid.training.optimization import processes
from capvid.training.recipe import Range, Recipe, Space
from capvid.training.reporters import EVENTS, Reporter
from capvid.training.run_folder import FEATURES, RUN, STATE, VOCABULARY
from capvid.training.tasks import task_of
from capvid.training.trainer import LAST, Trainer, is_out_of_memory
from capvid.utils.device import release_memory
from capvid.utils.files import atomic_path, atomic_write_text

SEARCH = "search.json"  # what tells a search from others
FINISHED = "search.jsonl"  # a line for each finished trial
TRIALS = "trials"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A finished trial, as in its line of ``search.jsonl``.

    Attributes:
        number: from 1.
        values: drawn values by ``section.option``.
        status: done or failed.
        val_cider: CIDEr-D of the best epoch on the validation split; None if it failed.
        epoch: best epoch.
        seconds: duration.
        cause: reason for the failure.
    """

    number: int
    values: dict[str, Any]
    status: str
    val_cider: float | None
    epoch: int | None
    seconds: float
    cause: str | None


class SearchReporter(Reporter, Protocol):
    """Follows the search, and the training of each trial."""

    def started_trial(self, number: int, recipe: Recipe) -> None:
        """Called when a trial begins or resumes, with its values in the recipe."""

    def finished_trial(self, trial: Trial, *, best: bool) -> None:
        """Called when a trial is finished and recorded; ``best`` if none before was better."""


class Search:
    """Trains with values drawn from a recipe's ranges and makes the best trial the run.

    The folder gets ``search.json``, ``search.jsonl``, a run per trial in ``trials`` and, in the end, the
    files of the best run. States of finished trials are removed.

    Args:
        recipe: recipe with a section ``search``; its seed is also that of the values.
        trials: number of trials; a search that is resumed may have more than before.
        videos: the dataset; train and val are needed.
        store: features of all of them.
        folder: run folder.
        make: returns the trainer of a recipe; takes what :class:`Trainer` takes but device and value width.
        reporter: receives trials, batches and epochs.
        resume: continue the search in the folder, if there is one.

    Raises:
        CheckpointError: the search in the folder is damaged, or of another recipe, ranges or data.
        DataError: videos have no features, or not what the captioner writes.
        UsageError: the recipe has no ranges, or values were drawn that do not go together.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        trials: int,
        videos: Sequence[CaptionedVideo],
        store: FeatureStore,
        folder: Path,
        make: Callable[..., Trainer],
        reporter: SearchReporter,
        resume: bool = False,
    ) -> None:
        check_ranges(recipe)
        self.recipe, self.videos, self.store, self.folder = recipe, videos, store, folder
        self.make, self.reporter = make, reporter
        task_of(CAPTIONERS[recipe.captioner], recipe.data).check(videos, recipe.captioner)
        check_features(videos, store)
        seed, numbers = recipe.training.seed, range(1, trials + 1)
        self.drawn = {number: draw(recipe.search, seed=seed, number=number) for number in numbers}
        for number, values in self.drawn.items():
            self._check(number, values)
        self.resumes = resume and (folder / SEARCH).is_file()
        self.finished = self._load() if self.resumes else []

    @property
    def best(self) -> Trial | None:
        """The finished trial with the highest CIDEr-D, the first of several."""
        done = [trial for trial in self.finished if trial.val_cider is not None]
        return max(done, key=lambda trial: (trial.val_cider, -trial.number), default=None)

    def run(self) -> tuple[Trial, Evaluation | None]:
        """Run the remaining trials; return the best, and its scores on the test split if there is one.

        Raises:
            TrainingError: all trials failed.
        """
        if not self.resumes:
            forget_search(self.folder)
            atomic_write_text(self.folder / SEARCH, json.dumps(self._note(), indent=1))
        over = {trial.number for trial in self.finished}
        for number, values in self.drawn.items():
            if number not in over:
                self._record(self._run_trial(number, values))
        best = self.best
        if best is None:
            first = self.finished[0]
            raise TrainingError(
                f"all {len(self.finished)} trials failed; trial {first.number}: {first.cause}",
                remedy="change the ranges of the search and begin anew with --overwrite",
            )
        self._take_over(self._trial_folder(best.number))
        test = [video for video in self.videos if video.split == "test"]
        if not test:
            return best, None
        return best, evaluate_run(self.folder, test, self.store, filled(self.recipe, best.values).decoding)

    def _run_trial(self, number: int, values: dict[str, Any]) -> Trial:
        """Train to the end, or continue an interrupted trial.

        A loss that is not finite, too little memory, and data options that leave nothing to learn from are
        failures of the trial.
        """
        recipe, folder = filled(self.recipe, values), self._trial_folder(number)
        self.reporter.started_trial(number, recipe)
        log, before = folder / "metrics.jsonl", 0.0
        if log.is_file():
            before = sum(json.loads(row)["seconds"] for row in log.read_text(encoding="utf-8").splitlines())
        start = time.monotonic()
        best, cause = None, None
        try:
            best, _ = self.make(
                recipe,
                videos=[video for video in self.videos if video.split != "test"],
                store=self.store,
                folder=folder,
                reporter=self.reporter,
                views=views_of([video.id for video in self.videos], self.store.ids()),
                resume=(folder / "recipe.json").is_file(),
            ).run()
        except (DivergedError, TrainingMemoryError, DataError) as error:
            if isinstance(error, DataError) and not any(name.startswith("data.") for name in values):
                raise
            cause = error.message
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            cause = "out of memory"
        gc.collect()  # optimizer and schedule refer to each other
        release_memory()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return Trial(
            number=number,
            values=values,
            status="done" if best else "failed",
            val_cider=best.cider if best else None,
            epoch=best.epoch if best else None,
            seconds=round(before + time.monotonic() - start, 3),
            cause=cause,
        )

    def _record(self, trial: Trial) -> None:
        """Write the trial down, and remove states that nothing resumes from any more."""
        self.finished.append(trial)
        lines = [json.dumps(asdict(finished), ensure_ascii=False) for finished in self.finished]
        atomic_write_text(self.folder / FINISHED, "\n".join(lines) + "\n")
        for finished in self.finished:
            (self._trial_folder(finished.number) / LAST / STATE).unlink(missing_ok=True)
        self.reporter.finished_trial(trial, best=trial is self.best)

    def _take_over(self, trial: Path) -> None:
        """Copy the trial's run into the run folder; the configuration comes last."""
        for name in (f"best/{CONFIG}", f"{LAST}/{CONFIG}", f"{LAST}/{STATE}", "test.json"):
            (self.folder / name).unlink(missing_ok=True)
        checkpoints = [f"{name}/{file}" for name in (LAST, "best") for file in (WEIGHTS, CONFIG)]
        records = ["recipe.json", "metrics.jsonl", RUN, VOCABULARY, FEATURES]
        events = self.folder / EVENTS
        shutil.rmtree(events, ignore_errors=True)
        records += [f"{EVENTS}/{path.name}" for path in (trial / EVENTS).glob("*")]
        for name in (*records, *checkpoints):
            with atomic_path(self.folder / name) as temporary:
                shutil.copyfile(trial / name, temporary)

    def _trial_folder(self, number: int) -> Path:
        return self.folder / TRIALS / f"{number:03d}"

    def _check(self, number: int, values: dict[str, Any]) -> None:
        """Raise UsageError unless the captioner can be built with the drawn values."""
        header = self.store.header
        sizes = {"vocabulary_size": 5, "feature_width": header.width, "locations": header.locations}
        try:
            with torch.device("meta"):  # without memory for its weights
                build(self.recipe.captioner, {**sizes, **filled(self.recipe, values).model})
        except UsageError as error:
            drawn = ", ".join(f"{name} = {value}" for name, value in values.items())
            raise UsageError(f"trial {number} ({drawn}): {error.message}", remedy=error.remedy) from error

    def _note(self) -> dict[str, Any]:
        """Return what a search that is resumed must agree with."""
        space = self.recipe.search
        seen = [self.store.header.to_json(), *map(repr, self.videos)]
        return {
            "format": _FORMAT,
            "recipe": self.recipe.to_dict(),
            "ranges": {k: asdict(r) if isinstance(r, Range) else list(r) for k, r in space.items()},
            "data": hashlib.sha256("\n".join(seen).encode()).hexdigest(),
        }

    def _load(self) -> list[Trial]:
        """Return the finished trials of the search in the folder.

        Raises:
            CheckpointError: it is damaged, or another search.
        """
        path, lines = self.folder / SEARCH, self.folder / FINISHED
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            for name, value in self._note().items():
                if note[name] != json.loads(json.dumps(value)):
                    raise CheckpointError(
                        f"{path}: a search with another {name}",
                        remedy=f"give the {name} that it was begun with, or begin anew with --overwrite",
                    )
            path = lines
            text = lines.read_text(encoding="utf-8") if lines.is_file() else ""
            return [Trial(**json.loads(line)) for line in text.splitlines()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{path}: damaged, no search to resume ({reason})", remedy="begin anew with --overwrite"
            ) from error


def check_ranges(recipe: Recipe) -> None:
    """Raise UsageError if there is nothing to draw."""
    if not recipe.search:
        raise UsageError(
            f"{recipe.name}: the recipe has no ranges to search",
            remedy="write a section search, or --set 'search.training.learning_rate=[1e-3,2e-3]', say",
        )


def check_search(
    recipe: Recipe, trials: int | None, *, folder: Path, self_critical: bool, resume: bool
) -> None:
    """Raise UsageError unless the options of a search go together, and with what is in the folder."""
    searched = (folder / SEARCH).exists()
    if trials is None:
        if resume and searched:
            raise UsageError(f"{folder}: holds a search", remedy="give --search N to go on with it")
        return
    if processes() > 1:
        raise UsageError("--search trains in one process", remedy="start it without accelerate launch")
    if self_critical:
        raise UsageError("--search and --self-critical exclude each other", remedy="give one of them")
    check_ranges(recipe)
    if resume and not searched and any((folder / name).exists() for name in ("best", "last")):
        raise UsageError(
            f"{folder}: holds a training run that is no search",
            remedy="leave out --search, or choose another -o",
        )


def filled(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """Return the recipe with ``values``, by ``section.option``, and nothing left to search.

    Raises:
        UsageError: values of the section ``decoding`` that do not go together.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, option = name.partition(".")
        sections.setdefault(section, {})[option] = value
    model = {**recipe.model, **sections.pop("model", {})}
    others: dict[str, Any] = {
        section: replace(getattr(recipe, section), **options) for section, options in sections.items()
    }
    return replace(recipe, model=model, search={}, **others)


def forget_search(folder: Path) -> None:
    """Remove the search in the folder, and its trials; a run in the folder stays."""
    for name in (SEARCH, FINISHED):
        (folder / name).unlink(missing_ok=True)
    for trial in (folder / TRIALS).glob("[0-9]*"):
        if trial.name.isdecimal() and (trial / "recipe.json").is_file():
            shutil.rmtree(trial)
    with suppress(OSError):  # it is not there, or holds something else
        (folder / TRIALS).rmdir()


def draw(space: Space, *, seed: int, number: int) -> dict[str, Any]:
    """Return the values of trial ``number``, by ``section.option``; they depend on seed and number alone.

    Values of continuous ranges are rounded to four significant digits.
    """
    import numpy as np
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distributions: dict[str, Any] = {}
    for name, values in sorted(space.items()):
        if not isinstance(values, Range):
            distributions[name] = CategoricalDistribution(values)
        elif isinstance(values.low, int):
            low, high, step = values.low, int(values.high), int(values.step or 1)
            distributions[name] = IntDistribution(low, high, log=values.log, step=step)
        else:
            distributions[name] = FloatDistribution(values.low, values.high, log=values.log, step=values.step)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        sampler = optuna.samplers.RandomSampler(
            seed=int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        )
        drawn = optuna.create_study(sampler=sampler).ask(distributions).params
    finally:
        optuna.logging.set_verbosity(verbosity)
    for name, values in space.items():
        if isinstance(values, Range) and not isinstance(drawn[name], int):
            digits = 4 if values.step is None else 12  # 12: 0.30000000000000004 is 0.3
            drawn[name] = min(max(float(f"{drawn[name]:.{digits}g}"), values.low), values.high)
    return {name: drawn[name] for name in space}
