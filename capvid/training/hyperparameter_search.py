"""Random search for hyper-parameters (Bergstra and Bengio, JMLR 13, 2012), recorded as an Optuna study.

Each trial is a training run in ``trials/NNN`` of the run folder. Trials are compared by CIDEr-D on the
validation split; only the best is scored on the test split. Finished trials are in the study "capvid" of the
Optuna journal ``search.journal``, with their epoch, seconds and cause of failure. A killed search resumes
after them, from the state of the interrupted trial.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from capvid.captioners.base import CAPTIONERS, build
from capvid.captioners.checkpoint import CONFIG, WEIGHTS
from capvid.datasets.batches import check_features
from capvid.datasets.dataset import CaptionedVideo
from capvid.errors import DataError, TrainingError, UsageError
from capvid.features.feature_store import FeatureStore, views_of
from capvid.training.evaluation import Evaluation, Task, evaluate_run
from capvid.training.optimization import processes
from capvid.training.recipe import Range, Recipe, Space
from capvid.training.reporters import EVENTS, Reporter
from capvid.training.run_folder import FEATURES, RUN, VOCABULARY, check_identity, resuming
from capvid.training.trainer import LAST, STATE, Trainer, is_out_of_memory
from capvid.utils.device import release_memory
from capvid.utils.files import atomic_path

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

JOURNAL, STUDY, TRIALS = "search.journal", "capvid", "trials"
_IDENTITY = "search"  # attribute of the study


class Search:
    """Trains with values sampled from a recipe's search space, and makes the best trial the run.

    Args:
        recipe: recipe with a section ``search``; its seed is also that of the values.
        trials: number of trials; a resumed search may have more than before.
        make: function like :class:`Trainer`, without device and value width.
        others: as for :class:`Trainer`.
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
        reporter: Reporter,
        resume: bool = False,
    ) -> None:
        check_ranges(recipe)
        self.recipe, self.videos, self.store, self.folder = recipe, videos, store, folder
        self.make, self.reporter = make, reporter
        Task(recipe.data, paragraphs=CAPTIONERS[recipe.captioner].paragraphs).check(videos, recipe.captioner)
        check_features(videos, store)
        seed, numbers = recipe.training.seed, range(1, trials + 1)
        self.values = [draw(recipe.search, seed=seed, number=number) for number in numbers]
        width, locations = store.header.width, store.header.locations
        sizes = {"vocabulary_size": 5, "feature_width": width, "locations": locations}
        for number, values in enumerate(self.values, 1):
            try:
                with torch.device("meta"):  # allocates no memory
                    build(recipe.captioner, {**sizes, **with_values(recipe, values).model})
            except UsageError as error:
                text = ", ".join(f"{name} = {value}" for name, value in values.items())
                raise UsageError(f"trial {number} ({text}): {error.message}", remedy=error.remedy) from error
        self.study = self._open() if resume and (folder / JOURNAL).is_file() else None

    @property
    def finished(self) -> Sequence[FrozenTrial]:
        """The finished trials; their ``value`` is the CIDEr-D, None if they failed."""
        return self.study.get_trials(deepcopy=False) if self.study else []

    @property
    def best(self) -> FrozenTrial | None:
        """The finished trial with the highest CIDEr-D, the first of several."""
        done = [trial for trial in self.finished if trial.value is not None]
        return max(done, key=lambda trial: trial.value or 0.0, default=None)

    def run(self) -> tuple[FrozenTrial, Evaluation | None]:
        """Run the remaining trials; return the best, and its scores on the test split if there is one."""
        if self.study is None:
            forget_search(self.folder)
            self.study = self._open()
        self.reporter.started_search(self.finished)
        for number in range(len(self.finished), len(self.values)):
            self.study.add_trial(self._run_trial(number))
            for trial in self.finished:  # nothing resumes from their states any more
                (self._trial_folder(trial.number) / LAST / STATE).unlink(missing_ok=True)
            self.reporter.finished_trial(trial, best=trial == self.best)
        best = self.best
        if best is None:
            first = self.finished[0]
            raise TrainingError(
                f"all {len(self.finished)} trials failed; trial 1: {first.user_attrs['cause']}",
                remedy="change the ranges of the search and begin anew with --overwrite",
            )
        self._copy(self._trial_folder(best.number))
        test = [video for video in self.videos if video.split == "test"]
        if not test:
            return best, None
        decoding = with_values(self.recipe, best.params).decoding
        return best, evaluate_run(self.folder, test, self.store, decoding)

    def _open(self) -> Study:
        """Create or load the study in the folder."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        path = self.folder / JOURNAL
        # a killed process leaves Optuna's lock; ours, of the run folder, protects the journal as well
        path.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
        headers = [self.store.header.to_json(), *map(repr, self.videos)]
        identity = {
            "recipe": self.recipe.to_dict(),
            "ranges": asdict(self.recipe)["search"],
            "data": hashlib.sha256("\n".join(headers).encode()).hexdigest(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        old = path.exists()
        with resuming(path, "search") if old else nullcontext(), _quiet():
            if old and not path.read_bytes().endswith(b"\n"):
                raise ValueError("truncated")  # Optuna would append to the broken line
            storage = JournalStorage(JournalFileBackend(str(path), JournalFileOpenLock(str(path))))
            study = optuna.create_study(
                storage=storage, study_name=STUDY, direction="maximize", load_if_exists=True
            )
            if _IDENTITY not in study.user_attrs:
                study.set_user_attr(_IDENTITY, identity)
            check_identity(path, "a search", study.user_attrs[_IDENTITY], identity)
        return study

    def _run_trial(self, number: int) -> FrozenTrial:
        """Train to the end, or continue an interrupted trial.

        A loss that is not finite, too little memory, and data options that leave nothing to learn from fail
        the trial; other errors end the search.
        """
        from optuna.trial import TrialState, create_trial

        values, folder = self.values[number], self._trial_folder(number)
        recipe = with_values(self.recipe, values)
        self.reporter.started_trial(number + 1, recipe)
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
        except (TrainingError, DataError) as error:
            if isinstance(error, DataError) and not any(name.startswith("data.") for name in values):
                raise
            if error.kind == "training":  # not for these hyper-parameters alone
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
        seconds = round(before + time.monotonic() - start, 3)
        return create_trial(
            state=TrialState.COMPLETE if best else TrialState.FAIL,
            value=best.cider if best else None,
            params=values,
            distributions=distributions(self.recipe.search),
            user_attrs={"epoch": best.epoch if best else None, "seconds": seconds, "cause": cause},
        )

    def _copy(self, trial: Path) -> None:
        """Copy the trial's run into the run folder; the configuration of the best checkpoint comes last."""
        for name in (f"best/{CONFIG}", f"{LAST}/{CONFIG}", f"{LAST}/{STATE}", "test.json"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / EVENTS, ignore_errors=True)
        names = ["recipe.json", "metrics.jsonl", RUN, VOCABULARY, FEATURES]
        names += [f"{EVENTS}/{path.name}" for path in (trial / EVENTS).glob("*")]
        names += [f"{folder}/{file}" for folder in (LAST, "best") for file in (WEIGHTS, CONFIG)]
        for name in names:
            with atomic_path(self.folder / name) as temporary:
                shutil.copyfile(trial / name, temporary)

    def _trial_folder(self, number: int) -> Path:
        return self.folder / TRIALS / f"{number + 1:03d}"


