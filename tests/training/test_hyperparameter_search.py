from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna import load_study
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from safetensors.torch import load_file, save_file
from small_training import SMALL_M3, SilentReporter, StopAfterSteps, StoppedError, run_outcome, write_dataset

from capvid.captioners.base import CAPTIONERS, build
from capvid.captioners.checkpoint import CONFIG, WEIGHTS, load_checkpoint
from capvid.checkpoints.publishing import load_run
from capvid.datasets.dataset import CaptionedVideo
from capvid.errors import CheckpointError, DataError, TrainingError, UsageError
from capvid.features.feature_store import FeatureStore
from capvid.training.hyperparameter_search import JOURNAL, STUDY, Search, draw, forget_search, with_values
from capvid.training.recipe import Range, Recipe, load_recipe, recipe_names
from capvid.training.reporters import Reporter
from capvid.training.trainer import Trainer

RATES = "search.training.learning_rate={low = 1e-4, high = 2e-2, log = true}"
TINY_SETTINGS = [*SMALL_M3, "training.epochs=2", "training.save_every=0.0", "model.dropout=0.3"]


def make_recipe(*settings: str, ranges: tuple[str, ...] = (RATES, "search.model.hidden=[16,24]")) -> Recipe:
    """Return the tiny recipe with these ranges only."""
    loaded = load_recipe("m3-small", [*TINY_SETTINGS, *ranges, *settings])
    assert isinstance(loaded, Recipe)
    named = [text.partition("=")[0].removeprefix("search.") for text in ranges]
    return replace(loaded, search={name: loaded.search[name] for name in named})


class TrialReporter(Reporter):
    """Records the trials; stops the search after a number of steps, if positive."""

    def __init__(self, steps: int = 0) -> None:
        self.epochs = StopAfterSteps(steps) if steps else SilentReporter()
        self.started_trials: list[int] = []
        self.finished_trials: list[tuple[FrozenTrial, bool]] = []
        self.started, self.stepped = self.epochs.started, self.epochs.stepped
        self.finished_epoch, self.finished = self.epochs.finished_epoch, self.epochs.finished

    def started_trial(self, number: int, recipe: Recipe) -> None:
        self.started_trials.append(number)

    def finished_trial(self, trial: FrozenTrial, *, best: bool) -> None:
        self.finished_trials.append((trial, best))


def make_search(folder: Path, recipe: Recipe | None = None, *, trials: int = 3, **options: Any) -> Search:
    folder.mkdir(exist_ok=True)
    videos, store = write_dataset(folder)
    arguments = {
        "videos": videos,
        "store": store,
        "folder": folder / "run",
        "reporter": TrialReporter(),
        **options,
    }
    make = arguments.pop("make", partial(Trainer, device=torch.device("cpu")))
    return Search(recipe or make_recipe(), trials=trials, make=make, **arguments)


