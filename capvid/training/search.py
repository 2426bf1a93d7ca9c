"""Random search for hyper-parameters: trials by values drawn from a recipe's ranges; the best wins.

Bergstra and Bengio, Random Search for Hyper-Parameter Optimization, JMLR 13, 2012. Each trial is a training
run of its own, in ``trials/NNN`` of the run folder, and is compared by CIDEr-D on the validation split; the
test split is seen by the winner alone. A search that is killed goes on from what it has finished and from the
state of the trial that was broken off.
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

from capvid.captioners import build, captioner_class
from capvid.captioners.checkpoint import CONFIG, WEIGHTS
from capvid.data.captions import CaptionedVideo
from capvid.data.examples import check_features
from capvid.device import release_memory
from capvid.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    TrainingError,
    TrainingMemoryError,
    UsageError,
)
from capvid.features.store import FeatureStore
from capvid.features.views import views_of
from capvid.files import atomic_path, atomic_write_text
from capvid.training.evaluate import Evaluation, evaluate_run
from capvid.training.events import EVENTS
from capvid.training.failures import is_out_of_memory
from capvid.training.loop import LAST, Trainer
from capvid.training.progress import EpochResult, Reporter
from capvid.training.provenance import FEATURES, RUN, VOCABULARY
from capvid.training.ranges import draw, space_to_dict
from capvid.training.recipe import Recipe
from capvid.training.state import STATE
from capvid.training.tasks import task_of

SEARCH = "search.json"  # what tells a search from others
FINISHED = "search.jsonl"  # a line for each finished trial
TRIALS = "trials"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A finished trial, as its line in ``search.jsonl`` has it.

    Attributes:
        number: from 1.
        values: that were drawn, by ``section.option``.
        status: done or failed.
        val_cider: CIDEr-D of its best epoch on the validation split; None if it failed.
        epoch: that epoch.
        seconds: that it took.
        cause: of its failure.
    """

    number: int
    values: dict[str, Any]
    status: str
    val_cider: float | None
    epoch: int | None
    seconds: float
    cause: str | None


class SearchReporter(Reporter, Protocol):
    """Is told how the search goes on, and how the training of each trial does."""

    def started_trial(self, number: int, recipe: Recipe) -> None:
        """A trial begins, or goes on, by a recipe with its values."""

    def finished_trial(self, trial: Trial, *, best: bool) -> None:
        """A trial is finished and noted; ``best`` if none so far was better."""


