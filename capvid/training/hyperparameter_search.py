"""Random search for hyper-parameters (Bergstra and Bengio, JMLR 13, 2012), recorded as an Optuna study.

Each trial is a training run in ``trials/NNN`` of the run folder. Trials are compared by CIDEr-D on the
validation split; only the best is scored on the test split. Finished trials are in the study "capvid" of the
Optuna journal ``search.journal``, with their epoch, seconds and cause of failure. A killed search resumes
after them, from the state of the interrupted trial.
"""

from __future__ import annotations

import gc
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capvid.captioners.checkpoint import CONFIG, WEIGHTS
from capvid.datasets.batches import check_features
from capvid.datasets.dataset import CaptionedVideo
from capvid.errors import DataError, TrainingError, UsageError
from capvid.features.feature_store import FeatureStore, views_of
from capvid.training.evaluation import Evaluation, evaluate_run
from capvid.training.optimization import processes
from capvid.training.recipe import Range, Recipe
from capvid.training.reporters import EVENTS, Reporter
from capvid.training.run_folder import FEATURES, RUN, VOCABULARY, check_identity, resuming
from capvid.training.trainer import LAST, STATE, Trainer, is_out_of_memory
from capvid.utils.device import release_memory
from capvid.utils.files import atomic_path

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

JOURNAL, STUDY, TRIALS = "search.journal", "capvid", "trials"
_IDENTITY = "search"  # attribute of the study


@dataclass
class Search:
    """Trains with values sampled from a recipe's search space, and makes the best trial the run.

    Args:
        recipe: recipe with a section ``search``; its seed is also that of the values.
        trials: number of trials; a resumed search may have more than before.
        make: function like :class:`Trainer`, without device and value width.
        videos, store, folder, reporter, resume: as for :class:`Trainer`.
    """

    recipe: Recipe
    trials: int
    make: Callable[..., Trainer]
    videos: Sequence[CaptionedVideo]
    store: FeatureStore
    folder: Path
    reporter: Reporter
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.recipe.search:
            raise UsageError(
                f"{self.recipe.name}: the recipe has no ranges to search",
                remedy="write a section search, or --set 'search.training.learning_rate=[1e-3,2e-3]', say",
            )
        check_features(self.videos, self.store)
        if not self.resume:
            forget_search(self.folder)
        self.study = self._open()

    @property
    def finished(self) -> Sequence[FrozenTrial]:
        """The finished trials; their ``value`` is the CIDEr-D, None if they failed."""
        return self.study.get_trials(deepcopy=False)

    def run(self) -> tuple[FrozenTrial, Evaluation | None]:
        """Run the remaining trials; return the best, and its scores on the test split if there is one."""
        self.reporter.started_search(self.finished)
        for number in range(len(self.finished), self.trials):
            self.study.add_trial(self._run_trial(number))
            (self._trial_folder(number) / LAST / STATE).unlink(missing_ok=True)
            self.reporter.finished_trial(self.finished[number], best=number == self._best().number)
        best = self._best()
        self._copy(self._trial_folder(best.number))
        test = [video for video in self.videos if video.split == "test"]
        decoding = with_values(self.recipe, best.params).decoding
        return best, evaluate_run(self.folder, test, self.store, decoding) if test else None

    def _best(self) -> FrozenTrial:
        """Return the trial with the highest CIDEr-D, the first of several; a failed one counts least."""
        best = max(self.finished, key=lambda trial: -1.0 if trial.value is None else trial.value)
        if best.value is None and len(self.finished) >= self.trials:
            raise TrainingError(
                f"all {len(self.finished)} trials failed; trial 1: {best.user_attrs['cause']}",
                remedy="change the ranges of the search and start over with --overwrite",
            )
        return best

    def _open(self) -> Study:
        """Create or load the study in the folder."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        path = self.folder / JOURNAL
        # a killed process leaves Optuna's lock; the run folder's protects the journal as well
        path.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
        data = [self.store.header.to_json(), *map(repr, self.videos)]
        digest = hashlib.sha256("\n".join(data).encode()).hexdigest()
        identity = {"recipe": self.recipe.to_dict(), "ranges": asdict(self.recipe)["search"], "data": digest}
        self.folder.mkdir(parents=True, exist_ok=True)
        with resuming(path, "search"), _quiet_optuna():
            if path.exists() and not path.read_bytes().endswith(b"\n"):
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

        Values that do not fit each other or the data, a loss that is not finite, and too little memory fail
        the trial; other errors end the search.
        """
        from optuna.trial import TrialState, create_trial

        values, folder = draw(self.recipe, number), self._trial_folder(number)
        recipe = with_values(self.recipe, values)
        self.reporter.started_trial(number + 1, recipe)
        start, best, cause = time.monotonic(), None, None
        videos = [video for video in self.videos if video.split != "test"]
        resume = (folder / "recipe.json").is_file()
        views = views_of([video.id for video in self.videos], self.store.ids())
        options = {"folder": folder, "reporter": self.reporter, "resume": resume, "views": views}
        try:
            best, _ = self.make(recipe, videos=videos, store=self.store, **options).run()
        except (TrainingError, UsageError, DataError) as error:
            searches_data = any(name.startswith("data.") for name in values)
            if error.kind == "training" or (isinstance(error, DataError) and not searches_data):
                raise  # affects every trial
            cause = error.message
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            cause = "out of memory"
        gc.collect()  # optimizer and schedule refer to each other
        release_memory()
        seconds = round(time.monotonic() - start, 3)
        return create_trial(
            state=TrialState.COMPLETE if best else TrialState.FAIL,
            value=best.cider if best else None,
            params=values,
            distributions=distributions(self.recipe),
            user_attrs={"epoch": best.epoch if best else None, "seconds": seconds, "cause": cause},
        )

    def _copy(self, trial: Path) -> None:
        """Copy the trial's run into the run folder; the configuration of the best checkpoint comes last."""
        for name in (f"best/{CONFIG}", f"{LAST}/{CONFIG}", "test.json"):
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