def read_trials(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the trials in the journal of a search."""
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return [
        {
            "number": trial.number + 1,
            "values": trial.params,
            "val_cider": trial.value,
            "epoch": trial.user_attrs["epoch"],
            "cause": trial.user_attrs["cause"],
            "state": trial.state.name,
        }
        for trial in load_study(study_name=STUDY, storage=storage).trials
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """Return an undisturbed search of three trials."""
    search = make_search(tmp_path_factory.mktemp("undisturbed"))
    search.run()
    return search


@pytest.mark.slow
def test_draws_stay_in_range_and_depend_on_seed_and_number() -> None:
    space = {
        "training.learning_rate": Range(low=1e-4, high=1e-1, log=True),
        "model.hidden": Range(low=2, high=64, log=True),
        "model.dropout": Range(low=0.1, high=0.7),
        "training.label_smoothing": Range(low=0.0, high=0.3, step=0.1),
        "model.memory_rows": Range(low=8, high=32, step=8),
        "training.optimizer": ("adam", "adamw"),
    }
    recipe = replace(make_recipe("training.seed=3"), search=space)
    draws = [draw(recipe, number) for number in range(800)]
    assert draws[40:44] == [draw(recipe, number) for number in range(40, 44)]
    assert draws[40] != draw(replace(make_recipe("training.seed=4"), search=space), 40)
    assert draws[40] == draw(replace(recipe, search=dict(reversed(space.items()))), 40)
    columns = {name: [values[name] for values in draws] for name in space}
    rates, widths = columns["training.learning_rate"], columns["model.hidden"]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    thirds = Counter(math.floor(math.log10(rate)) for rate in rates)
    assert set(thirds) == {-4, -3, -2} and min(thirds.values()) > 220  # of 267 each
    assert min(widths) == 2 and max(widths) > 56 and {type(width) for width in widths} == {int}
    assert 330 < sum(width < 11 for width in widths) < 470  # half of the logarithmic range
    dropouts = columns["model.dropout"]
    assert 0.1 <= min(dropouts) < 0.12 and 0.68 < max(dropouts) <= 0.7
    assert sum(dropouts) / 800 == pytest.approx(0.4, abs=0.02)
    assert set(columns["training.label_smoothing"]) == {0.0, 0.1, 0.2, 0.3}
    assert set(columns["model.memory_rows"]) == {8, 16, 24, 32}
    assert 330 < columns["training.optimizer"].count("adam") < 470
    assert len(set(rates)) > 700


@pytest.mark.parametrize("name", [name for name in recipe_names() if not name.endswith("-backbone")])
def test_both_ends_of_every_range_build_a_captioner(name: str) -> None:
    recipe = load_recipe(name)
    assert isinstance(recipe, Recipe) and recipe.search
    assert "search" not in recipe.to_dict()
    for end in (0, -1):
        values = {
            option: (choices.low, choices.high)[end] if isinstance(choices, Range) else choices[end]
            for option, choices in recipe.search.items()
        }
        fixed = with_values(recipe, values)
        assert not fixed.search
        for option, value in values.items():
            section, _, key = option.partition(".")
            assert fixed.to_dict()[section][key] == value
        kind, sizes = CAPTIONERS[fixed.captioner], {"vocabulary_size": 20, "feature_width": 8}
        maps = kind.needs_maps(kind.config_class.from_dict({**sizes, **fixed.model}))
        with torch.device("meta"):
            build(fixed.captioner, {**sizes, **fixed.model, "locations": 4 if maps else 0})


def test_search_spaces_of_the_paper_recipes() -> None:
    ham, memory = load_recipe("ham-msvd"), load_recipe("kv-memory-youtube2text")
    assert isinstance(ham, Recipe) and isinstance(memory, Recipe)
    assert set(ham.search) == {"model.embedding", "model.hidden", "model.memory_width"}
    assert set(memory.search) == {
        *(f"model.{width}" for width in ("hidden", "encoder_hidden", "embedding")),
        "training.learning_rate",
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("search.training.rate=[1]", "search.training.rate: no such option; "),
        ("search.model.depth=[1]", "search.model.depth: no such model option; known are"),
        ("search.self_critical.samples=[2,3]", "search.self_critical.samples: not understood; write"),
        ("search.learning_rate=[1e-3]", "search.learning_rate: not understood; write search.model|data"),
        ("search.training.epochs=3", "search.training.epochs = 3: neither choices nor a range; write"),
        ("search.training.epochs=[]", r"search.training.epochs = \[\]: neither choices nor a range"),
        ("search.training.epochs=[3, 0]", "search.training.epochs must be an integer between 1 .*, got 0"),
        ("search.training.optimizer=['sgd']", "search.training.optimizer must be one of adam, .*, got 'sgd'"),
        ("search.training.epochs={low=1.5, high=3}", "search.training.epochs must be an integer .*, got 1.5"),
        (
            "search.training.epochs={low=1, high=true}",
            "search.training.epochs must be an integer .*, got true",
        ),
        (
            "search.model.dropout={low=0.5, high=1.5}",
            "search.model.dropout must be a number between 0 and 0.99, got 1.5",
        ),
        ("search.model.hidden={low=0, high=9}", "search.model.hidden must be an integer between 1 .*, got 0"),
        ("search.model.hidden={low=9, high=9}", "search.model.hidden: low = 9 must be below high = 9"),
        (
            "search.training.weight_decay={low=0.1, high=inf}",
            "search.training.weight_decay must be a number between 0 and 100, got inf",
        ),
        (
            "search.training.warmup={low=nan, high=0.2}",
            "search.training.warmup must be a number between 0 and 1, got nan",
        ),
        ("search.training.warmup={low=0, high=0.2, log=true}", "with log = true, low must be above 0"),
        ("search.model.hidden={low=1, high=9, log=1}", "search.model.hidden.log = 1: expected true or false"),
        ("search.model.hidden={low=1, high=9, log=true, step=2}", "low must be above 0, and there is no"),
        ("search.model.hidden={low=1, high=9, step=3}", "step = 3: must be positive and lead from low = 1"),
        ("search.model.hidden={low=1, high=9, step=0}", "step = 0: must be positive"),
        ("search.model.hidden={low=1, high=9, step=-2}", "step = -2: must be positive"),
        ("search.model.hidden={low=1, high=9, step=0.5}", "step = 0.5: expected an integer"),
        ("search.model.hidden={low=1}", "search.model.hidden: a range has two ends"),
        (
            "search.model.hidden={low=1, max=9}",
            "search.model.hidden.max: no such key of a range; known are low",
        ),
        ("search.model.standardise={low=false, high=true}", "only numbers have a range; write choices"),
    ],
)
def test_invalid_ranges(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        load_recipe("m3-small", [setting])
    assert "\n" not in str(error.value)


def test_ranges_from_a_file_and_from_settings(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        'captioner = "m3"\n[search]\n"training.beta1" = [0.8, 0.9]\ntraining.epochs = [2, 4]\n'
        "[search.model]\ndropout = { low = 0, high = 0.5 }"
    )
    recipe = load_recipe(str(file), ["search.training.epochs=[7]"])
    assert isinstance(recipe, Recipe)
    assert recipe.search == {
        "training.beta1": (0.8, 0.9),
        "training.epochs": (7,),
        "model.dropout": Range(low=0.0, high=0.5),
    }
    assert {type(recipe.search["model.dropout"].low)} == {float}  # type: ignore[union-attr]


@pytest.mark.slow
def test_best_trial_becomes_the_run(undisturbed: Search) -> None:
    rows = read_trials(undisturbed.folder)
    assert [row["number"] for row in rows] == [1, 2, 3] == undisturbed.reporter.started_trials  # type: ignore[attr-defined]
    assert {row["state"] for row in rows} == {"COMPLETE"}
    assert [row["values"] for row in rows] == [draw(undisturbed.recipe, number) for number in range(3)]
    scores = [row["val_cider"] for row in rows]
    assert len(set(scores)) == 3
    improved = [score == max(scores[: index + 1]) for index, score in enumerate(scores)]
    assert [best for _, best in undisturbed.reporter.finished_trials] == improved  # type: ignore[attr-defined]
    best = rows[scores.index(max(scores))]
    trial = undisturbed.folder / "trials" / f"{best['number']:03d}"
    for name in ("recipe.json", "metrics.jsonl", f"last/{WEIGHTS}", f"best/{WEIGHTS}", f"best/{CONFIG}"):
        assert (undisturbed.folder / name).read_bytes() == (trial / name).read_bytes()
    saved = json.loads((undisturbed.folder / "recipe.json").read_text())
    assert saved["training"]["learning_rate"] == best["values"]["training.learning_rate"]
    assert saved["model"]["hidden"] == best["values"]["model.hidden"]
    log = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    assert (
        max(row["val_cider"] for row in log)
        == best["val_cider"]
        == load_run(undisturbed.folder).checkpoint.info["val_cider"]
    )
    assert log[best["epoch"] - 1]["val_cider"] == best["val_cider"]
    assert not list(undisturbed.folder.rglob("state.safetensors")) and not list(
        undisturbed.folder.rglob("*.tmp")
    )


@pytest.mark.slow
def test_trial_equals_a_run_of_its_recipe(undisturbed: Search, tmp_path: Path) -> None:
    values = draw(undisturbed.recipe, 1)
    videos, store = write_dataset(tmp_path)
    trainer = Trainer(
        with_values(undisturbed.recipe, values),
        videos=videos,
        store=store,
        folder=tmp_path / "alone",
        device=torch.device("cpu"),
        reporter=SilentReporter(),
    )
    trainer.run()
    assert run_outcome(tmp_path / "alone") == run_outcome(undisturbed.folder / "trials" / "002")


@pytest.mark.slow
def test_resumed_search_equals_an_undisturbed_one(undisturbed: Search, tmp_path: Path) -> None:
    reporter = TrialReporter(7)  # in the second trial, as each has four steps
    with pytest.raises(StoppedError):
        make_search(tmp_path, reporter=reporter).run()
    assert reporter.started_trials == [1, 2]
    assert [row["number"] for row in read_trials(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / "best").exists()
    torch.manual_seed(999)
    reporter = TrialReporter()
    resumed = make_search(tmp_path, reporter=reporter, resume=True)
    resumed.run()
    assert (
        reporter.started_trials == [2, 3] and reporter.epochs.steps == 5
    )  # the first of its steps was saved
    assert read_trials(resumed.folder) == read_trials(undisturbed.folder)
    assert run_outcome(resumed.folder) == run_outcome(undisturbed.folder)


@pytest.mark.slow
def test_finished_search_is_extended(undisturbed: Search, tmp_path: Path) -> None:
    make_search(tmp_path, trials=1).run()
    reporter = TrialReporter()
    extended = make_search(tmp_path, trials=3, reporter=reporter, resume=True)
    extended.run()
    assert reporter.started_trials == [2, 3]
    assert read_trials(extended.folder) == read_trials(undisturbed.folder) and run_outcome(
        extended.folder
    ) == run_outcome(undisturbed.folder)
    idle_reporter = TrialReporter()
    best, _ = make_search(tmp_path, trials=1, reporter=idle_reporter, resume=True).run()
    assert idle_reporter.started_trials == [] and best == extended._best()


@pytest.mark.slow
def test_failed_trials(tmp_path: Path) -> None:
    """A non-finite loss, too little memory or data options fail a trial; other errors end the search."""
    errors: dict[int, Exception] = {
        1: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        2: MemoryError(),
        3: torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        5: RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    }

    def make(recipe: Recipe, *, folder: Path, **options: Any) -> Trainer:
        if error := errors.get(int(folder.name)):
            raise error
        trainer = Trainer(recipe, folder=folder, device=torch.device("cpu"), **options)
        if folder.name == "004":
            trainer.captioner.state_dict()["cell.word.weight"].fill_(float("nan"))
        return trainer

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        make_search(tmp_path, trials=6, make=make).run()
    rows = read_trials(tmp_path / "run")
    assert [(row["state"], row["val_cider"], row["epoch"]) for row in rows] == [("FAIL", None, None)] * 4
    assert [row["cause"] for row in rows[:3]] == ["out of memory"] * 3
    assert rows[3]["cause"] == "the loss is nan in epoch 1, batch 1; no epoch is kept yet"
    with pytest.raises(TrainingError, match="all 4 trials failed; trial 1: out of memory; change the ranges"):
        make_search(tmp_path, trials=4, make=make, resume=True).run()
    errors.clear()
    best, _ = make_search(tmp_path, trials=5, make=make, resume=True).run()
    assert best.number + 1 == 5

    count_recipe = make_recipe("training.epochs=1", ranges=("search.data.min_count=[1,999]",))
    numbers = [draw(count_recipe, number)["data.min_count"] for number in range(3)]
    assert set(numbers) == {1, 999}
    search = make_search(tmp_path / "counts", count_recipe)
    search.run()
    assert [trial.value is None for trial in search.finished] == [number == 999 for number in numbers]
    with pytest.raises(DataError, match="no word comes 999 times"):
        make_search(tmp_path / "none", make_recipe("data.min_count=999")).run()


@pytest.mark.slow
def test_resuming_with_other_settings_is_refused(undisturbed: Search) -> None:
    options: dict[str, Any] = {
        "trials": 3,
        "videos": undisturbed.videos,
        "store": undisturbed.store,
        "folder": undisturbed.folder,
        "make": undisturbed.make,
        "reporter": TrialReporter(),
        "resume": True,
    }
    known = "give the {0} that it was begun with, or begin anew with --overwrite"
    message = r"search.journal: a search with another {0}{1}; " + known
    with pytest.raises(CheckpointError, match=message.format("recipe", r" \(training.seed was 1, is 2\)")):
        Search(make_recipe("training.seed=2"), **options)
    sizes = r" \(model.hidden was \[16, 24\], is \[16, 25\]\)"
    with pytest.raises(CheckpointError, match=message.format("ranges", sizes)):
        Search(make_recipe(ranges=(RATES, "search.model.hidden=[16,25]")), **options)
    changed_video = replace(undisturbed.videos[0], captions=("another caption",))
    with pytest.raises(CheckpointError, match=message.format("data", "")):
        Search(make_recipe(), **{**options, "videos": [changed_video, *undisturbed.videos[1:]]})


@pytest.mark.slow
@pytest.mark.parametrize("damage", [slice(None, -9), slice(9, None), slice(None, None, 2), slice(0)])
def test_damaged_search_journal(tmp_path: Path, damage: slice) -> None:
    with pytest.raises(StoppedError):
        make_search(tmp_path, reporter=TrialReporter(5)).run()
    journal = tmp_path / "run" / JOURNAL
    journal.write_bytes(journal.read_bytes()[damage])
    with pytest.raises(CheckpointError, match=r"search\.journal: damaged, no search to resume") as error:
        make_search(tmp_path, resume=True)
    assert "\n" not in str(error.value)


def test_impossible_searches_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="m3-small: the recipe has no ranges to search; write a section"):
        make_search(tmp_path, replace(make_recipe(), search={}))
    folder = tmp_path / "paragraphs"
    folder.mkdir()
    videos, store = write_dataset(folder, paragraphs=True)
    heads = load_recipe("mart-small", ["search.model.hidden=[30]"])
    assert isinstance(heads, Recipe)
    with pytest.raises(TrainingError, match=r"all 1 trials failed; trial 1: .* cannot share the width"):
        make_search(folder, heads, trials=1, videos=videos, store=store).run()
    with pytest.raises(DataError, match="m3 writes one sentence per video and expects captions"):
        make_search(tmp_path, videos=videos, store=store).run()
    lost = CaptionedVideo("lost", "test", ("a man",))
    with pytest.raises(DataError, match=r"have no features \(lost\)"):
        make_search(tmp_path, videos=[*write_dataset(tmp_path)[0], lost])
    assert not (tmp_path / "run" / "best").exists()


@pytest.mark.slow
def test_only_the_best_trial_scores_the_test_split(tmp_path: Path) -> None:
    videos, _ = write_dataset(tmp_path)
    tensors = load_file(tmp_path / "features.safetensors")
    videos += [CaptionedVideo(f"test{n}", "test", videos[2 * n].captions) for n in range(20)]
    save_file({f"test{n}": tensors[f"val{n}"] for n in range(20)}, tmp_path / "test.safetensors")
    store = FeatureStore([tmp_path / "features.safetensors", tmp_path / "test.safetensors"])
    best, evaluation = make_search(tmp_path, trials=2, videos=videos, store=store).run()
    assert evaluation is not None
    assert evaluation.scores["CIDEr-D"] == pytest.approx(
        best.value
    )  # the validation videos under other names
    saved = json.loads((tmp_path / "run" / "test.json").read_text())
    assert saved == {"scores": evaluation.scores, "captions": evaluation.captions}
    assert [path.parent.name for path in (tmp_path / "run").rglob("test.json")] == ["run"]


@pytest.mark.slow
def test_interrupted_copy_leaves_no_partial_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = make_search(tmp_path, trials=2)
    search.run()
    info = load_checkpoint(search.folder).info
    other_trial = next(trial for trial in search.finished if trial != search._best())
    copyfile = shutil.copyfile
    copied: list[str] = []

    def stop_at_config(source: Path, target: Path) -> None:
        copied.append(f"{source.parent.name}/{source.name}")
        if copied[-1] == f"best/{CONFIG}":
            raise StoppedError
        copyfile(source, target)

    monkeypatch.setattr("shutil.copyfile", stop_at_config)
    with pytest.raises(StoppedError):
        search._copy(search._trial_folder(other_trial.number))
    assert f"best/{WEIGHTS}" in copied
    with pytest.raises(CheckpointError, match="no captioner in this folder"):
        load_checkpoint(search.folder)
    monkeypatch.undo()
    make_search(tmp_path, trials=2, resume=True).run()
    assert load_checkpoint(search.folder).info == info


@pytest.mark.slow
def test_new_search_removes_only_files_of_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        make_search(tmp_path, reporter=TrialReporter(7)).run()
    own_folder = tmp_path / "run" / "trials" / "007"
    own_folder.mkdir()
    (own_folder / "notes.txt").write_text("notes")
    reporter = TrialReporter(3)
    with pytest.raises(StoppedError):
        make_search(tmp_path, make_recipe("training.seed=5"), reporter=reporter).run()
    assert reporter.started_trials == [1] and not read_trials(tmp_path / "run")
    assert sorted(path.name for path in own_folder.parent.iterdir()) == ["001", "007"]
    forget_search(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["trials", "007", "notes.txt"]