def check_ranges(recipe: Recipe) -> None:
    """Raise UsageError if the search space is empty."""
    if not recipe.search:
        raise UsageError(
            f"{recipe.name}: the recipe has no ranges to search",
            remedy="write a section search, or --set 'search.training.learning_rate=[1e-3,2e-3]', say",
        )


def check_search(
    recipe: Recipe, trials: int | None, *, folder: Path, self_critical: bool, resume: bool
) -> None:
    """Raise UsageError unless the options of a search fit each other and the content of the folder."""
    searched = (folder / JOURNAL).exists()
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
        problem = f"{folder}: holds a training run that is no search"
        raise UsageError(problem, remedy="leave out --search, or choose another -o")


def with_values(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """Return the recipe with ``values``, by ``section.option``, and an empty search space."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        section, _, option = name.partition(".")
        sections.setdefault(section, {})[option] = value
    for section, options in sections.items():
        before = getattr(recipe, section)
        sections[section] = {**before, **options} if section == "model" else replace(before, **options)
    return replace(recipe, search={}, **sections)


def forget_search(folder: Path) -> None:
    """Remove the search in the folder, and its trials; a run in the folder stays."""
    (folder / JOURNAL).unlink(missing_ok=True)
    for trial in (folder / TRIALS).glob("[0-9]*"):
        if trial.name.isdecimal() and (trial / "recipe.json").is_file():
            shutil.rmtree(trial)
    with suppress(OSError):  # it is missing, or holds something else
        (folder / TRIALS).rmdir()


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Return Optuna's distributions of a search space, sorted by name."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    result: dict[str, BaseDistribution] = {}
    for name, values in sorted(space.items()):
        if not isinstance(values, Range):
            result[name] = CategoricalDistribution(values)
        elif isinstance(values.low, int):
            low, high, step = values.low, int(values.high), int(values.step or 1)
            result[name] = IntDistribution(low, high, log=values.log, step=step)
        else:
            result[name] = FloatDistribution(values.low, values.high, log=values.log, step=values.step)
    return result


def draw(space: Space, *, seed: int, number: int) -> dict[str, Any]:
    """Sample the values of trial ``number``, by ``section.option``, from seed and number alone.

    Values of continuous ranges are rounded to four significant digits.
    """
    import numpy as np
    import optuna

    state = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    with _quiet():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=state))
        params = study.ask(distributions(space)).params
    for name, values in space.items():
        if isinstance(values, Range) and not isinstance(params[name], int):
            digits = 4 if values.step is None else 12  # 12: 0.30000000000000004 is 0.3
            params[name] = min(max(float(f"{params[name]:.{digits}g}"), values.low), values.high)
    return {name: params[name] for name in space}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's announcements of new studies."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