def with_values(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """Return the recipe with ``values``, by ``section.option``, and an empty search space."""
    for name, value in values.items():
        section, _, option = name.partition(".")
        before = getattr(recipe, section)
        changed: Any = {**before, option: value} if section == "model" else replace(before, **{option: value})
        recipe = replace(recipe, **{section: changed})
    return replace(recipe, search={})


def check_search(trials: int | None, *, folder: Path, self_critical: bool, resume: bool) -> None:
    """Raise UsageError unless the options of a search fit each other and the content of the folder."""
    searched = (folder / JOURNAL).exists()
    if trials is None and resume and searched:
        raise UsageError(f"{folder}: holds a search", remedy="continue it with --search N")
    if trials is None:
        return
    if processes() > 1:
        raise UsageError("--search trains in one process", remedy="start it without accelerate launch")
    if self_critical:
        raise UsageError("--search and --self-critical exclude each other", remedy="give one of them")
    if resume and not searched and any((folder / name).exists() for name in ("best", "last")):
        problem = f"{folder}: holds a training run that is no search"
        raise UsageError(problem, remedy="remove --search, or choose another -o")


def forget_search(folder: Path) -> None:
    """Remove the search in the folder, and its trials; a run in the folder stays."""
    (folder / JOURNAL).unlink(missing_ok=True)
    for trial in (folder / TRIALS).glob("[0-9]*"):
        if (trial / "recipe.json").is_file():
            shutil.rmtree(trial)
    with suppress(OSError):  # it is missing, or holds something else
        (folder / TRIALS).rmdir()


def distributions(recipe: Recipe) -> dict[str, Any]:
    """Return Optuna's distributions of a recipe's search space, sorted by name."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def distribution(values: Range | tuple[Any, ...]) -> Any:
        if not isinstance(values, Range):
            return CategoricalDistribution(values)
        if isinstance(values.low, int):
            return IntDistribution(values.low, int(values.high), log=values.log, step=int(values.step or 1))
        return FloatDistribution(values.low, values.high, log=values.log, step=values.step)

    return {name: distribution(values) for name, values in sorted(recipe.search.items())}


def draw(recipe: Recipe, number: int) -> dict[str, Any]:
    """Sample the values of trial ``number`` (from 0), by ``section.option``, from the recipe's seed alone."""
    import numpy as np
    import optuna

    seed = np.random.SeedSequence([recipe.training.seed, number + 1]).generate_state(1)[0]
    with _quiet_optuna():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=int(seed)))
    params: dict[str, Any] = study.ask(distributions(recipe)).params
    return {name: params[name] for name in recipe.search}


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Silence Optuna's announcements of new studies, and restore its verbosity."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