class Search:
    """Trains by values that are drawn from a recipe's ranges and makes the best trial the run.

    The folder gets ``search.json``, ``search.jsonl``, a run per trial in ``trials`` and, in the end, what a
    run has: ``best``, ``last``, ``recipe.json``, ``metrics.jsonl`` and, with a test split, ``test.json``.
    States of finished trials are removed.

    Args:
        recipe: with ranges in its section ``search``; its seed is also that of the drawing.
        trials: how many; a search that goes on may have more than before.
        videos: the data set; train and val are needed.
        store: features of all of them.
        folder: the run folder.
        make: gives the trainer of a recipe; takes what :class:`Trainer` takes but device and value width.
        reporter: told of trials, batches and epochs.
        resume: go on with the search in the folder, if there is one.

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
        task_of(captioner_class(recipe.captioner), recipe.data).check(videos, recipe.captioner)
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
        """Run what is left of the trials; returns the best, and its scores on the test split if there is one.

        Raises:
            TrainingError: all trials failed.
        """
        if not self.resumes:
            forget_search(self.folder)
            atomic_write_text(self.folder / SEARCH, json.dumps(self._note(), indent=1))
        over = {trial.number for trial in self.finished}
        for number, values in self.drawn.items():
            if number not in over:
                self._note_finished(self._run_trial(number, values))
        best = self.best
        if best is None:
            first = self.finished[0]
            raise TrainingError(
                f"all {len(self.finished)} trials failed; trial {first.number}: {first.cause}",
                remedy="change the ranges of the search and begin anew with --overwrite",
            )
        self._take_over(self._trial_folder(best.number))
        return best, self._test(best)

    def _run_trial(self, number: int, values: dict[str, Any]) -> Trial:
        """Train to the end.

        A loss that is not finite, too little memory, and data options by which there is nothing to learn from
        are failures of the trial.
        """
        recipe, folder = filled(self.recipe, values), self._trial_folder(number)
        self.reporter.started_trial(number, recipe)
        before, start = _seconds_in(folder / "metrics.jsonl"), time.monotonic()
        best, cause = None, None
        try:
            best = self._train(recipe, folder)
        except (DivergedError, TrainingMemoryError, DataError) as error:
            if isinstance(error, DataError) and not any(name.startswith("data.") for name in values):
                raise
            cause = error.message
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            cause = "out of memory"
        _free_memory()
        return Trial(
            number=number,
            values=values,
            status="done" if best else "failed",
            val_cider=best.cider if best else None,
            epoch=best.epoch if best else None,
            seconds=round(before + time.monotonic() - start, 3),
            cause=cause,
        )

    def _train(self, recipe: Recipe, folder: Path) -> EpochResult:
        """Train in the folder, or go on with what was broken off there; gives the best epoch."""
        trainer = self.make(
            recipe,
            videos=[video for video in self.videos if video.split != "test"],
            store=self.store,
            folder=folder,
            reporter=self.reporter,
            views=views_of([video.id for video in self.videos], self.store.ids()),
            resume=(folder / "recipe.json").is_file(),
        )
        return trainer.run()[0]

    def _note_finished(self, trial: Trial) -> None:
        """Write the trial down, remove the states that nothing goes on from any more, and tell of it."""
        self.finished.append(trial)
        lines = [json.dumps(asdict(finished), ensure_ascii=False) for finished in self.finished]
        atomic_write_text(self.folder / FINISHED, "\n".join(lines) + "\n")
        for finished in self.finished:
            (self._trial_folder(finished.number) / LAST / STATE).unlink(missing_ok=True)
        self.reporter.finished_trial(trial, best=trial is self.best)

    def _take_over(self, trial: Path) -> None:
        """Make the trial's run the folder's; a checkpoint has no configuration until it is whole."""
        gone = [f"best/{CONFIG}", f"{LAST}/{CONFIG}", f"{LAST}/{STATE}", "test.json"]
        for name in gone:
            (self.folder / name).unlink(missing_ok=True)
        checkpoints = [f"{name}/{file}" for name in (LAST, "best") for file in (WEIGHTS, CONFIG)]
        records = ["recipe.json", "metrics.jsonl", RUN, VOCABULARY, FEATURES]
        events = self.folder / EVENTS
        shutil.rmtree(events, ignore_errors=True)
        records += [f"{EVENTS}/{path.name}" for path in (trial / EVENTS).glob("*")]
        for name in (*records, *checkpoints):
            with atomic_path(self.folder / name) as temporary:
                shutil.copyfile(trial / name, temporary)

    def _test(self, best: Trial) -> Evaluation | None:
        """Score the best checkpoint on the test split, if there is one."""
        videos = [video for video in self.videos if video.split == "test"]
        if not videos:
            return None
        return evaluate_run(self.folder, videos, self.store, filled(self.recipe, best.values).decoding)

    def _trial_folder(self, number: int) -> Path:
        return self.folder / TRIALS / f"{number:03d}"

    def _check(self, number: int, values: dict[str, Any]) -> None:
        """Raise UsageError unless the captioner can be made by what was drawn."""
        header = self.store.header
        sizes = {"vocabulary_size": 5, "feature_width": header.width, "locations": header.locations}
        try:
            with torch.device("meta"):  # without memory for its weights
                build(self.recipe.captioner, {**sizes, **filled(self.recipe, values).model})
        except UsageError as error:
            drawn = ", ".join(f"{name} = {value}" for name, value in values.items())
            raise UsageError(f"trial {number} ({drawn}): {error.message}", remedy=error.remedy) from error

    def _note(self) -> dict[str, Any]:
        """What tells this search from others."""
        seen = [self.store.header.to_json(), *map(repr, self.videos)]
        return {
            "format": _FORMAT,
            "recipe": self.recipe.to_dict(),
            "ranges": space_to_dict(self.recipe.search),
            "data": hashlib.sha256("\n".join(seen).encode()).hexdigest(),
        }

    def _load(self) -> list[Trial]:
        """The finished trials of the search in the folder.

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


def filled(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """The recipe with ``values``, by ``section.option``, and nothing left to search.

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
    """Remove the search in the folder, if there is one, and its trials; a run in it stays."""
    for name in (SEARCH, FINISHED):
        (folder / name).unlink(missing_ok=True)
    for trial in (folder / TRIALS).glob("[0-9]*"):
        if trial.name.isdecimal() and (trial / "recipe.json").is_file():
            shutil.rmtree(trial)
    with suppress(OSError):  # it is not there, or holds something else
        (folder / TRIALS).rmdir()


def _seconds_in(log: Path) -> float:
    """Seconds of the epochs in a ``metrics.jsonl``, if there is one."""
    if not log.is_file():
        return 0.0
    return float(sum(json.loads(line)["seconds"] for line in log.read_text(encoding="utf-8").splitlines()))


def _free_memory() -> None:
    """Give back what a trial held: optimizer and schedule refer to each other until they are collected."""
    gc.collect()
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
