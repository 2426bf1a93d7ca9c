"""Several processes and micro-batches learn the same as one process with full batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_training import STEPS, main, summarise
from small_training import SMALL_M3, make_trainer, write_dataset
from variants import VARIANTS, make

from capvid.datasets.batches import Batch
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training.objectives import TeacherForcedLoss
from capvid.training.optimization import shards_of

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += [
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
]


def launch(*command: str) -> str:
    """Run a command in two processes and return its stderr."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    completed = subprocess.run(
        [*LAUNCH, *command], env=environment, capture_output=True, text=True, timeout=200
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m3", "mart"])
def test_micro_batches_learn_like_full_batches(tmp_path: Path, name: str) -> None:
    summaries = []
    for micro_batches in (1, 3, 9):  # 9 is more than the captions of a batch
        folder = tmp_path / str(micro_batches)
        folder.mkdir()
        trainer = make_trainer(
            folder, name, *STEPS, "training.epochs=3", f"training.accumulate={micro_batches}"
        )
        trainer.run()
        summaries.append(summarise(trainer))
    for other in summaries[1:]:
        assert other["losses"] == pytest.approx(summaries[0]["losses"], abs=1e-5)
        assert other["weights"] == pytest.approx(summaries[0]["weights"], abs=1e-3)


def test_micro_batches_never_outnumber_captions(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", *STEPS)
    shards = list(shards_of(trainer.batches, 1, 0, 500, trainer.accelerator))
    assert sorted(len(shard.micro_batches) for shard in shards) == [6, 7, 7]
    assert all(s.words == sum(int((b.targets != PAD).sum()) for b in s.micro_batches) for s in shards)


@pytest.mark.slow
def test_two_processes_learn_like_one(tmp_path: Path) -> None:
    """Unequal shards, micro-batches, paragraphs, self-critical training; also stopped and resumed."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    main(tmp_path / "one")
    launch(str(Path(__file__).parents[1] / "support" / "distributed_training.py"), str(tmp_path / "two"))
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    for results in (one, two):
        assert results.pop("resumed") == results["undisturbed"]
    one.pop("undisturbed"), two.pop("undisturbed")  # processes draw different dropout
    for name in one:
        a, b = one[name], two[name]
        assert b["losses"] == pytest.approx(a["losses"], abs=1e-5), name
        assert b["ciders"] == pytest.approx(a["ciders"], abs=1e-5), name
        assert b["weights"] == pytest.approx(a["weights"], abs=1e-2), (
            name
        )  # sums of up to thousands of weights
        assert b["samples"] == a["samples"], name
        assert len(set(a["losses"])) == len(a["losses"]) > 1, name


@pytest.mark.slow
def test_train_command_in_two_processes(tmp_path: Path) -> None:
    """Twenty steps have the same losses to 1e-5; only one process reports."""
    videos, _ = write_dataset(tmp_path)
    rows = [{"id": v.id, "split": v.split, "captions": v.captions} for v in videos]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["train", "m3-small", "--data", f"{tmp_path}/data.jsonl", "--device", "cpu"]
    options += ["--features", f"{tmp_path}/features.safetensors", "-o", f"{tmp_path}/two"]
    settings = ["training.epochs=10", "training.patience=10"]
    for setting in [*SMALL_M3, *settings]:
        options += ["--set", setting]
    stderr = launch("-m", "capvid", *options)
    single_process = make_trainer(tmp_path, "m3", *settings)
    single_process.run()
    rows = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(summarise(single_process)["losses"], abs=1e-5)
    assert stderr.count("epoch  10 ") == 1 and stderr.count("saved in") == 1
    assert json.loads((tmp_path / "two/run.json").read_text())["began"]["processes"] == 2


@pytest.mark.parametrize(
    "variant", [name for name, (kind, _) in VARIANTS.items() if "trans" not in kind and "mart" not in kind]
)
def test_smallest_shard_has_every_gradient(variant: str) -> None:
    """A shard of one word or of padding alone has every gradient, or processes would wait for each other."""
    captioner = make(variant).float().eval()
    shape = (1, 1, captioner.config.locations, 5) if getattr(captioner.config, "locations", 0) else (1, 1, 5)
    features, mask = torch.randn(shape), torch.ones(1, 1, dtype=torch.bool)
    inputs = torch.tensor([[BOS, 5]])
    for targets in (torch.tensor([[5, EOS]]), torch.full((1, 2), PAD)):
        captioner.zero_grad(set_to_none=True)
        batch = Batch(features, mask, inputs, targets)
        TeacherForcedLoss(captioner, 0.1)(batch).backward()
        assert [name for name, p in captioner.named_parameters() if p.grad is None] == []
